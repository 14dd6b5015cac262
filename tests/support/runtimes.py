"""Runtimes without a model or torch: the real facade, driver, engine, scheduler and cache around other runners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from radixrt.config import RuntimeConfig
from radixrt.engine.engine import Engine
from radixrt.engine.parts import Parts, request_output
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.limits import RunLimits
from radixrt.output import RequestOutput
from radixrt.planning.simulated import ConstantRunner, NoWeights, simulated_parts
from radixrt.runtime import Runtime
from radixrt.schedule.activity import Activity
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking
from radixrt.schedule.passes import Pass
from radixrt.schedule.request import Request
from radixrt.text.builder import TextBuilder
from tests.support.world.model import VOCAB, continuation
from tests.support.world.runner import SimulatedRunner
from tests.support.world.world import CheckedEngine, Sizes, World

SIZES = Sizes(num_slots=600, num_rows=13, context_len=40, max_running=8, max_samples=16, chunk=64)
CAPTION = "tokens "  # of an answer's text
TOKEN = 7  # that a scheduled Runtime always samples

PassFault = Callable[[Booking], Exception | None]


def scheduled_runtime(
    *,
    pool_tokens: int,
    context_length: int,
    vocab_size: int = 150_000,
    max_running_requests: int = 512,
    num_states: int = 0,
) -> Runtime:
    """A Runtime that always samples the same token. Prompts are token ids."""
    limits = RunLimits(pool_tokens, max_running_requests, num_states=num_states)
    return Runtime.from_parts(
        simulated_parts(ConstantRunner(TOKEN), limits, context_length, vocab_size=vocab_size)
    )


def simulated_runtime(sizes: Sizes = SIZES) -> SimulatedRuntime:
    """A Runtime around the simulation's model. Prompts are token ids below `VOCAB`."""
    world, hooks = World(sizes), Hooks()
    hooks.watch(world.runner)
    scheduler, model = world.scheduler, NoWeights(VOCAB)
    limits = RunLimits(
        scheduler.cache.slots.capacity,
        scheduler.config.max_running_requests,
        scheduler.config.chunked_prefill_size,
    )
    builder = _Builder(model.config, None, context_length=sizes.context_len, seed=0, refusal=scheduler.refusal)
    builder.hooks = hooks
    engine: Any = _SubmittingEngine(world)
    runtime = SimulatedRuntime.from_parts(Parts(RuntimeConfig(), limits, engine, builder, model, hooks.output_of))
    assert isinstance(runtime, SimulatedRuntime)
    runtime.world, runtime.hooks = world, hooks
    return runtime


class Hooks:
    """What a test lets happen, and sees.

    Attributes:
        launch_fault, run_fault: what a pass raises when it is launched, or when it is collected, if anything.
        text_fault: what making the text of a request's answer raises, if anything.
        make_text: what builds the text of a request's answer, given its index.
        on_step: called at the beginning of each step.
        begun: how often each request was in a pass for the first time, by index.
        passes: the indices of the requests of each pass that was launched.
    """

    def __init__(self) -> None:
        self.launch_fault: PassFault = lambda booking: None
        self.run_fault: PassFault = lambda booking: None
        self.text_fault: Callable[[int], Exception | None] = lambda index: None
        self.make_text: Callable[[int], TextBuilder | None] = lambda index: None
        self.on_step: Callable[[], None] = lambda: None
        self.begun: dict[int, int] = {}
        self.passes: list[list[int]] = []

    def watch(self, runner: SimulatedRunner) -> None:
        """See the passes of a runner, and let them fail."""
        launch, collect = runner.launch, runner.collect
        faults: dict[int, Exception] = {}  # of passes in flight

        def watched_launch(pass_: Pass) -> Any:
            booking = runner.booking
            assert booking is not None
            self.passes.append([answer.request.index for answer in booking.answers])
            for answer in runner.newcomers:
                index = answer.request.index
                self.begun[index] = self.begun.get(index, 0) + 1
            if (error := self.launch_fault(booking)) is not None:
                raise error
            handle = launch(pass_)
            if (error := self.run_fault(booking)) is not None:
                faults[id(handle)] = error
            return handle

        def watched_collect(handle: Any) -> Any:
            result = collect(handle)
            if (error := faults.pop(id(handle), None)) is not None:
                raise error
            return result

        runner.launch, runner.collect = watched_launch, watched_collect  # type: ignore[method-assign, assignment]

    def output_of(self, first: Answer) -> RequestOutput:
        if (error := self.text_fault(first.request.index)) is not None:
            raise error
        output = request_output(first, None)
        answers = [replace(one, text=f"{CAPTION}{list(one.token_ids)}") for one in output.outputs]
        return replace(output, outputs=tuple(answers))


class SimulatedRuntime(Runtime):
    """A Runtime whose model is a hash; made by `simulated_runtime`."""

    world: World
    hooks: Hooks

    def step(self) -> list[RequestOutput]:
        self.hooks.on_step()
        return super().step()


class _Builder(RequestBuilder):
    hooks: Hooks

    def build(self, *arguments: Any, **options: Any) -> Request:
        request = super().build(*arguments, **options)
        text = self.hooks.make_text(request.index)
        return request if text is None else replace(request, make_text=lambda: text)


class _SubmittingEngine(CheckedEngine):
    """All that a driver asks of an engine."""

    @property
    def engine(self) -> Engine:
        return self.world.engine

    @property
    def activity(self) -> Activity:
        return self.world.engine.activity

    @property
    def is_cut(self) -> bool:
        return self.world.engine.is_cut

    @property
    def is_lost(self) -> bool:
        return self.world.engine.is_lost

    def step(self, aborts: Sequence[Answer] = (), launched: Callable[[], None] = lambda: None) -> list[Answer]:
        for answer in aborts:
            self.world.abort(answer)
        return self.world.step(launched)  # without a check of everything: `World.check_drained` comes at the end

    def submit_all(self, requests: Sequence[Request], *, in_order: bool = False, **_: Any) -> list[Answer]:
        return self.world.submit_all(requests, in_order=in_order)


def expected_tokens(runtime: SimulatedRuntime, prompt: Sequence[int], count: int) -> list[int]:
    """What the model says to a prompt when nothing goes wrong."""
    return continuation(runtime.world.namespace(), prompt, count, frozenset())
