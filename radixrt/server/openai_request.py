"""What a body of OpenAI's endpoints asks for."""

# Tests: tests/server/test_server.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from radixrt.checks import check_prompt, short
from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.openai import CHAT, COMPLETIONS, as_json, asked_model, asked_prompt, sampling_values
from radixrt.frontend.sampling_aliases import known_parameters, sampling_params_from_dict
from radixrt.parsers.choosing import Parsers
from radixrt.sampling_params import SamplingParams
from radixrt.server.answer_parsing import AnswerParsing, FormRefusal, parsing_of, without_tools
from radixrt.server.limits import Limits
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer

_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # the second is vLLM's
_SLOW = {
    *("messages", "sampling_params"),  # the second may hold a pattern
    *(name for name, field in known_parameters().items() if field == "stop_regex"),
}
_MAX_ECHOED = 5  # log-probabilities at each token of a prompt, which may be long: OpenAI's bound


@dataclass(frozen=True)
class OpenAIRequest:
    """One body.

    Attributes:
        url: of its endpoint.
        model: as the body calls it, or the server.
        prompts: one, or for completions several.
        params: of all their answers.
        reading: how answers are taken apart; None: not at all.
        is_echoed: whether answers begin with their prompts.
        is_streamed: whether chunks are to come as the answer does.
        wants_usage: whether a last chunk is to count tokens.
        wants_running_usage: whether each chunk is to count those of its answer so far.
    """

    url: str
    model: str
    prompts: list[str | list[int] | Chat]
    params: SamplingParams
    reading: AnswerParsing | None
    is_echoed: bool
    is_streamed: bool
    wants_usage: bool
    wants_running_usage: bool

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n


def read_request(
    url: str,
    given: dict[str, Any],
    defaults: SamplingParams,
    limits: Limits,
    parsers: Parsers,
    tokenizer: Tokenizer | None,
    name: str,
    chat_max_tokens: int | None = None,
    refusal: FormRefusal = lambda form: None,
) -> OpenAIRequest:
    """What a body without what is null asks for. A chat that gives no maximum has `chat_max_tokens`, if there is
    such a default.

    `name` is the model's where the body has none; `refusal` tells why a form cannot be one, or None. Raises
    ParameterError, PromptError or TokenizerError, by name.
    """
    own = ("stream", "stream_options", *(("echo",) if url == COMPLETIONS else ()))
    rest = {name: value for name, value in given.items() if name not in own}
    if url == CHAT:
        rest = without_tools(rest)
    streaming = _streaming(given)
    params = sampling_params_from_dict(sampling_values(url, rest, chat_max_tokens), defaults)
    is_echoed = url == COMPLETIONS and _is_echoed(given, params)
    if is_echoed:
        params = replace(params, prompt_logprobs=params.logprobs)
    prompts = _prompts(url, rest)
    check_size(len(prompts), params.n, limits)
    reading = None
    if isinstance(prompts[0], Chat):
        reading, params = parsing_of(given, prompts[0], params, parsers, tokenizer, refusal)
    return OpenAIRequest(url, model_of(rest, limits, name), prompts, params, reading, is_echoed, *streaming)


def is_read_soon(given: Mapping[str, Any]) -> bool:
    """Whether to read a small body takes little time: chats may be rendered, and patterns are compiled."""
    return given.keys().isdisjoint(_SLOW)


def _streaming(given: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether a body asks for a stream, for counts in a last chunk of it, and for counts in each."""
    is_streamed, options = flag_of(given, "stream"), given.get("stream_options", {})
    if not isinstance(options, dict) or not options.keys() <= {*_STREAM_OPTIONS}:
        raise ParameterError(f"stream_options is {as_json(options)}; it may have {', '.join(_STREAM_OPTIONS)}")
    in_the_end, in_each, is_padded = (options.get(name) or False for name in _STREAM_OPTIONS)
    if not all(value is None or isinstance(value, bool) for value in options.values()):
        raise ParameterError(f"stream_options is {as_json(options)}; what it has must be true or false")
    if is_padded:
        raise ParameterError("include_obfuscation is true, which cannot be honoured: events are not padded")
    if "stream_options" in given and not is_streamed:
        raise ParameterError("stream_options needs a stream")
    if in_each and not in_the_end:
        raise ParameterError("continuous_usage_stats needs include_usage")
    return is_streamed, in_the_end, in_each


def flag_of(given: dict[str, Any], name: str) -> bool:
    """Whether a body has a flag, which may be left out. Raises ParameterError."""
    if not isinstance(value := given.get(name, False), bool):
        raise ParameterError(f"{name} is {as_json(value)}; it must be true or false")
    return value


def check_known(given: dict[str, Any], *names: str) -> None:
    """Raise ParameterError for parameters other than the model and these."""
    if unknown := sorted(given.keys() - {"model", *names}):
        raise ParameterError(
            f"unknown parameter {', '.join(map(short, unknown[:5]))}; known are {', '.join(names)}"
        )


def check_size(num_prompts: int, num_answers: int, limits: Limits) -> None:
    """Raise PromptError where a body has too many prompts, or asks for too many answers to each."""
    most = min(limits.answers, limits.pending)
    if num_prompts > limits.prompts or num_prompts * num_answers > most:
        raise PromptError(
            f"the body asks for {num_prompts} x {num_answers} answers; {limits.prompts} prompts and {most} "
            "answers are the most"
        )


def model_of(given: dict[str, Any], limits: Limits, name: str) -> str:
    """What a body calls the model, or its name. Raises ParameterError where that is too long, or PromptError."""
    if (model := asked_model(given, name)) != name and len(model) > limits.model_length:
        raise ParameterError(f"model has {len(model):,} characters; {limits.model_length} are the most")
    return model


def _is_echoed(given: dict[str, Any], params: SamplingParams) -> bool:
    echo = flag_of(given, "echo")
    if echo and (given.get("stream") or params.truncate_prompt_tokens is not None):
        raise ParameterError("echo goes neither with a stream nor with truncate_prompt_tokens; leave one out")
    if echo and (params.logprobs or 0) > _MAX_ECHOED:
        raise ParameterError(f"logprobs is {params.logprobs}; with echo it is {_MAX_ECHOED} at most")
    return echo


def _prompts(url: str, given: dict[str, Any]) -> list[str | list[int] | Chat]:
    """The prompts of a completion; of a chat, whose messages are its prompt, one. Raises like `asked_prompt`."""
    if url == CHAT:
        return [asked_prompt(url, given)]
    prompt: Any = given.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    return [check_prompt("prompt", one) for one in (prompt if several else [prompt])]
