"""A Runtime around the simulation's model: the real driver, engine, scheduler and cache, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from radixrt.engine.driver import Call, Driver
from radixrt.errors import PromptError
from radixrt.output import CompletionOutput, FinishReason, RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking
from radixrt.schedule.passes import Pass
from radixrt.schedule.request import Request, TextStop
from tests.support.scheduled_runtime import Watchable
from tests.support.world.model import VOCAB, continuation
from tests.support.world.world import CheckedEngine, Sizes, World

SIZES = Sizes(num_slots=600, num_rows=13, context_len=40, max_running=8, max_samples=16, chunk=64)
CAPTION = "tokens "  # of an answer's text

PassFault = Callable[[Booking], Exception | None]


class _SubmittingEngine(CheckedEngine):
    """All that a driver asks of an engine."""

    def step(self) -> list[Answer]:
        return self.world.step()  # without a check of everything: `World.check_drained` comes at the end

    @property
    def is_cut(self) -> bool:
        return self.world.engine.is_cut

    def submit_all(self, requests: Sequence[Request], *, in_order: bool = False) -> list[Answer]:
        return self.world.submit_all(requests, in_order=in_order)

    def abort(self, answer: Answer) -> None:
        self.world.abort(answer)


class SimulatedRuntime(Watchable):
    """What a batch asks of a Runtime. Prompts are token ids below `VOCAB`.

    Attributes:
        launch_fault, run_fault: what a pass raises when it is launched, or when it is collected, if anything.
        text_fault: what making the text of a request's answer raises, if anything.
        make_text_stop: of a request, given its index.
        begun: how often each request was in a pass for the first time, by index.
        passes: the indices of the requests of each pass that was launched.
    """

    def __init__(self, sizes: Sizes = SIZES) -> None:
        self.world = World(sizes)
        self.scheduler, self.engine = self.world.scheduler, self.world.engine
        self.driver = Driver(_SubmittingEngine(self.world), self._output)  # type: ignore[arg-type]
        self.launch_fault: PassFault = lambda booking: None
        self.run_fault: PassFault = lambda booking: None
        self.text_fault: Callable[[int], Exception | None] = lambda index: None
        self.make_text_stop: Callable[[int], TextStop | None] = lambda index: None
        self.on_step: Callable[[], None] = lambda: None
        self.begun: dict[int, int] = {}
        self.passes: list[list[int]] = []
        self.tokenizer = None
        self.seed = 0
        self._call = Call()
        self._ids = 0
        self._faults: dict[int, Exception] = {}  # of passes in flight
        runner = self.world.runner
        self._launch, self._collect = runner.launch, runner.collect
        runner.launch, runner.collect = self._watched_launch, self._watched_collect  # type: ignore[method-assign]

    @property
    def has_work(self) -> bool:
        return self.driver.has_work

    def identity(self) -> Mapping[str, Any]:
        return {"weights": "a hash"}

    def prepare(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> Request:
        if max(prompt) >= VOCAB:
            raise PromptError(f"holds token id {max(prompt)}")
        params = sampling_params or SamplingParams()
        self._ids += 1
        text_stop = self.make_text_stop(index)
        return Request(
            index=index,
            prompt_ids=np.array(prompt, dtype=np.int32),
            params=params,
            max_new_tokens=min(params.max_new_tokens, self.world.sizes.context_len - len(prompt)),
            seed=0,
            make_text_stop=None if text_stop is None else lambda: text_stop,
            id=self._ids,
            reusable_len=keep,
        )

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        self.driver.submit(requests, self._call, in_order=in_order)

    def step(self) -> list[RequestOutput]:
        self.on_step()
        self.driver.step()
        ready = list(self._call.ready)
        self._call.ready.clear()
        return ready

    def abort(self, request: Request) -> bool:
        return self.driver.abort(request.id)

    def has_begun(self, request: Request) -> bool:
        return self.driver.has_begun(request.id)

    def _watched_launch(self, batch: Pass) -> object:
        booking = self.world.runner.booking
        assert booking is not None
        self.passes.append([answer.request.index for answer in booking.answers])
        for answer in self.world.runner.newcomers:
            index = answer.request.index
            self.begun[index] = self.begun.get(index, 0) + 1
        if (error := self.launch_fault(booking)) is not None:
            raise error
        handle = self._launch(batch)
        if (error := self.run_fault(booking)) is not None:
            self._faults[id(handle)] = error
        return handle

    def _watched_collect(self, handle: Any) -> Any:
        result = self._collect(handle)
        if (error := self._faults.pop(id(handle), None)) is not None:
            raise error
        return result

    def _output(self, first: Answer) -> RequestOutput:
        if (error := self.text_fault(first.request.index)) is not None:
            raise error
        answers = [
            CompletionOutput(
                index=answer.sample_index,
                text=f"{CAPTION}{answer.output_ids().tolist()}",
                token_ids=tuple(answer.output_ids().tolist()),
                finish_reason=answer.log.finish_reason or FinishReason.ERROR,
                error=answer.log.error,
            )
            for answer in first.family
        ]
        return RequestOutput(
            index=first.request.index,
            id=first.request.id,
            outputs=tuple(answers),
            usage=first.usage(),
            timings=first.timings(),
            prompt_ids=first.request.prompt_ids,
            cause=next((answer.log.cause for answer in first.family if answer.log.cause is not None), None),
        )


def expected_tokens(runtime: SimulatedRuntime, prompt: Sequence[int], count: int) -> list[int]:
    """What the model says to a prompt when nothing goes wrong."""
    return continuation(runtime.world.namespace(), prompt, count, frozenset())
