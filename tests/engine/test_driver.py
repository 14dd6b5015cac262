"""Calls that do not run to their end: cancelled, left, aborted, closed. Nothing stays, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from radixrt import DeviceLostError, FinishReason, ParameterError, RadixrtError, RunLimits, Runtime
from radixrt import SamplingParams as Params
from radixrt.engine import driver as driver_module
from radixrt.engine.parts import Parts
from radixrt.engine.wakers import WOKEN_AT_ONCE, Sleeper, Waker, wake_soon
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.output import StreamChunk
from radixrt.planning.simulated import ConstantRunner, simulated_parts
from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import PassResult
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from scripts.bench_streams import SlowRunner, letters
from tests.support.checkpoints import VOCAB_SIZE, llama, write

pytestmark = pytest.mark.usefixtures("device")

GREEDY = Params(temperature=0, max_new_tokens=24, ignore_eos=True)
ENDLESS = Params(temperature=0, max_new_tokens=1500, ignore_eos=True)
ENDLESS_SHORT = Params(max_new_tokens=190, ignore_eos=True)
SHORT = Params(max_new_tokens=2, ignore_eos=True)
FACTS = "Mira likes Oslo. Tarek counts 374. Hugo keeps boats.\nQ: "
PATIENCE = 60  # seconds, for what takes parts of one


@pytest.fixture(scope="module")
def builtin(device: torch.device) -> Iterator[Runtime]:
    with Runtime(device=device, max_total_tokens=8000) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    with torch.device("cpu"):
        return write(llama(seed=4), tmp_path_factory.mktemp("llama"))


def test_urgent_prompts_of_all_calls_go_first() -> None:
    parts = simulated_parts(ConstantRunner(ord("x")), RunLimits(400, 1), 40, vocab_size=256, tokenizer=letters())
    with Runtime.from_parts(parts) as runtime:
        ended = runtime.generate_iter([[1], [2], [3], [4]], SHORT, priority=[0, 2, 1, 0])
        assert [output.index for output in ended] == [0, 3, 2, 1]
        ended = runtime.generate_iter([[1], [2]], SHORT, priority=3)
        assert [output.index for output in ended] == [0, 1]
        assert runtime.generate([5], SHORT, priority=-1).finish_reason is FinishReason.LENGTH
        runtime.submit(*(runtime.prepare([1], SHORT, index=index, priority=-index) for index in range(3)))
        order: list[int] = []
        while runtime.has_work:
            order += [output.index for output in runtime.step()]
        assert order == [2, 1, 0]


def test_every_call_takes_priorities() -> None:
    parts = simulated_parts(ConstantRunner(ord("x")), RunLimits(400, 8), 40, vocab_size=256, tokenizer=letters())
    submit_all, seen = parts.engine.submit_all, []

    def watched(requests: list[Request], **options: Any) -> list[Answer]:
        seen.extend(request.priority for request in requests)
        return submit_all(requests, **options)

    parts.engine.submit_all = watched  # type: ignore[method-assign]
    with Runtime.from_parts(parts) as runtime:

        async def calls() -> None:
            await runtime.async_generate([[8]], SHORT, priority=[1])
            await runtime.async_generate([8], SHORT, priority=2)
            async for _ in runtime.async_stream([7], SHORT, priority=3):
                pass

        asyncio.run(calls())
        list(runtime.stream([5], SHORT, priority=4))
        list(runtime.generate_iter([[5], [6]], SHORT, priority=(5, 6)))
        runtime.generate([[5], [6]], SHORT, priority=7)
        runtime.submit(runtime.prepare([5], SHORT, priority=8))
        runtime.step()
        runtime.generate([5], SHORT)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 7, 8, 0]


def small(folder: Path, **options: Any) -> Runtime:
    runtime = Runtime(folder, **{"device": torch.get_default_device(), "max_total_tokens": 2000, **options})
    runtime.parts.model.kv_pool.fill(float("nan"))
    return runtime


def nothing_is_left(runtime: Runtime | Parts) -> bool:
    """Whether no request holds a slot, a row, a lock or a place in a queue; of a closed one, given its parts."""
    parts = runtime if isinstance(runtime, Parts) else runtime.parts
    stats, rows = parts.cache.stats(), parts.cache.rows
    return (
        not parts.scheduler.has_work
        and (isinstance(runtime, Parts) or not runtime.has_work)
        and (stats.locked, stats.private, stats.pending) == (0, 0, 0)
        and stats.free + stats.evictable == stats.capacity
        and rows.num_free == rows.max_requests
        and not parts.cache.leases
    )


def unfinished(runtime: Runtime) -> int:
    """Answers that are under way or wait."""
    return runtime.num_running + runtime.num_waiting


def in_time(action: Callable[[], Any]) -> list[Any]:
    """Run `action` in a thread that must come to its end. Returns what it returned or raised, as a list of one."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(action())
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert got, "it hangs"
    return got


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    ticks = threading.Event()
    for _ in range(PATIENCE * 200):
        if condition():
            return
        ticks.wait(0.005)
    pytest.fail("it never comes")


async def tasks_until(condition: Callable[[], bool]) -> None:
    """Wait for another task."""
    for _ in range(PATIENCE * 50):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never comes")


# -- asyncio -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["generate", "generate, many", "stream", "stream, in the loop's body"])
def test_a_cancelled_task_ends_its_requests_alone(builtin: Runtime, kind: str) -> None:
    questions = [f"{FACTS}{question}?\nA:" for question in ("Mira likes", "Tarek counts", "Hugo keeps")]
    expected = [output.text for output in builtin.generate(questions, GREEDY)]
    assert [text.split()[0] for text in expected] == ["Oslo", "374", "boats"]
    chunks: list[Any] = []

    async def to_be_cancelled() -> None:
        if kind == "generate":
            await builtin.async_generate(FACTS, ENDLESS)
        elif kind == "generate, many":
            await builtin.async_generate([FACTS, "Hugo"], replace(ENDLESS, n=2))
        else:
            async for chunk in builtin.async_stream(FACTS, ENDLESS):
                chunks.append(chunk)
                if kind != "stream":
                    await asyncio.sleep(PATIENCE)

    async def everything() -> list[Any]:
        task = asyncio.create_task(to_be_cancelled())
        running = 4 if kind == "generate, many" else 1
        await tasks_until(lambda: len(builtin.parts.scheduler.running) == running)
        await tasks_until(lambda: bool(chunks) or kind.startswith("generate"))
        others = [asyncio.create_task(builtin.async_generate(question, GREEDY)) for question in questions]
        await tasks_until(lambda: unfinished(builtin) == running + len(questions))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        outputs = await asyncio.gather(*others)
        gc.collect()
        await tasks_until(lambda: nothing_is_left(builtin))  # the event loop closes a stream that was in the body
        return outputs

    (outputs,) = in_time(lambda: asyncio.run(everything()))
    assert not isinstance(outputs, Exception), outputs
    assert [output.text for output in outputs] == expected
    assert nothing_is_left(builtin)


def test_a_task_that_is_cancelled_before_its_first_pass(builtin: Runtime) -> None:
    async def everything() -> None:
        for _ in range(20):
            task = asyncio.create_task(builtin.async_generate([FACTS, "Hugo"], ENDLESS))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    assert in_time(lambda: asyncio.run(everything())) == [None]
    assert nothing_is_left(builtin)


# -- what must not be lost ---------------------------------------------------------------------------------


class Panic(BaseException):
    """As the tokenizer's own code raises it: no Exception."""


def panicking_parts(runner: ConstantRunner, place: int) -> Parts:
    """Parts of which one output, by its place among all, cannot be made."""
    parts = simulated_parts(runner, RunLimits(400, 8), 40, vocab_size=50)
    places, output_of = itertools.count(), parts.output_of

    def raising(first: Any) -> Any:
        if next(places) == place:
            raise Panic
        return output_of(first)

    return replace(parts, output_of=raising)


def test_a_panic_ends_its_call_and_leaves_nothing() -> None:
    prompts, names = [[1, 2], [3, 4], [5, 6]], ["a", "b", "c"]
    with Runtime.from_parts(panicking_parts(ConstantRunner(), 0)) as runtime:
        (raised,) = in_time(lambda: caught(lambda: runtime.generate(prompts, SHORT, request_ids=names), Panic))
        assert isinstance(raised, Panic)
        assert nothing_is_left(runtime)
        assert [len(output.token_ids) for output in runtime.generate(prompts, SHORT, request_ids=names)] == [2] * 3


def test_an_id_that_is_given_again_after_a_panic_gets_its_own_output() -> None:
    with Runtime.from_parts(panicking_parts(ConstantRunner(), 0)) as runtime:
        runtime.submit(replace(runtime.prepare([1, 2], SHORT), id="a"))
        assert isinstance(caught(lambda: [runtime.step() for _ in range(20)], Panic), Panic)
        runtime.submit(replace(runtime.prepare([3, 4], replace(SHORT, max_new_tokens=5)), id="a"))
        outputs = [output for _ in range(20) for output in runtime.step()]
        assert [len(output.token_ids) for output in outputs] == [0, 5]
        assert outputs[0].error is not None


def test_a_panic_leaves_no_other_call_waiting() -> None:
    """The last two come after the same pass, and whichever thread steps gets the panic of one."""
    runner = SlowRunner()
    with Runtime.from_parts(panicking_parts(runner, 1)) as runtime:
        outcomes: list[Any] = []

        def call(prompt: list[int]) -> None:
            outcomes.append(caught(lambda: runtime.generate(prompt, SHORT), Panic))

        threads = [threading.Thread(target=call, args=([i, 1],), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: unfinished(runtime) == 3)
        runner.all_there.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(outcomes) == 3, "one waits for ever"
        assert sum(isinstance(one, Panic) for one in outcomes) == 1
        assert nothing_is_left(runtime)


def test_a_panic_leaves_no_task_waiting() -> None:
    """The thread that steps for tasks has it, and they have: later ones get another thread."""

    runner = SlowRunner()

    async def both(runtime: Runtime) -> list[Any]:
        calls = (runtime.async_generate([1], replace(SHORT, max_new_tokens=count)) for count in (2, 30))
        given = asyncio.gather(*calls, return_exceptions=True)
        while unfinished(runtime) < 2 and not runner.all_there.is_set():
            await asyncio.sleep(0.001)
        runner.all_there.set()
        return await given

    with Runtime.from_parts(panicking_parts(runner, 0)) as runtime:
        ((first, second),) = in_time(lambda: asyncio.run(both(runtime)))
        assert "no output can be made" in first.error
        assert isinstance(second, Panic)
        (later,) = in_time(lambda: asyncio.run(both(runtime)))
        assert [len(output.token_ids) for output in later] == [2, 30]
        assert nothing_is_left(runtime)


def test_a_ctrl_c_just_as_a_call_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its traceback lives, the block that it has left is not closed."""
    parts = simulated_parts(ConstantRunner(), RunLimits(400, 8), 40, vocab_size=256, tokenizer=letters())
    leave = contextlib._GeneratorContextManager.__exit__
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(self: Any, *error: Any) -> Any:
        if self.gen.__name__ == "_entered" and parts.scheduler.has_work:
            for interrupt in interrupts:
                raise interrupt
        return leave(self, *error)

    with Runtime.from_parts(parts) as runtime:
        stream = runtime.stream([1, 2], SHORT)
        monkeypatch.setattr(contextlib._GeneratorContextManager, "__exit__", interrupted)
        error = caught(lambda: next(stream), KeyboardInterrupt)
        monkeypatch.undo()
        assert isinstance(error, KeyboardInterrupt)
        assert nothing_is_left(runtime)
        assert len(runtime.generate([1, 2], SHORT).token_ids) == 2
        (output,) = in_time(lambda: runtime.generate([1, 2], SHORT))
        assert len(output.token_ids) == 2


def caught(action: Callable[[], Any], kind: type[BaseException]) -> Any:
    """What an action returns, or raises of that kind."""
    try:
        return action()
    except kind as error:
        return error


def test_what_is_submitted_outlives_a_failure_of_submitting(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = simulated_parts(ConstantRunner(), RunLimits(400, 8), 40, vocab_size=50)
    submit_all, failures = parts.engine.submit_all, iter([MemoryError()])

    def failing(*arguments: Any, **options: Any) -> Any:
        for failure in failures:
            raise failure
        return submit_all(*arguments, **options)

    monkeypatch.setattr(parts.engine, "submit_all", failing)
    with Runtime.from_parts(parts) as runtime:
        runtime.submit(runtime.prepare([1, 2], SHORT))
        with pytest.raises(MemoryError):
            runtime.step()
        outputs = [output for _ in range(4) for output in runtime.step()]
        assert [len(output.token_ids) for output in outputs] == [2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_is_refused_at_once() -> None:
    with Runtime.from_parts(simulated_parts(ConstantRunner(), RunLimits(400, 8), 40, vocab_size=50)) as runtime:
        assert len(runtime.generate([1, 2], SHORT).token_ids) == 2
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            said = []
            for action in (lambda: runtime.generate([1, 2], SHORT), runtime.step, lambda: runtime.num_waiting):
                said.append(str(caught(action, RadixrtError)))
            runtime.close()  # its parent's, who goes on
            os.write(writing, "\n".join(said).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read().splitlines()
        assert os.waitpid(child, 0)[1] == 0
        assert len(said) == 3
        assert all("made before the process was forked" in one for one in said)
        assert len(runtime.generate([1, 2], SHORT).token_ids) == 2


# -- the garbage collector ---------------------------------------------------------------------------------


async def async_call(runtime: Runtime, kind: str) -> None:
    if kind == "async_generate":
        await asyncio.gather(*(runtime.async_generate(prompt, GREEDY) for prompt in (FACTS, "Hugo")))
    else:
        async for _ in runtime.async_stream(FACTS, replace(GREEDY, max_new_tokens=3)):
            assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("kind", ["generate", "iter", "stream", "score", "async_generate", "async_stream"])
def test_it_leaves_old_objects_alone_during_every_call(
    builtin: Runtime, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    runner, counts = builtin.parts.engine.runner, []
    launch = runner.launch

    def launched(batch: Any) -> Any:
        if len(counts) < 3:  # it counts them one by one
            counts.append(gc.get_freeze_count())
        return launch(batch)

    monkeypatch.setattr(runner, "launch", launched)
    few = replace(GREEDY, max_new_tokens=3)
    gc.unfreeze()  # CPython 3.12 begins with some objects frozen
    if kind == "generate":
        builtin.generate(FACTS, GREEDY)
    elif kind == "score":
        builtin.score([FACTS], ["Mira"])
    elif kind in ("iter", "stream"):
        for _ in builtin.generate_iter([FACTS], few) if kind == "iter" else builtin.stream(FACTS, few):
            assert gc.get_freeze_count() > 0
    else:
        asyncio.run(async_call(builtin, kind))
    assert counts
    assert all(counts)
    assert gc.get_freeze_count() == 0


def test_calls_that_fail_or_are_left_early_end_it(builtin: Runtime) -> None:
    stream = builtin.stream(FACTS, ENDLESS)
    next(stream)
    assert gc.get_freeze_count() > 0
    stream.close()
    assert gc.get_freeze_count() == 0
    with pytest.raises(ParameterError):
        builtin.generate(FACTS, GREEDY, request_ids=["a", "b"])
    with pytest.raises(ParameterError):
        next(builtin.stream(FACTS, GREEDY, priority=2**40))
    with pytest.raises(ParameterError):
        asyncio.run(builtin.async_generate([FACTS], [GREEDY, GREEDY]))  # type: ignore[arg-type]
    assert gc.get_freeze_count() == 0
    assert nothing_is_left(builtin)


# -- left early --------------------------------------------------------------------------------------------


def test_what_is_left_half_way_is_released_at_once(builtin: Runtime) -> None:
    prompt, params = f"{FACTS}Hugo keeps?\nA:", replace(GREEDY, max_new_tokens=100)
    expected = builtin.generate(prompt, params)
    kept = builtin.stream(prompt, params)
    next(kept)
    stream, outputs = builtin.stream(FACTS, ENDLESS), builtin.generate_iter([FACTS, "Hugo"], [GREEDY, ENDLESS])
    next(stream)
    next(outputs)
    assert unfinished(builtin) == 3
    stream.close()
    del outputs
    assert unfinished(builtin) == 1
    assert builtin.parts.scheduler.has_work
    *_, last = kept
    assert last.output is not None
    assert last.output.token_ids == expected.token_ids
    assert nothing_is_left(builtin)


@pytest.mark.parametrize("place", ["flush_cache", "step"])
def test_a_stream_may_be_forgotten_wherever_a_thread_is(
    builtin: Runtime, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    forgotten = builtin.stream(FACTS, ENDLESS)
    next(forgotten)

    def collected(*_: Any, **__: Any) -> int:
        forgotten.close()  # as the garbage collector may, at any time
        return 0

    submit_all = builtin.parts.engine.submit_all

    def submitted(requests: Any, **options: Any) -> Any:
        forgotten.close()
        return submit_all(requests, **options)

    def act() -> None:
        with monkeypatch.context() as patch:
            if place == "step":
                patch.setattr(builtin.parts.engine, "submit_all", submitted)
                builtin.generate("Hugo", Params(max_new_tokens=1))
            else:
                patch.setattr(builtin.parts.cache, "flush", collected)
                builtin.flush_cache()
        builtin.generate("Hugo", Params(max_new_tokens=1))

    assert in_time(act) == [None]
    assert nothing_is_left(builtin)


def test_a_call_in_the_middle_of_a_step_is_refused(builtin: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler runs in the main thread wherever that is."""
    runner = builtin.parts.engine.runner
    launch, errors = runner.launch, []

    def handled(batch: Any) -> Any:
        for call in (builtin.close, lambda: builtin.generate("Hugo")):
            with pytest.raises(RadixrtError, match="in the middle of its own work") as error:
                call()
            errors.append(error)
        return launch(batch)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", handled)
        (output,) = in_time(lambda: builtin.generate("Mira", replace(GREEDY, max_new_tokens=2)))
    assert len(errors) >= 2
    assert output.usage.completion_tokens == 2
    assert nothing_is_left(builtin)


@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_ctrl_c_while_requests_are_submitted(builtin: Runtime, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    engine, passes = builtin.parts.engine, builtin.parts.cache.passes_launched
    submit_all = engine.submit_all

    def interrupted(requests: Any, **options: Any) -> Any:
        answers = submit_all(requests, **options)
        signal.raise_signal(signal.SIGINT)
        return answers

    monkeypatch.setattr(engine, "submit_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        builtin.generate("Hugo", ENDLESS) if kind == "generate" else next(builtin.stream("Hugo", ENDLESS))
    assert nothing_is_left(builtin)
    assert builtin.parts.cache.passes_launched - passes < 3  # it was ended, and did not run to its end


# -- aborted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7])
def test_an_abort_ends_all_answers_to_a_prompt(folder: Path, steps: int) -> None:
    prompt, other = list(range(5, 30)), list(range(5, 20))
    with small(folder, chunked_prefill_size=8, max_running_requests=4) as runtime:
        expected = runtime.generate(other, GREEDY).token_ids
        runtime.flush_cache()
        many = runtime.prepare(prompt, Params(n=6, max_new_tokens=40, ignore_eos=True), index=0)
        runtime.submit(many, runtime.prepare(other, GREEDY, index=1))
        outputs = [output for _ in range(steps) for output in runtime.step()]
        assert outputs == []
        assert runtime.abort(many)
        while runtime.has_work or len(outputs) < 2:
            outputs += runtime.step()
        assert nothing_is_left(runtime)
        assert not runtime.abort(many)
    aborted, kept = sorted(outputs, key=lambda output: output.index)
    assert kept.token_ids == expected
    assert [answer.index for answer in aborted.outputs] == list(range(6))
    assert {answer.finish_reason for answer in aborted.outputs} == {FinishReason.ABORT}
    drawn = [len(answer.token_ids) for answer in aborted.outputs]
    assert max(drawn) < 40
    assert aborted.usage.completion_tokens == sum(drawn)


def test_an_answer_that_ends_does_not_ask_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Answer] = []

    def finished(answer: Answer) -> bool:
        asked.append(answer)
        return answer.log.finish_reason is not None

    count = 1000
    with streaming(0.0) as runtime:
        monkeypatch.setattr(Answer, "finished", property(finished))
        output = runtime.generate([5], replace(SHORT, n=count))
    assert len(output.outputs) == count
    assert len(asked) < 5 * count


def test_another_thread_aborts_by_the_callers_id(builtin: Runtime) -> None:
    prompts, params = (
        [FACTS, "Hugo", "Mira"],
        [ENDLESS, replace(GREEDY, max_new_tokens=80), replace(ENDLESS, n=2)],
    )
    expected = builtin.generate(prompts[1], params[1]).token_ids
    got: list[Any] = []

    def generate() -> list[Any]:
        return builtin.generate(prompts, params, request_ids=["a", "b", "c"])

    thread = threading.Thread(target=lambda: got.extend(in_time(generate)), daemon=True)
    thread.start()
    until(lambda: builtin.abort("a"))
    until(lambda: builtin.abort("c"))
    thread.join(PATIENCE)
    (outputs,) = got
    assert [output.id for output in outputs] == ["a", "b", "c"]
    assert [output.finish_reason for output in outputs] == [
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.ABORT,
    ]
    assert outputs[1].token_ids == expected
    assert outputs[0].to_dict()["meta_info"]["id"] == "a"
    assert not any(builtin.abort(name) for name in "abc")
    assert nothing_is_left(builtin)


def test_ids_of_the_callers(builtin: Runtime) -> None:
    stream = builtin.stream(FACTS, ENDLESS, request_id="a")
    assert next(stream).request_id == "a"
    short = Params(max_new_tokens=1)
    with pytest.raises(ParameterError, match="request id 'a' is that of another request that has not ended"):
        builtin.generate([FACTS, "Hugo"], short, request_ids=["b", "a"])
    assert not builtin.abort("b")
    assert builtin.abort("a")
    *_, last = stream
    assert (last.request_id, last.output.id, last.output.finish_reason) == ("a", "a", FinishReason.ABORT)
    assert builtin.generate(FACTS, short, request_ids="a").id == "a"  # free again
    outputs = builtin.generate(["Hugo", [-1]], short, request_ids=["1", "0"], on_error="return")
    assert [output.id for output in outputs] == ["1", "0"]
    assert {output.id for output in builtin.generate_iter(["Hugo"], short, request_ids=["x"])} == {"x"}
    assert asyncio.run(builtin.async_generate("Hugo", short, request_ids="x")).id == "x"
    assert isinstance(builtin.generate("Hugo", short).id, int)
    assert nothing_is_left(builtin)
    for prompts, ids, message in (
        (["a", "b"], ["x", "x"], "request_ids holds 'x' twice"),
        (["a", "b"], ["x"], "there are 1 request_ids for 2 prompts"),
        (["a", "b"], "xy", "request ids are 'xy'; they must be strings, a list of them for a list"),
        ("a", ["x"], r"request ids are \['x'\]"),
        (["a"], [7], r"request ids are \[7\]"),
        (["a"], 7, "request ids are 7"),
    ):
        with pytest.raises(ParameterError, match=message):
            builtin.generate(prompts, short, request_ids=ids)


# -- closed ------------------------------------------------------------------------------------------------


def test_there_is_work_until_a_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread looks within the last step, when no answer is left."""
    parts = simulated_parts(ConstantRunner(ord("x")), RunLimits(400, 1), 40, vocab_size=256, tokenizer=letters())
    engine, seen = parts.engine, []
    process = engine.scheduler.process

    def booked(*arguments: Any) -> list[Answer]:
        ended = process(*arguments)
        if not engine.has_work:
            with ThreadPoolExecutor(1) as looker:
                seen.append(looker.submit(lambda: runtime.has_work).result(PATIENCE))
        return ended

    monkeypatch.setattr(engine.scheduler, "process", booked)
    with Runtime.from_parts(parts) as runtime:
        runtime.generate([1], SHORT)
        assert seen == [True]
        assert not runtime.has_work


def test_there_is_work_though_a_step_begins_as_one_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on its way is none that was cut in two."""
    parts = simulated_parts(ConstantRunner(ord("x")), RunLimits(400, 1), 40, vocab_size=256, tokenizer=letters())
    looker, stepping = threading.current_thread(), threading.Event()

    def is_cut(engine: Any) -> bool:
        if threading.current_thread() is looker and stepper.ident is None:
            stepper.start()
            stepping.wait(0.2)  # it cannot begin before this thread has looked
        return bool(engine.__dict__["is_cut"])

    def next_pass() -> Any:
        stepping.set()
        time.sleep(0.1)
        return planned()

    planned = parts.engine.scheduler.next_pass
    monkeypatch.setattr(parts.engine.scheduler, "next_pass", next_pass)
    monkeypatch.setattr(type(parts.engine), "is_cut", property(is_cut, _set_is_cut), raising=False)
    with Runtime.from_parts(parts) as runtime:
        stepper = threading.Thread(target=runtime.step)
        runtime.submit(runtime.prepare([1], SHORT))
        assert runtime.has_work
        stepper.join(PATIENCE)


def _set_is_cut(engine: Any, value: bool) -> None:
    engine.__dict__["is_cut"] = value


def test_close_during_a_stream(folder: Path) -> None:
    with Runtime(device=torch.get_default_device(), max_total_tokens=4000) as runtime:
        begun, closed = threading.Event(), threading.Event()

        def consume() -> None:
            for _ in runtime.stream(FACTS, ENDLESS):
                begun.set()
                closed.wait(PATIENCE)

        thread_got: list[Any] = []
        thread = threading.Thread(target=lambda: thread_got.extend(in_time(consume)), daemon=True)
        thread.start()
        assert begun.wait(PATIENCE)
        parts = runtime.parts
        assert in_time(runtime.close) == [None]
        closed.set()
        thread.join(PATIENCE)
        assert [str(error) for error in thread_got] == ["the runtime is closed"]
        assert nothing_is_left(parts)
        assert not runtime.abort(0)


def test_close_while_a_stream_and_calls_run(folder: Path) -> None:
    """Whether a call waits for the lock just then, or looks at its outputs, decides what it gets; never a hang."""
    for _ in range(5):
        runtime = Runtime(device=torch.get_default_device(), max_total_tokens=8000)

        def stream(runtime: Runtime = runtime) -> str:
            *_, last = runtime.stream(FACTS, ENDLESS)
            return str(last.output.finish_reason)

        def generate(runtime: Runtime = runtime) -> str:
            outputs = runtime.generate([FACTS, "Hugo"], replace(ENDLESS, n=2))
            return ", ".join({str(answer.finish_reason) for output in outputs for answer in output.outputs})

        def wait(runtime: Runtime = runtime) -> str:
            return str(asyncio.run(runtime.async_generate("Mira", ENDLESS)).finish_reason)

        got: list[Any] = []
        threads = [
            threading.Thread(target=lambda action=action, got=got: got.extend(in_time(action)), daemon=True)
            for action in (stream, generate, wait)
        ]
        for thread in threads:
            thread.start()
        # A fast device may have answered one before the others have come.
        until(lambda runtime=runtime, got=got: unfinished(runtime) >= 4 or got)
        parts = runtime.parts
        assert in_time(runtime.close) == [None]
        for thread in threads:
            thread.join(PATIENCE)
        assert len(got) == 3
        ends = {end for one in got for end in str(one).split(", ")}
        assert ends <= {"abort", "length", "the runtime is closed"}
        assert nothing_is_left(parts)


# -- new weights -------------------------------------------------------------------------------------------


def test_new_weights_let_open_streams_end_first(builtin: Runtime) -> None:
    """Those of the thread that calls, which cannot take their chunks meanwhile, and those of others."""
    from radixrt.builtin import MODEL_PATH

    params = replace(GREEDY, max_new_tokens=60)
    expected = builtin.generate(FACTS, params)
    begun, go_on = threading.Event(), threading.Event()
    other: list[Any] = []

    def consume() -> None:
        for chunk in builtin.stream(FACTS, params):
            other.append(chunk)
            begun.set()
            go_on.wait(PATIENCE)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE)

    def update() -> list[Any]:
        stream = builtin.stream(FACTS, params)
        chunks = [next(stream)]
        builtin.update_weights(MODEL_PATH)
        assert nothing_is_left(builtin)
        return [*chunks, *stream]

    (chunks,) = in_time(update)
    go_on.set()
    thread.join(PATIENCE)
    for got in (chunks, other):
        assert "".join(chunk.text for chunk in got) == expected.text
        assert got[-1].output.token_ids == expected.token_ids
    assert builtin.generate(FACTS, params).token_ids == expected.token_ids


# -- retracted ---------------------------------------------------------------------------------------------


def test_penalties_outlast_a_retraction(folder: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = [[int(token) for token in rng.integers(3, VOCAB_SIZE, 9)] for _ in range(6)]
    # A request that may stop is expected to stop early, so that too many are admitted.
    params = [
        replace(
            GREEDY,
            max_new_tokens=40,
            stop_token_ids=(0,),
            bad_words=[[0]],
            temperature=temperature,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.3,
        )
        for temperature in (0, 0, 0, 1, 1, 1)
    ]
    with small(folder, dtype="float32") as roomy:
        expected = [output.token_ids for output in roomy.generate(prompts, params)]
        plain = roomy.generate(prompts, replace(GREEDY, max_new_tokens=40, bad_words=[[0]]))
        assert [output.token_ids for output in plain[:3]] != expected[:3]
    with small(folder, dtype="float32", max_total_tokens=120) as tight:
        outputs = tight.generate(prompts, params)
        assert tight.parts.scheduler.num_retractions > 0
        assert sum(output.usage.recomputed_tokens for output in outputs) > 0
        assert nothing_is_left(tight)
    assert [output.token_ids for output in outputs] == expected


# -- who steps ---------------------------------------------------------------------------------------------


def streaming(seconds: float = 0.005, *, fault: Exception | None = None, after: int = 0) -> Runtime:
    """A Runtime without a model whose passes take their time; after so many of them they lose the device."""

    class Runner(ConstantRunner):
        passes = 0

        def collect(self, handle: object) -> PassResult:
            self.passes += 1
            time.sleep(seconds)
            if fault is not None and self.passes > after:
                raise fault
            return super().collect(handle)

        def check_device(self, error: Exception) -> None:
            raise DeviceLostError("the device works no more") from error

    limits = RunLimits(10_000, 64)
    return Runtime.from_parts(simulated_parts(Runner(ord("x")), limits, 200, vocab_size=256, tokenizer=letters()))


def test_requests_of_tasks_are_made_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would wait for the interpreter together with the loop's; a task that is cancelled costs no other."""
    build, making, at_once, threads = RequestBuilder.build_all, [], [], set()
    gate = threading.Event()

    def slow(self: RequestBuilder, *args: Any, **options: Any) -> Any:
        making.append(None)
        at_once.append(len(making))
        threads.add(threading.get_ident())
        gate.wait()
        making.pop()
        return build(self, *args, **options)

    async def everything(runtime: Runtime) -> list[Any]:
        gate.clear()
        calls = [asyncio.create_task(runtime.async_generate([n], Params(max_new_tokens=1))) for n in range(9)]
        await asyncio.sleep(0.05)
        calls[5].cancel()
        gate.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(RequestBuilder, "build_all", slow)
    with streaming(0.0) as runtime:
        for _ in range(2):  # each in a loop of its own
            outputs = asyncio.run(everything(runtime))
            assert isinstance(outputs.pop(5), asyncio.CancelledError)
            assert [output.prompt_ids.tolist() for output in outputs] == [[n] for n in range(9) if n != 5]
    assert max(at_once) == 2
    assert threading.get_ident() not in threads


def test_threads_and_tasks_advance_together() -> None:
    """Whoever steps, each stream gets its tokens one by one, and a stream that nobody reads holds nobody up."""
    sizes: dict[str, list[int]] = {}
    params = Params(max_new_tokens=20, ignore_eos=True)
    with streaming() as runtime:
        idle = runtime.stream([9, 9], replace(params, max_new_tokens=150))
        next(idle)

        def thread(name: str) -> None:
            sizes[name] = [len(chunk.token_ids) for chunk in runtime.stream([ord(name)], params)]

        async def task(name: str) -> None:
            sizes[name] = [len(chunk.token_ids) async for chunk in runtime.async_stream([ord(name)], params)]

        async def tasks() -> None:
            await asyncio.gather(*map(task, "abc"))

        actions = [*(partial(thread, name) for name in "defg"), lambda: asyncio.run(tasks())]
        threads = [threading.Thread(target=lambda action=action: in_time(action)) for action in actions]  # type: ignore[misc]
        for one in threads:
            one.start()
        for one in threads:
            one.join(PATIENCE)
        assert sorted(sizes) == list("abcdefg")
        assert {sum(one) for one in sizes.values()} == {20}
        assert max(median(one) for one in sizes.values()) == 1
        assert len(next(idle).token_ids) > 10  # what came meanwhile, as one chunk
        idle.close()
        assert nothing_is_left(runtime)


def test_a_loop_ends_though_tasks_of_another_wait() -> None:
    """`asyncio.run` waits for its threads: the one that steps for its tasks must not go on for those of others."""
    returned = threading.Event()

    def short(runtime: Runtime) -> None:
        asyncio.run(runtime.async_generate([7], replace(GREEDY, max_new_tokens=40)))
        returned.set()

    async def other(runtime: Runtime, number: int) -> bool:
        for _ in range(15):  # of different lengths: there is always one that waits
            if returned.is_set():
                return True
            await runtime.async_generate([number], replace(GREEDY, max_new_tokens=50 + 37 * number))
        return False

    async def others(runtime: Runtime) -> list[bool]:
        return await asyncio.gather(*(other(runtime, number) for number in range(4)))

    with streaming() as runtime:
        thread = threading.Thread(target=short, args=(runtime,))
        thread.start()
        until(lambda: runtime.num_running == 1)  # its loop's thread steps
        (ends,) = in_time(lambda: asyncio.run(others(runtime)))
        thread.join(PATIENCE)
        assert all(ends)
        assert not runtime._driver._proxies


def test_prompts_of_one_stream_advance_together() -> None:
    """Each chunk tells whose it is; leaving ends all of them."""
    lengths = (2, 5, 20)

    async def chunks(runtime: Runtime) -> list[StreamChunk]:
        each = [Params(max_new_tokens=most, ignore_eos=True, n=2) for most in lengths]
        return [chunk async for chunk in runtime.async_stream_all([[5], [6], [7]], each)]

    async def left(runtime: Runtime) -> None:
        stream = runtime.async_stream_all([[5], [6], [7]], replace(SHORT, max_new_tokens=150))
        async with contextlib.aclosing(stream) as some:
            await anext(some)

    with streaming() as runtime:
        told = asyncio.run(chunks(runtime))
        assert [(one.prompt_index, one.index) for one in told[:6]] == [(p, i) for p in range(3) for i in range(2)]
        for prompt, length in enumerate(lengths):
            own = [chunk for chunk in told if chunk.prompt_index == prompt]
            assert sum(len(chunk.token_ids) for chunk in own) == 2 * length
            assert [chunk.output is not None for chunk in own] == [False] * (len(own) - 1) + [True]
            assert own[-1].output.index == prompt  # type: ignore[union-attr]
        began = runtime.activity().decoded_tokens
        asyncio.run(left(runtime))
        assert runtime.activity().decoded_tokens - began < 150
        assert nothing_is_left(runtime)


def test_a_lost_device_ends_the_wait_of_all() -> None:
    runtime = streaming(fault=RuntimeError("an illegal memory access"), after=3)
    errors: list[BaseException] = []

    def thread() -> None:
        with pytest.raises(DeviceLostError) as error:
            list(runtime.stream([5], ENDLESS_SHORT))
        errors.append(error.value)

    async def tasks() -> list[Any]:
        calls = [runtime.async_generate([6], ENDLESS_SHORT) for _ in range(20)]
        return await asyncio.gather(*calls, return_exceptions=True)

    threads = [threading.Thread(target=lambda: in_time(thread)) for _ in range(3)]
    for one in threads:
        one.start()
    (found,) = in_time(lambda: asyncio.run(tasks()))
    for one in threads:
        one.join(PATIENCE)
    assert len(errors) == 3
    assert len(found) == 20
    assert all(isinstance(one, DeviceLostError) for one in found)


def test_closing_ends_the_wait_of_tasks() -> None:
    runtime = streaming()

    async def tasks() -> list[Any]:
        waiting = [asyncio.create_task(runtime.async_generate([7], ENDLESS_SHORT)) for _ in range(5)]
        await tasks_until(lambda: runtime.num_running == 5)
        await asyncio.get_running_loop().run_in_executor(None, runtime.close)
        return await asyncio.gather(*waiting, return_exceptions=True)

    (found,) = in_time(lambda: asyncio.run(tasks()))
    ends = {str(one) if isinstance(one, Exception) else str(one.finish_reason) for one in found}
    assert len(found) == 5
    assert ends <= {"abort", "the runtime is closed"}


def test_one_request_s_text_costs_no_other_stream_its_own() -> None:
    with streaming() as runtime:
        params = Params(max_new_tokens=5, ignore_eos=True)
        good = runtime.stream([5], params)
        bad = runtime.stream([6], replace(params, max_new_tokens=50, stop=("never",)))
        next(good), next(bad)
        stop = next(r for r in runtime.parts.scheduler.running if r.request.max_new_tokens == 50).text
        stop.delta = lambda: (_ for _ in ()).throw(ValueError("half a character"))  # type: ignore
        assert "".join(chunk.text for chunk in good) == "xxxx"
        with pytest.raises(ValueError, match="half a character"):
            list(bad)
        assert nothing_is_left(runtime)


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["text made of the news", "text made for stops"])
def test_who_takes_news_late_gets_fewer_chunks_and_all_of_them(stop: tuple[str, ...]) -> None:
    params = Params(max_new_tokens=20, ignore_eos=True, n=3, logprobs=0, stop=stop)
    with streaming(0.0) as runtime:
        stream = runtime.stream([5], params)
        chunks = [next(stream) for _ in range(3)]
        for _ in range(12):
            runtime.step()
        late = [next(stream) for _ in range(3)]
        chunks += [*late, *stream]
        expected = chunks[-1].output
        assert expected is not None
        assert nothing_is_left(runtime)
    assert [chunk.index for chunk in late] == [0, 1, 2]
    assert min(len(chunk.token_ids) for chunk in late) > 8, "of all passes together"
    assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for answer in expected.outputs:
        own = [chunk for chunk in chunks if chunk.index == answer.index]
        assert "".join(chunk.text for chunk in own) == answer.text == "x" * 20
        assert [token for chunk in own for token in chunk.token_ids] == [*answer.token_ids]
        assert [len(chunk.logprobs or ()) for chunk in own] == [0] * len(own)  # this device computes none
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [FinishReason.LENGTH]


def test_tasks_are_woken_once_a_pass_when_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they work while this thread waits for the device, and not while it plans."""
    woken: list[tuple[int, int]] = []  # tasks, and passes in flight

    with streaming() as runtime:
        engine = runtime.parts.engine

        def noted(wakers: list[Waker], error: Exception | None) -> None:
            if wakers:
                woken.append((len(wakers), len(engine._in_flight)))
            wake_soon(wakers, error)

        async def read(place: int) -> int:
            params = Params(max_new_tokens=20, ignore_eos=True)
            return sum([len(chunk.token_ids) async for chunk in runtime.async_stream([place], params)])

        async def everything() -> list[int]:
            return await asyncio.gather(*map(read, range(8)))

        monkeypatch.setattr(driver_module, "wake_soon", noted)
        assert asyncio.run(everything()) == [20] * 8
        passes = runtime.activity().passes
    assert len(woken) <= passes
    assert max(count for count, _ in woken) == 8
    assert sum(in_flight == 2 for _, in_flight in woken) >= 15


def test_many_tasks_are_woken_in_turns() -> None:
    async def everything() -> list[int]:
        loop = asyncio.get_running_loop()
        sleepers = [Sleeper(loop) for _ in range(3 * WOKEN_AT_ONCE)]
        wake_soon(sleepers)
        done = []
        while not sleepers[-1].told.done():
            await asyncio.sleep(0)
            done.append(sum(sleeper.told.done() for sleeper in sleepers))
        return done

    counts = asyncio.run(everything())
    assert {WOKEN_AT_ONCE, 2 * WOKEN_AT_ONCE, 3 * WOKEN_AT_ONCE} <= set(counts)


def test_a_closed_loop_is_passed_over() -> None:
    async def make() -> Sleeper:
        return Sleeper(asyncio.get_running_loop())

    wake_soon([asyncio.run(make())])


def test_no_pauses_where_threads_are_switched_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[object] = []
    monkeypatch.setattr(driver_module, "with_pauses", lambda items: walked.append(items) or iter(items))
    before = sys.getswitchinterval()
    try:
        for interval, is_walked in ((5e-3, True), (5e-4, False)):
            sys.setswitchinterval(interval)
            walked.clear()
            with streaming(0.0) as runtime:
                asyncio.run(runtime.async_generate([5], Params(max_new_tokens=3)))
            assert bool(walked) == is_walked
    finally:
        sys.setswitchinterval(before)


def test_a_long_queue_is_walked_with_pauses_while_tasks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, next_pass, num_requests = time.sleep, Scheduler.next_pass, 3 * WOKEN_AT_ONCE
    all_there, planning, pauses = threading.Event(), [False], []

    def watched(self: Scheduler) -> Any:
        all_there.wait(10.0)  # the next step gets all others at once
        planning[0] = True
        try:
            return next_pass(self)
        finally:
            planning[0] = False

    async def everything() -> None:
        calls = [runtime.async_generate([n], Params(max_new_tokens=3)) for n in range(num_requests)]
        tasks = [asyncio.create_task(call) for call in calls]
        while runtime.num_waiting + runtime.num_running < num_requests:
            await asyncio.sleep(0.001)
        all_there.set()
        await asyncio.gather(*tasks)

    def pause(seconds: float) -> None:
        if planning[0]:
            pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(Scheduler, "next_pass", watched)
    monkeypatch.setattr("radixrt.engine.driver.time.sleep", pause)
    with streaming(0.0) as runtime:
        asyncio.run(asyncio.wait_for(everything(), 20.0))
        assert len(pauses) in (2, 3)
        pauses.clear()
        runtime.generate([[n] for n in range(60)], Params(max_new_tokens=3))
        assert not pauses


# -- sessions ------------------------------------------------------------------------------------------------


def test_a_session_gets_its_own_outputs_alone() -> None:
    """Beside a call, which gets its own; whoever waits steps for both."""
    parts = simulated_parts(ConstantRunner(ord("x")), RunLimits(4000, 8), 200, vocab_size=256, tokenizer=letters())
    with Runtime.from_parts(parts) as runtime:
        loose = runtime.prepare([9], SHORT)
        runtime.submit(loose)
        with runtime.session() as session:
            assert not session.has_work
            assert session.outputs(0) == []
            requests = [runtime.prepare([5, n], SHORT, index=n) for n in range(3)]
            session.submit(*requests, in_order=True)
            assert session.has_work
            with ThreadPoolExecutor(1) as thread:
                others = thread.submit(runtime.generate, [[1], [2]], SHORT)
                found: list[int] = []
                while session.has_work:
                    found += [output.index for output in session.outputs(PATIENCE)]
                assert len(others.result()) == 2
            assert found == [0, 1, 2]
            session.submit(endless := runtime.prepare([7], ENDLESS_SHORT))
            assert not runtime.has_begun(endless)
            assert session.outputs(0.01) == []
            assert runtime.has_begun(endless)
        assert runtime.has_begun(endless)  # it has ended
        assert [output.id for output in runtime.step()] in ([loose.id], [])
        assert nothing_is_left(runtime)


def test_a_session_waits_no_longer_than_it_says() -> None:
    """Also while another thread steps, and its own requests go on."""
    runner = SlowRunner(ord("x"), seconds=0.001)
    runner.all_there.set()
    parts = simulated_parts(runner, RunLimits(4000, 8), 2000, vocab_size=256, tokenizer=letters())
    with Runtime.from_parts(parts) as runtime, ThreadPoolExecutor(1) as thread, runtime.session() as session:
        long = Params(max_new_tokens=1500, ignore_eos=True)
        other = thread.submit(runtime.generate, [[1]], long)
        session.submit(runtime.prepare([2], long))
        began, waits = time.monotonic(), 0
        while not other.done() and waits < 5:
            assert session.outputs(0.02) == []
            waits += 1
        assert waits == 5
        assert 0.1 <= time.monotonic() - began < 2
        runtime.abort_all()
        other.result()
