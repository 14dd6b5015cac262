"""Lines in the format of OpenAI's Batch API: requests for chat completions and completions, and their responses.

An input line is {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body"}. What
the body gives is honoured, is a label without a part in the answer, or makes the line a bad one that names it:
nothing is passed over. Besides OpenAI's parameters it takes those of `SamplingParams` in the spelling of vLLM and
SGLang, as these engines do. `null` for any of them is the same as leaving it out; the run's defaults stand for
what is left out, max_tokens too. `model` is not checked; the response bears it.

An output line is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, its body a
`chat.completion` or a `text_completion`. Where the line was bad (status 400) or its run failed (500), the body
is {"error": ...} as over HTTP, and `error` is set beside it: a program that looks at either of them notices. Ids
follow from the line's place and custom_id, so that a run that is resumed writes what it would have written.

https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from radixrt.batch.formats.plain_lines import check_token_ids
from radixrt.batch.formats.record import Format, InputRecord, LineError, LineErrorType, ParameterReader, Reply
from radixrt.batch.formats.strict_json import kind, short
from radixrt.batch.tally import ERROR_RECORD, Tally
from radixrt.checks import check_int
from radixrt.errors import ParameterError, PromptError, TokenizerError
from radixrt.frontend.sampling_aliases import known_parameters, with_nearest
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from radixrt.sampling_params import MAX_LOGPROBS
from radixrt.text.chat import checked_messages
from radixrt.text.token_spelling import TokenSpelling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
UNNAMED_MODEL = "radixrt"  # in the response where the body names none

_KEYS = ("custom_id", "method", "url", "body")
_LOWEST_LOGPROB = -9999.0  # what OpenAI writes for a token that is next to impossible

# Labels and hints to OpenAI's servers, which no answer depends on.
_LABELS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)

# What cannot be honoured but for these values, which ask for nothing.
_ONLY: MappingProxyType[str, tuple[object, ...]] = MappingProxyType(
    {
        "audio": (),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_logprobs": (),
        "prompt_logprobs_start": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "stream": (False,),
        "stream_options": (),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
)
_SAMPLING = tuple(name for name in known_parameters() if name not in _ONLY and name != "logprobs")
_OWN = {  # by url: what is read one by one
    CHAT: ("model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
    COMPLETIONS: ("model", "prompt", "max_tokens", "logprobs", "best_of"),
}
_KNOWN = {url: dict.fromkeys((*own, *_SAMPLING, *_ONLY, *_LABELS)).keys() for url, own in _OWN.items()}
_READ = {url: frozenset(own) | _LABELS for url, own in _OWN.items()}  # no parameters of SamplingParams


def openai_reply(custom_id: str | None = None, url: str | None = None, model: str = UNNAMED_MODEL) -> Reply:
    """The reply of a line of this format."""
    return {"format": Format.OPENAI.value, "custom_id": custom_id, "url": url, "model": model}


def read_openai(line: dict[str, Any], parameters: ParameterReader) -> InputRecord:
    """What a line asks for. Raises LineError."""
    custom_id, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    reply = openai_reply(custom_id if isinstance(custom_id, str) else None)
    try:
        _check_line(line)
        assert isinstance(url, str)  # it is one of two
        assert isinstance(body, dict)
        given = {name: value for name, value in body.items() if value is not None}
        reply = openai_reply(custom_id, url, _model(given))
    except ValueError as error:
        raise LineError(LineErrorType.INVALID_LINE, str(error), reply) from None
    try:
        params = parameters.read(_parameters(url, given))
        prompt = _messages(given) if url == CHAT else _prompt(given)
    except ParameterError as error:
        raise LineError(LineErrorType.INVALID_PARAMETERS, str(error), reply) from None
    except (PromptError, TokenizerError) as error:
        raise LineError(LineErrorType.INVALID_PROMPT, str(error), reply) from None
    return InputRecord(prompt, params, reply)


def _check_line(line: dict[str, Any]) -> None:
    """Raise ValueError unless a line has its keys, and each is what it must be."""
    if unknown := [with_nearest(short(key), _KEYS) for key in line if key not in _KEYS]:
        raise ValueError(f"unknown key {', '.join(unknown[:5])}; a line in OpenAI's format has {', '.join(_KEYS)}")
    custom_id, method, url, body = (line.get(key) for key in _KEYS)
    if not isinstance(custom_id, str):
        raise ValueError(f"custom_id is {kind(custom_id)}; it must be a string")
    if method != "POST":
        raise ValueError(f'method is {_shown(method)}; it must be "POST"')
    if url not in (CHAT, COMPLETIONS):
        raise ValueError(f"url is {_shown(url)}; it must be {CHAT} or {COMPLETIONS}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {kind(body)}; it must be an object")


def _model(given: dict[str, Any]) -> str:
    model = given.get("model", UNNAMED_MODEL)
    if not isinstance(model, str):
        raise ValueError(f"model is {kind(model)}; it must be a string")
    return model


def _parameters(url: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a body in the spelling of SamplingParams. Raises ParameterError."""
    if not given.keys() <= _KNOWN[url]:
        unknown = [with_nearest(short(name), _KNOWN[url]) for name in given if name not in _KNOWN[url]]
        raise ParameterError(f"unknown parameter {', '.join(unknown[:5])} for {url}")
    for name in given:
        if name in _ONLY and not any(
            given[name] == harmless and kind(given[name]) == kind(harmless) for harmless in _ONLY[name]
        ):
            harmless = [json.dumps(value) for value in _ONLY[name]]
            instead = f"give {' or '.join(harmless)}, or leave it out" if harmless else "leave it out"
            raise ParameterError(f"{name} is {_shown(given[name])}, which a batch cannot honour; {instead}")
    read = _READ[url]
    values = {name: value for name, value in given.items() if name not in read and name not in _ONLY}
    lengths = [name for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(lengths) == 2 and given[lengths[0]] != given[lengths[1]]:
        raise ParameterError(f"{lengths[0]} and {lengths[1]} are the same parameter; give one of them")
    if lengths:
        values["max_tokens"] = given[lengths[0]]
    if url == CHAT:
        logprobs, top = given.get("logprobs", False), given.get("top_logprobs")
        if not isinstance(logprobs, bool):
            raise ParameterError(f"logprobs is {_shown(logprobs)}; it must be true or false")
        most = 0 if top is None else check_int("top_logprobs", top, 0, MAX_LOGPROBS)
        if most and not logprobs:
            raise ParameterError(f'top_logprobs is {most}; that needs "logprobs": true')
        if logprobs:
            values["logprobs"] = most
    else:
        if "logprobs" in given:
            values["logprobs"] = given["logprobs"]
        if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
            raise ParameterError("best_of is not n, which a batch cannot honour; leave it out")
    return values


def _messages(given: dict[str, Any]) -> list[dict[str, str]]:
    """The messages of a chat, each a role and one text. Raises PromptError or TokenizerError."""
    messages = given.get("messages")
    if not isinstance(messages, list):
        raise PromptError(f"messages is {kind(messages)}; it must be a list of messages")
    return checked_messages([_message(f"messages[{place}]", message) for place, message in enumerate(messages)])


def _message(which: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise PromptError(f"{which} is {kind(message)}; it must be an object")
    content = message.get("content")
    if isinstance(content, str) and len(message) == 2 and "role" in message:
        return message
    # What an answer had but for its text may be in a message that was one, as long as it is empty.
    more = [name for name in message if name not in ("role", "content") and message[name] not in (None, [])]
    if more:
        raise PromptError(f"{which} has {_listed(more)}, which a batch cannot honour; give a role and a content")
    if not isinstance(message.get("role"), str):
        raise PromptError(f"{which}.role is {kind(message.get('role'))}; it must be a string")
    if isinstance(content, list):
        content = "".join(_part(f"{which}.content[{place}]", part) for place, part in enumerate(content))
    if not isinstance(content, str):
        raise PromptError(f"{which}.content is {kind(content)}; it must be a string or a list of text parts")
    return {"role": message["role"], "content": content}


def _part(which: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise PromptError(f"{which} is {kind(part)}; it must be an object")
    if part.get("type") != "text":
        raise PromptError(f"{which} is of type {_shown(part.get('type'))}; a batch takes text alone")
    if more := [name for name in part if name not in ("type", "text") and part[name] is not None]:
        raise PromptError(f"{which} has {_listed(more)}, which a batch cannot honour")
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{which}.text is {kind(text)}; it must be a string")
    return text


def _prompt(given: dict[str, Any]) -> str | list[int]:
    """The one prompt of a completion. Raises PromptError."""
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise PromptError(f"prompt holds {len(prompt)} prompts; give each a line of its own")
        prompt = prompt[0]
    if not isinstance(prompt, (str, list)):
        raise PromptError(f"prompt is {kind(prompt)}; it must be a string or a list of token ids")
    if not prompt:
        raise PromptError("prompt is empty")
    if isinstance(prompt, list):
        check_token_ids("prompt", prompt)
    return prompt


def openai_answer(
    index: int, reply: Reply, output: RequestOutput, *, created: int, spelling: TokenSpelling
) -> dict[str, object]:
    """The record of a line whose request ran; of a failed one an error record."""
    if output.failure is not None:
        return openai_error(index, LineError(LineErrorType.FAILED, output.failure, reply))
    is_chat = reply["url"] == CHAT
    digest = _digest(index, reply)
    choice = _chat_choice if is_chat else _completion_choice
    usage = output.usage
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": reply["model"],
        "choices": [choice(answer, spelling) for answer in output.outputs],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "system_fingerprint": None,
    }
    return _record(digest, reply, 200, body, None)


def openai_error(index: int, error: LineError) -> dict[str, object]:
    """The record of a bad line, or of one whose run failed."""
    failed = error.type is LineErrorType.FAILED
    body: dict[str, object] = {
        "error": {
            "message": error.message,
            "type": "server_error" if failed else "invalid_request_error",
            "param": None,
            "code": error.type,
        }
    }
    # Its line, counted from 1, is the only way back to a line without a custom_id.
    beside: dict[str, object] = {"code": error.type, "message": error.message, "param": None, "line": index + 1}
    return _record(_digest(index, error.reply), error.reply, 500 if failed else 400, body, beside)


def openai_tally(record: dict[str, Any]) -> Tally:
    """The numbers of a record of this format."""
    if record["error"] is not None:
        return ERROR_RECORD
    usage = record["response"]["body"]["usage"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return Tally(1, 0, usage["prompt_tokens"], cached_tokens, usage["completion_tokens"])


def _record(
    digest: str, reply: Reply, status: int, body: dict[str, object], error: dict[str, object] | None
) -> dict[str, object]:
    return {
        "id": f"batch_req_{digest}",
        "custom_id": reply["custom_id"],
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }


def _digest(index: int, reply: Reply) -> str:
    name = f"{index}/{json.dumps(reply['custom_id'])}"
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def _chat_choice(answer: CompletionOutput, spelling: TokenSpelling) -> dict[str, object]:
    logprobs: dict[str, object] | None = None
    if answer.logprobs is not None:
        content = [
            {
                **_token(token.token_id, token.logprob, spelling),
                "top_logprobs": [_token(token_id, logprob, spelling) for token_id, logprob in token.top],
            }
            for token in _of_text(answer, answer.logprobs)
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }


def _token(token_id: int, logprob: float, spelling: TokenSpelling) -> dict[str, object]:
    spelled = spelling.of(token_id)
    return {
        "token": spelled.text,
        "logprob": max(logprob, _LOWEST_LOGPROB),
        "bytes": None if spelled.bytes is None else list(spelled.bytes),
    }


def _completion_choice(answer: CompletionOutput, spelling: TokenSpelling) -> dict[str, object]:
    logprobs: dict[str, object] | None = None
    if answer.logprobs is not None:
        tokens = _of_text(answer, answer.logprobs)
        texts = [spelling.of(token.token_id).text for token in tokens]
        offsets = [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        logprobs = {
            "tokens": texts,
            "token_logprobs": [max(token.logprob, _LOWEST_LOGPROB) for token in tokens],
            "top_logprobs": [_alternatives(token, spelling) for token in tokens],
            "text_offset": offsets[:-1],
        }
    return {
        "text": answer.text,
        "index": answer.index,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }


def _alternatives(token: TokenLogprob, spelling: TokenSpelling) -> dict[str, float]:
    """The likeliest tokens and the drawn one by their texts; of those that spell the same, the likeliest."""
    texts: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        texts.setdefault(spelling.of(token_id).text, max(logprob, _LOWEST_LOGPROB))
    return texts


def _of_text(answer: CompletionOutput, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Those of the tokens that the text is made of: the one that stopped it by its id is none of them."""
    stopped_by_token = answer.finish_reason is FinishReason.STOP and isinstance(answer.matched, int)
    return logprobs[:-1] if stopped_by_token else logprobs


def _listed(names: list[str]) -> str:
    return ", ".join(short(repr(name)) for name in names[:5])


def _shown(value: object) -> str:
    """A value as it stood in the line, or its beginning."""
    return short(json.dumps(value))
