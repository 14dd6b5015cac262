"""OpenAI's protocol: from the body of a request to a prompt and parameters, and from an output to a body.

A parameter is honoured, is a label that no answer depends on, or is refused by name. `SamplingParams` in the
spelling of vLLM and SGLang are parameters too. `null` is no value. `model` is not checked; the answer repeats it.

https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from radixrt.checks import check_int, check_kind, check_prompt, kind, short
from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.sampling_aliases import known_parameters, with_nearest
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, StreamChunk, TokenLogprob, Usage
from radixrt.sampling_params import MAX_LOGPROBS
from radixrt.text.chat import Chat
from radixrt.text.token_spelling import TokenSpelling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
UNNAMED_MODEL = "radixrt"  # in the response where neither the body nor a server names one

# Of a chat's answer, and whether it ends with calls.
MessageOf = Callable[[CompletionOutput], tuple[dict[str, Any], bool]]

_LOWEST_LOGPROB = -9999.0  # what OpenAI writes for a token that is next to impossible

# Labels and hints to OpenAI's servers, which no answer depends on.
_LABELS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
_UNSUPPORTED = (
    *("audio", "moderation", "prediction", "prompt_logprobs", "prompt_logprobs_start", "reasoning_effort"),
    *("stream_options", "web_search_options"),
)
# Parameters that are honoured only with these values, which ask for nothing.
_ONLY: dict[str, tuple[object, ...]] = dict.fromkeys(_UNSUPPORTED, ()) | {
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}
_OF_CHATS = (
    "tools",
    "reasoning_effort",
    "chat_template_kwargs",
    "continue_final_message",
)  # for the template; the last two are vLLM's
_PROMPTS = "add_generation_prompt"  # vLLM's, too
_LENGTHS = ("max_tokens", "max_completion_tokens")
_LENGTH = "max_new_tokens"  # of SamplingParams
_SAMPLING = known_parameters().keys() - _ONLY.keys() - {*_LENGTHS, "logprobs"}  # taken as they are
_KNOWN = {
    CHAT: {
        *_SAMPLING,
        *_ONLY,
        *_LABELS,
        *_LENGTHS,
        "model",
        "messages",
        "logprobs",
        "top_logprobs",
        *_OF_CHATS,
        _PROMPTS,
    },
    COMPLETIONS: {*_SAMPLING, *_ONLY, *_LABELS, "max_tokens", "model", "prompt", "logprobs", "best_of"},
}


def asked_model(given: dict[str, Any], unnamed: str = UNNAMED_MODEL) -> str:
    """What a body without what is null calls the model, or its name otherwise, `unnamed`. Raises ValueError unless
    that is a string.
    """
    return check_kind("model", given.get("model", unnamed), str, "a string")


def sampling_values(url: str, given: dict[str, Any], chat_max_tokens: int | None = None) -> dict[str, Any]:
    """The parameters of a body, `given` without what is null, as of SamplingParams. A chat that gives no maximum
    has `chat_max_tokens`, if there is such a default. Raises ParameterError.
    """
    if not given.keys() <= _KNOWN[url]:
        unknown = [name for name in given if name not in _KNOWN[url]][:5]
        told = ", ".join(with_nearest(short(name), _KNOWN[url]) for name in unknown)
        raise ParameterError(f"unknown parameter {told} for {url}")
    for name, value in given.items():
        harmless = None if url == CHAT and name in _OF_CHATS else _ONLY.get(name)
        if harmless is None or any(value == one and kind(value) == kind(one) for one in harmless):
            continue
        instead = f"give {' or '.join(map(json.dumps, harmless))}, or leave it out" if harmless else "leave it out"
        raise ParameterError(f"{name} is {as_json(value)}, which cannot be honoured; {instead}")
    values = {name: value for name, value in given.items() if name in _SAMPLING}
    if lengths := [given[name] for name in _LENGTHS if name in given]:
        values["max_tokens"] = lengths[0]
        if lengths[0] != lengths[-1]:
            raise ParameterError(f"{' and '.join(_LENGTHS)} are the same parameter; give one of them")
    elif url == CHAT and chat_max_tokens is not None and _LENGTH not in values:
        values[_LENGTH] = chat_max_tokens
    logprobs = given.get("logprobs", False)
    if url == CHAT:
        if not isinstance(logprobs, bool):
            raise ParameterError(f"logprobs is {as_json(logprobs)}; it must be true or false")
        top = check_int("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
        if top and not logprobs:
            raise ParameterError(f'top_logprobs is {top}; that needs "logprobs": true')
        if logprobs:
            values["logprobs"] = top
    else:
        if "logprobs" in given:
            values["logprobs"] = logprobs
        best_of = given.get("best_of", given.get("n", 1))
        if best_of != given.get("n", 1) or isinstance(best_of, bool):
            raise ParameterError(
                f"best_of is {as_json(best_of)}, which is not n; that cannot be honoured: leave it out"
            )
    return values


def asked_prompt(url: str, given: dict[str, Any]) -> str | list[int] | Chat:
    """The prompt of a body without what is null. Raises PromptError, or TokenizerError of a chat."""
    if url == CHAT:
        messages = check_kind("messages", given.get("messages"), list, "a list of messages")
        is_continued = given.get("continue_final_message", False)
        if (prompts := given.get(_PROMPTS, not is_continued)) is not (not is_continued):
            raise PromptError(
                f"{_PROMPTS} is {as_json(prompts)}; it must be {as_json(not is_continued)} here, or left out"
            )
        chat = Chat.of({"messages": messages, **{name: given[name] for name in _OF_CHATS if name in given}})
        return replace(chat, tools=[]) if given.get("tool_choice") == "none" else chat  # the model is to see none
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise PromptError(f"prompt holds {len(prompt)} prompts; give each a line of its own")
        prompt = prompt[0]
    return check_prompt("prompt", prompt)


def answer_body(
    url: str,
    outputs: Sequence[RequestOutput],
    *,
    echoed: Sequence[str] | None = None,
    message_of: MessageOf | None = None,
    includes_stop: bool = False,
    id_digest: str,
    model: str,
    created: int,
    spelling: TokenSpelling,
) -> dict[str, object]:
    """The body of a `chat.completion` or a `text_completion`, with the answers to later prompts after those to
    earlier ones. Those of a completion begin with their prompts if these are `echoed`, as text. `message_of` makes
    the message of a chat's answer, and tells whether it ends with calls. `includes_stop`: texts have what stopped
    them.
    """
    name = "chat.completion" if url == CHAT else "text_completion"
    choices: list[dict[str, object]] = []
    for place, output in enumerate(outputs):
        for answer in output.outputs:
            choice = _choice(url, answer, len(choices), spelling, message_of, includes_stop)
            if echoed is not None:
                choice |= _after_prompt(output, answer, echoed[place], spelling)
            choices.append(choice)
    head = _head(url, name, id_digest=id_digest, model=model, created=created)
    usage = usage_fields(Usage.total(output.usage for output in outputs))
    return {**head, "choices": choices, "usage": usage, "system_fingerprint": None}


def chunk_body(
    url: str,
    index: int,
    text: str | None,
    *,
    delta: Mapping[str, object] | None = None,
    logprobs: Mapping[str, object] | None = None,
    finish_reason: str | None = None,
    counts: tuple[int, int] | None = None,
    id_digest: str,
    model: str,
    created: int,
) -> dict[str, object]:
    """A chunk of a streamed answer, with more of its text, or with none (None) and the role of a chat's answer.
    A `delta` of a chat is given in place of its text. `counts` are tokens of the prompt, and of the answer so far.
    """
    choice: dict[str, object] = {"index": index, "text": text or ""}
    if url == CHAT:
        if delta is None:
            delta = {"role": "assistant", "content": ""} if text is None else {"content": text} if text else {}
        choice = {"index": index, "delta": delta}
    choices = [{**choice, "logprobs": logprobs, "finish_reason": finish_reason}]
    head = _head(url, _chunk_name(url), id_digest=id_digest, model=model, created=created)
    return {**head, "choices": choices, **({} if counts is None else {"usage": _counted(*counts)})}


def usage_body(url: str, usage: Usage, *, id_digest: str, model: str, created: int) -> dict[str, object]:
    """The last chunk of a stream that is to count tokens."""
    head = _head(url, _chunk_name(url), id_digest=id_digest, model=model, created=created)
    return {**head, "choices": [], "usage": usage_fields(usage)}


def _chunk_name(url: str) -> str:
    return "chat.completion.chunk" if url == CHAT else "text_completion"


def _head(url: str, name: str, *, id_digest: str, model: str, created: int) -> dict[str, object]:
    prefix = "chatcmpl" if url == CHAT else "cmpl"
    return {"id": f"{prefix}-{id_digest}", "object": name, "created": created, "model": model}


def usage_fields(usage: Usage) -> dict[str, object]:
    """Token counts as a body has them."""
    counted = _counted(usage.prompt_tokens, usage.completion_tokens)
    return {**counted, "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def _counted(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def error_body(message: str, code: str, *, is_ours: bool) -> dict[str, object]:
    """The body of an error, the server's (`is_ours`) or the request's."""
    type_ = "server_error" if is_ours else "invalid_request_error"
    return {"error": {"message": message, "type": type_, "param": None, "code": code}}


def _choice(
    url: str,
    answer: CompletionOutput,
    index: int,
    spelling: TokenSpelling,
    message_of: MessageOf | None,
    includes_stop: bool,
) -> dict[str, object]:
    choice: dict[str, object] = {"text": answer.text, "index": index}
    has_called = False
    if url == CHAT:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        if message_of is not None:
            message, has_called = message_of(answer)
        choice = {"index": index, "message": message}
    logprobs = logprobs_body(url, shown_logprobs(answer, includes_stop), spelling)
    return {**choice, "logprobs": logprobs, "finish_reason": finish_reason(answer.finish_reason, has_called)}


def finish_reason(reason: FinishReason, has_called: bool) -> str:
    """As OpenAI has it: an answer whose calls are whole, and which was not cut, ends with its calls."""
    return "tool_calls" if has_called and reason is FinishReason.STOP else str(reason)


def is_cut(piece: CompletionOutput | StreamChunk) -> bool:
    """Whether an answer was ended by something else than a token: its length, or a stop string."""
    return piece.finish_reason is not FinishReason.STOP or not isinstance(piece.matched, int)


def shown_logprobs(piece: CompletionOutput | StreamChunk, includes_stop: bool) -> tuple[TokenLogprob, ...] | None:
    """Those of the tokens of a text, without the one that stopped it by its id unless the text `includes_stop`;
    None if they are not asked for.
    """
    if includes_stop:
        return piece.logprobs
    return piece.logprobs[:-1] if piece.logprobs is not None and not is_cut(piece) else piece.logprobs


def logprobs_body(
    url: str, tokens: Sequence[TokenLogprob] | None, spelling: TokenSpelling, offset: int = 0
) -> Mapping[str, object] | None:
    """Log-probabilities of tokens that come after `offset` characters of tokens."""
    if tokens is None:
        return None
    return _chat_logprobs(tokens, spelling) if url == CHAT else _completion_logprobs(tokens, spelling, offset)


def _after_prompt(
    output: RequestOutput, answer: CompletionOutput, prompt: str, spelling: TokenSpelling
) -> dict[str, object]:
    """An answer with its prompt before it: its text, and log-probabilities if asked for.

    These are of all tokens, the one that stopped it included: who scores prompts leaves the last one out.
    """
    scored, drawn = output.prompt_logprobs, answer.logprobs
    if scored is None or drawn is None:
        return {"text": prompt + answer.text}
    first = spelling.of(output.prompt_token_ids[0]).text  # nothing comes before it: no probability
    heads = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    rest = _completion_logprobs((*scored, *drawn), spelling, len(first))
    return {"text": prompt + answer.text, "logprobs": {name: [heads[name], *rest[name]] for name in rest}}


def _chat_logprobs(tokens: Sequence[TokenLogprob], spelling: TokenSpelling) -> dict[str, object]:
    content = []
    for token in tokens:
        top = [_token(token_id, logprob, spelling) for token_id, logprob in token.top]
        content.append({**_token(token.token_id, token.logprob, spelling), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, spelling: TokenSpelling) -> dict[str, object]:
    text, spelled = spelling.of(token_id)
    logprob = max(logprob, _LOWEST_LOGPROB)
    return {"token": text, "logprob": logprob, "bytes": None if spelled is None else list(spelled)}


def _completion_logprobs(
    tokens: Sequence[TokenLogprob], spelling: TokenSpelling, offset: int
) -> dict[str, list[Any]]:
    texts = [spelling.of(token.token_id).text for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, _LOWEST_LOGPROB) for token in tokens],
        "top_logprobs": [_alternatives(token, spelling) for token in tokens],
        "text_offset": [*accumulate(map(len, texts), initial=offset)][:-1],
    }


def _alternatives(token: TokenLogprob, spelling: TokenSpelling) -> dict[str, float]:
    """The likeliest tokens and the drawn one, by text; the likeliest of those with the same text."""
    texts: dict[str, float] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        texts.setdefault(spelling.of(token_id).text, max(logprob, _LOWEST_LOGPROB))
    return texts


def as_json(value: object) -> str:
    """A value as JSON, or the beginning of it."""
    return short(json.dumps(value))
