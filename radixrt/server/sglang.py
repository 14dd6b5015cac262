"""SGLang's `/generate`: prompts and sampling parameters in its names, and answers in its shape."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from radixrt.checks import check_int, check_kind, check_prompt
from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.output import RequestOutput, StreamChunk
from radixrt.runtime import Runtime
from radixrt.sampling_params import MAX_LOGPROBS, SamplingParams
from radixrt.server.answer_events import DONE, AnswerEvents, OnEnd
from radixrt.server.answering import whole_outputs
from radixrt.server.event_frame import event_bytes
from radixrt.server.limits import Limits
from radixrt.server.openai_request import check_known, check_size, flag_of

GENERATE = "/generate"


@dataclass(frozen=True)
class AskedGenerate:
    """One body.

    Attributes:
        prompts, params: of each prompt its own.
        is_listed: whether answers are a list, though there may be one.
        is_streamed: whether events are to come as the answer does.
    """

    prompts: list[str | list[int]]
    params: list[SamplingParams]
    is_listed: bool
    is_streamed: bool
    url = GENERATE

    @property
    def num_answers(self) -> int:
        return sum(params.n for params in self.params)


def read_generate(given: dict[str, Any], defaults: SamplingParams, limits: Limits) -> AskedGenerate:
    """What a body without what is null asks for. Raises ParameterError or PromptError, by name."""
    check_known(
        given, "text", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "stream", "rid"
    )
    if "rid" in given:
        raise ParameterError("rid is not supported: meta_info has the id that the server gives a request")
    name = "text" if "text" in given else "input_ids"
    if given.keys() >= {"text", "input_ids"} or name not in given:
        raise PromptError("the body must have text or input_ids, and not both")
    prompt = given[name]
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    prompts: list[Any] = [check_prompt(name, one) for one in (prompt if several else [prompt])]
    wanted = str if name == "text" else list
    if not all(isinstance(one, wanted) for one in prompts):
        raise PromptError(f"{name} must be {'strings' if name == 'text' else 'token ids'}")
    is_streamed, wants_logprobs = (flag_of(given, flag) for flag in ("stream", "return_logprob"))
    top = check_int("top_logprobs_num", given.get("top_logprobs_num", 0), 0, MAX_LOGPROBS)
    asked = given.get("sampling_params", {})
    listed = asked if isinstance(asked, list) else [asked] * len(prompts)
    if len(listed) != len(prompts):
        raise ParameterError(f"sampling_params are {len(listed)}, and prompts {len(prompts)}")
    params = [
        sampling_params_from_dict(check_kind("sampling_params", one, dict, "an object"), defaults)
        for one in listed
    ]
    if wants_logprobs:
        params = [replace(one, logprobs=top) for one in params]
    elif top:
        raise ParameterError("top_logprobs_num needs return_logprob")
    check_size(len(prompts), max(one.n for one in params), limits)
    return AskedGenerate(prompts, params, several or params[0].n > 1, is_streamed)


class Generating:
    """Answers such bodies by a Runtime, as `Answering` does OpenAI's."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def outputs(self, asked: AskedGenerate, tenant: str | None) -> list[RequestOutput]:
        """All answers to each prompt. Raises RadixrtError, also where none is whole."""
        return whole_outputs(await self._runtime.async_generate(asked.prompts, asked.params, tenant=tenant))

    def body(self, asked: AskedGenerate, outputs: list[RequestOutput]) -> tuple[str, object]:
        """The id of a whole answer, which is the first prompt's, and the answer."""
        answers = [_shown(answer) for output in outputs for answer in output.split()]
        return str(outputs[0].id), answers if asked.is_listed else answers[0]

    def events(self, asked: AskedGenerate, on_end: OnEnd) -> AnswerEvents:
        """Events each with all text so far of one answer, whose place in the list is its `index`."""
        return _Events(asked, on_end)


class _Events(AnswerEvents):
    def __init__(self, asked: AskedGenerate, on_end: OnEnd) -> None:
        super().__init__(len(asked.prompts), on_end)
        self._is_listed = asked.is_listed
        self._firsts = [*accumulate((params.n for params in asked.params), initial=0)]  # of each prompt's answers
        self._answers = [_Streamed() for _ in range(asked.num_answers)]

    def _told(self, chunk: StreamChunk) -> bytes:
        first = self._firsts[chunk.prompt_index]
        if (output := chunk.output) is not None:  # now all is known of each of its answers
            return b"".join(self._event(i, _shown(answer)) for i, answer in enumerate(output.split(), first))
        index = first + chunk.index
        return self._event(index, self._answers[index].followed_by(chunk))

    def _event(self, index: int, shown: dict[str, Any]) -> bytes:
        return event_bytes({**shown, "index": index} if self._is_listed else shown)

    def _ending(self, outputs: list[RequestOutput]) -> bytes:
        self._on_end(str(outputs[0].id), [output.usage for output in outputs])
        return DONE


@dataclass
class _Streamed:
    """One answer as it is streamed: all of it so far."""

    text: str = ""
    ids: list[int] = field(default_factory=list)

    def followed_by(self, chunk: StreamChunk) -> dict[str, Any]:
        """With more of it, as an event has it."""
        self.text += chunk.text
        self.ids += chunk.token_ids
        meta = {"id": str(chunk.request_id), "finish_reason": None, "completion_tokens": len(self.ids)}
        return {"text": self.text, "output_ids": self.ids, "meta_info": meta}


def _shown(output: RequestOutput) -> dict[str, Any]:
    shown = output.to_dict()
    shown["meta_info"]["id"] = str(output.id)
    return shown
