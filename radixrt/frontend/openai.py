"""OpenAI's protocol: from the body of a request to a prompt and parameters, and from an output to a body.

A parameter is honoured, is a label that no answer depends on, or is refused by name. `SamplingParams` in the
spelling of vLLM and SGLang are parameters too. `null` is no value. `model` is not checked; the answer repeats it.

https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from radixrt.checks import check_int, check_token_ids, kind, short
from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.sampling_aliases import known_parameters, with_nearest
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from radixrt.sampling_params import MAX_LOGPROBS
from radixrt.text.chat import checked_messages
from radixrt.text.token_spelling import TokenSpelling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
UNNAMED_MODEL = "radixrt"  # in the response where the body names none

_LOWEST_LOGPROB = -9999.0  # what OpenAI writes for a token that is next to impossible

# Labels and hints to OpenAI's servers, which no answer depends on.
_LABELS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    )
)
_UNSUPPORTED = (
    *("audio", "moderation", "prediction", "prompt_logprobs", "prompt_logprobs_start", "reasoning_effort"),
    *("stream_options", "verbosity", "web_search_options"),
)
# Parameters that are honoured only with these values, which ask for nothing.
_ONLY: dict[str, tuple[object, ...]] = dict.fromkeys(_UNSUPPORTED, ()) | {
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
_SAMPLING = tuple(name for name in known_parameters() if name not in _ONLY and name != "logprobs")
_OWN = {  # by url: what is read one by one
    CHAT: ("model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
    COMPLETIONS: ("model", "prompt", "max_tokens", "logprobs", "best_of"),
}
_KNOWN = {url: dict.fromkeys((*own, *_SAMPLING, *_ONLY, *_LABELS)).keys() for url, own in _OWN.items()}
_READ = {url: frozenset(own) | _LABELS for url, own in _OWN.items()}  # no parameters of SamplingParams


def asked_model(given: dict[str, Any]) -> str:
    """What the body calls the model. Raises ValueError unless that is a string."""
    model = given.get("model", UNNAMED_MODEL)
    if not isinstance(model, str):
        raise ValueError(f"model is {kind(model)}; it must be a string")
    return model


def sampling_values(url: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a body in the spelling of SamplingParams. Raises ParameterError.

    `given` is the body without what is null; so it is below.
    """
    if not given.keys() <= _KNOWN[url]:
        unknown = [with_nearest(short(name), _KNOWN[url]) for name in given if name not in _KNOWN[url]]
        raise ParameterError(f"unknown parameter {', '.join(unknown[:5])} for {url}")
    for name in given:
        if name in _ONLY and not any(
            given[name] == harmless and kind(given[name]) == kind(harmless) for harmless in _ONLY[name]
        ):
            harmless = [json.dumps(value) for value in _ONLY[name]]
            instead = f"give {' or '.join(harmless)}, or leave it out" if harmless else "leave it out"
            raise ParameterError(f"{name} is {as_json(given[name])}, which a batch cannot honour; {instead}")
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
            raise ParameterError(f"logprobs is {as_json(logprobs)}; it must be true or false")
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


def asked_prompt(url: str, given: dict[str, Any]) -> str | list[int] | list[dict[str, str]]:
    """The prompt of a body. Raises PromptError, or TokenizerError of a chat."""
    if url != CHAT:
        return _prompt(given)
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
    # The message of an earlier answer may have its other fields, as long as they are empty.
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
        raise PromptError(f"{which} is of type {as_json(part.get('type'))}; a batch takes text alone")
    if more := [name for name in part if name not in ("type", "text") and part[name] is not None]:
        raise PromptError(f"{which} has {_listed(more)}, which a batch cannot honour")
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{which}.text is {kind(text)}; it must be a string")
    return text


def _prompt(given: dict[str, Any]) -> str | list[int]:
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


def answer_body(
    url: str, output: RequestOutput, *, id_digest: str, model: str, created: int, spelling: TokenSpelling
) -> dict[str, object]:
    """The body of a `chat.completion` or a `text_completion`."""
    usage = output.usage
    choice, prefix, name = _chat_choice, "chatcmpl", "chat.completion"
    if url != CHAT:
        choice, prefix, name = _completion_choice, "cmpl", "text_completion"
    return {
        "id": f"{prefix}-{id_digest}",
        "object": name,
        "created": created,
        "model": model,
        "choices": [choice(answer, spelling) for answer in output.outputs],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "system_fingerprint": None,
    }


def error_body(message: str, code: str, *, is_ours: bool) -> dict[str, object]:
    """The body of an error, the server's (`is_ours`) or the request's."""
    kind_of_error = "server_error" if is_ours else "invalid_request_error"
    return {"error": {"message": message, "type": kind_of_error, "param": None, "code": code}}


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
    """The likeliest tokens and the drawn one, by text; the likeliest of those with the same text."""
    texts: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        texts.setdefault(spelling.of(token_id).text, max(logprob, _LOWEST_LOGPROB))
    return texts


def _of_text(answer: CompletionOutput, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """The tokens of the text, without the one that stopped it by its id."""
    stopped_by_token = answer.finish_reason is FinishReason.STOP and isinstance(answer.matched, int)
    return logprobs[:-1] if stopped_by_token else logprobs


def _listed(names: list[str]) -> str:
    return ", ".join(short(repr(name)) for name in names[:5])


def as_json(value: object) -> str:
    """A value as JSON, or the beginning of it."""
    return short(json.dumps(value))
