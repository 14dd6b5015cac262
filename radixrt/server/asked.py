"""What a body of OpenAI's endpoints asks for."""

# Tests: tests/server/test_server.py

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.openai import CHAT, as_json, asked_model, asked_prompt, sampling_values
from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.sampling_params import SamplingParams
from radixrt.server.limits import Limits
from radixrt.text.chat import Chat

_STREAM_OPTIONS = ("include_usage",)


@dataclass(frozen=True)
class Asked:
    """One body.

    Attributes:
        url: of its endpoint.
        model: as the body calls it.
        prompts: one, or for completions several.
        params: of all their answers.
        is_streamed: whether chunks are to come as the answer does.
        wants_usage: whether a last chunk is to count tokens.
    """

    url: str
    model: str
    prompts: list[str | list[int] | Chat]
    params: SamplingParams
    is_streamed: bool
    wants_usage: bool

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n


def read_asked(url: str, given: dict[str, Any], defaults: SamplingParams, limits: Limits) -> Asked:
    """What a body without what is null asks for. Raises ParameterError, PromptError or TokenizerError, by name."""
    rest = {name: value for name, value in given.items() if name not in ("stream", "stream_options")}
    is_streamed, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(is_streamed, bool):
        raise ParameterError(f"stream is {as_json(is_streamed)}; it must be true or false")
    if not isinstance(options, dict) or not options.keys() <= {*_STREAM_OPTIONS}:
        raise ParameterError(f"stream_options is {as_json(options)}; it may have {', '.join(_STREAM_OPTIONS)}")
    wants_usage = options.get("include_usage", False)
    if not isinstance(wants_usage, bool) or ("stream_options" in given and not is_streamed):
        raise ParameterError("stream_options has include_usage, true or false, and needs a stream")
    params = sampling_params_from_dict(sampling_values(url, rest), defaults)
    prompts = [asked_prompt(url, {**rest, "prompt": one}) for one in _prompts(url, rest)]
    most = min(limits.answers, limits.pending)
    if len(prompts) > limits.prompts or len(prompts) * params.n > most:
        raise PromptError(
            f"the body asks for {len(prompts)} x {params.n} answers; {limits.prompts} prompts and {most} answers "
            "are the most"
        )
    if len(model := asked_model(rest)) > limits.model_length:
        raise ParameterError(f"model has {len(model):,} characters; {limits.model_length} are the most")
    if is_streamed and len(prompts) > 1:
        raise ParameterError(f"the body has {len(prompts)} prompts; a stream answers one")
    return Asked(url, model, prompts, params, is_streamed, wants_usage)


def _prompts(url: str, given: dict[str, Any]) -> list[Any]:
    """The prompts of a completion one by one; of a chat, whose messages are its prompt, one."""
    prompt = given.get("prompt")
    several = url != CHAT and isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    return list(prompt) if several and isinstance(prompt, list) else [prompt]
