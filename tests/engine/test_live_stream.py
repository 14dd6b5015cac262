"""Streams of many answers in one event loop, whose news a function takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from radixrt import DeviceLostError, PromptError, RadixrtError, RunLimits, Runtime
from radixrt import SamplingParams as Params
from radixrt.engine.live_stream import LiveStream
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.output import StreamChunk
from radixrt.planning.simulated import ConstantRunner, simulated_parts
from radixrt.schedule.passes import PassResult
from scripts.bench_streams import letters

TOKENS = 20
PARAMS = Params(max_new_tokens=TOKENS, ignore_eos=True)
ENDLESS = Params(max_new_tokens=190, ignore_eos=True)
T = TypeVar("T")


class Runner(ConstantRunner):
    """Its passes take their time; after so many of them the device is lost."""

    def __init__(self, lost_after: int | None) -> None:
        super().__init__(ord("x"))
        self.passes, self._lost_after = 0, lost_after

    def collect(self, handle: object) -> PassResult:
        self.passes += 1
        time.sleep(0.004)
        if self._lost_after is not None and self.passes > self._lost_after:
            raise ValueError
        return super().collect(handle)

    def check_device(self, error: Exception) -> None:
        raise DeviceLostError("the device works no more") from error


def streaming(lost_after: int | None = None) -> Runtime:
    limits = RunLimits(20_000, 64)
    return Runtime.from_parts(
        simulated_parts(Runner(lost_after), limits, 200, vocab_size=256, tokenizer=letters())
    )


async def listened(
    runtime: Runtime, place: int, take: Callable[[LiveStream], list[StreamChunk]], params: Params = PARAMS
) -> list[list[StreamChunk]]:
    """The chunks that each call of a listener has taken."""
    calls: list[list[StreamChunk]] = []

    def on_news() -> bool:
        calls.append(take(stream))
        return True

    async with runtime.live_stream([[place]], params) as stream:
        await stream.listen(on_news)
        assert stream.is_over
    return calls


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def counted(calls: list[list[StreamChunk]]) -> int:
    return sum(len(chunk.token_ids) for chunks in calls for chunk in chunks)


def test_each_has_its_news_once_a_pass_in_the_loop_s_thread() -> None:
    threads: set[int] = set()

    def take(stream: LiveStream) -> list[StreamChunk]:
        threads.add(threading.get_ident())
        return list(stream.take())

    async def everything() -> list[list[list[StreamChunk]]]:
        return await asyncio.gather(*(listened(runtime, place, take) for place in range(40)))

    with streaming() as runtime:
        found = run(everything())
        passes = runtime.activity().passes
    assert threads == {threading.get_ident()}
    for place, calls in enumerate(found):
        assert counted(calls) == TOKENS
        assert "".join(chunk.text for chunks in calls for chunk in chunks) == "x" * TOKENS
        (output,) = [chunk.output for chunks in calls for chunk in chunks if chunk.output is not None]
        assert output.prompt_ids.tolist() == [place]
        assert TOKENS / 2 < len(calls) <= passes + 1  # one when it begins to listen


def test_a_late_loop_has_fewer_calls_and_all_tokens() -> None:
    """One call for all passes that it has missed, not one for each."""

    def take(stream: LiveStream) -> list[StreamChunk]:
        calls.append(None)
        if len(calls) == 3:
            time.sleep(0.2)  # passes go on
        return list(stream.take())

    calls: list[None] = []
    with streaming() as runtime:
        found = run(listened(runtime, 5, take, ENDLESS))
    assert counted(found) == ENDLESS.max_new_tokens
    assert max(map(counted, ([chunks] for chunks in found))) > 20
    assert sum(not chunks for chunks in found) <= 2


def test_what_is_not_taken_stays_and_nobody_steps_for_it() -> None:
    async def one() -> tuple[int, int, list[StreamChunk]]:
        taken: list[StreamChunk] = []
        asked: list[bool] = []

        def on_news() -> bool:
            asked.append(may_take)
            if may_take:
                taken.extend(stream.take())
            return True

        may_take = False
        async with runtime.live_stream([[5]], PARAMS) as stream:
            listening = asyncio.ensure_future(stream.listen(on_news))
            while runtime.has_work or not asked:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert not listening.done()
            assert not runtime._driver._proxies, "all has ended: there is nothing to step for"
            before = len(asked)
            may_take = True
            stream.remind()
            await asyncio.wait_for(listening, 5)
            stream.remind()  # nobody listens
        return before, len(asked), taken

    with streaming() as runtime:
        before, after, taken = run(one())
    assert 1 < before == after - 1
    assert [len(chunk.token_ids) for chunk in taken] == [TOKENS]


@pytest.mark.parametrize("how", ["it returns False", "it raises"])
def test_a_listener_ends_by_itself(how: str) -> None:
    """Its requests end when the context is left; others go on."""

    async def one() -> None:
        calls: list[int] = []

        def on_news() -> bool:
            calls.append(counted([list(stream.take())]))
            if len(calls) == 4 and how == "it raises":
                raise ValueError("no more")
            return len(calls) < 4

        other = asyncio.ensure_future(listened(runtime, 6, lambda stream: list(stream.take())))
        async with runtime.live_stream([[5]], ENDLESS) as stream:
            if how == "it raises":
                with pytest.raises(ValueError, match="no more"):
                    await stream.listen(on_news)
            else:
                await stream.listen(on_news)
            await asyncio.sleep(0.05)
            assert len(calls) == 4
            assert not stream.is_over
        assert counted(await other) == TOKENS

    with streaming() as runtime:
        run(one())
        while runtime.has_work:
            time.sleep(0.001)
        assert runtime.activity().decoded_tokens < 100


@pytest.mark.parametrize("at", [1, 6])
def test_a_lost_device_ends_all_listeners(at: int) -> None:
    async def everything() -> list[Any]:
        waiting = [listened(runtime, place, lambda stream: list(stream.take())) for place in range(5)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    runtime = streaming(lost_after=at)
    found = run(everything())
    assert [type(one) for one in found] == [DeviceLostError] * 5


def test_closing_ends_listeners() -> None:
    async def everything() -> list[Any]:
        waiting = [
            asyncio.ensure_future(listened(runtime, place, lambda stream: list(stream.take()), ENDLESS))
            for place in range(5)
        ]
        while runtime.num_running < 5:
            await asyncio.sleep(0.001)
        await asyncio.get_running_loop().run_in_executor(None, runtime.close)
        return await asyncio.gather(*waiting, return_exceptions=True)

    runtime = streaming()
    for one in run(everything()):
        if isinstance(one, Exception):
            assert isinstance(one, RadixrtError)
            assert "the runtime is closed" in str(one)
        else:
            assert str(one[-1][-1].finish_reason) == "abort"


def test_a_listener_and_a_task_of_the_same_loop() -> None:
    async def everything() -> tuple[Any, Any]:
        listening = listened(runtime, 5, lambda stream: list(stream.take()))
        return await asyncio.gather(listening, runtime.async_generate([6], PARAMS))

    with streaming() as runtime:
        calls, output = run(everything())
    assert counted(calls) == len(output.token_ids) == TOKENS


def test_a_panic_in_one_costs_no_other_its_news() -> None:
    class Panic(BaseException):
        pass

    def raising(stream: LiveStream) -> list[StreamChunk]:
        taken.append(None)
        if len(taken) == 3:
            raise Panic
        return list(stream.take())

    async def everything() -> list[Any]:
        others = [listened(runtime, place, lambda stream: list(stream.take())) for place in range(30)]
        return await asyncio.gather(listened(runtime, 40, raising, ENDLESS), *others, return_exceptions=True)

    taken: list[None] = []
    with streaming() as runtime:
        first, *others = run(everything())
    assert isinstance(first, Panic)
    assert [counted(calls) for calls in others] == [TOKENS] * 30


def test_what_has_ended_is_taken_although_the_device_is_lost() -> None:
    """One has not taken its last news yet when another one's pass loses it."""

    async def everything() -> tuple[list[int], Any]:
        sizes: list[int] = []

        def on_news() -> bool:
            if may_take:
                sizes.extend(len(chunk.token_ids) for chunk in stream.take())
            return True

        may_take = False
        async with runtime.live_stream([[5]], Params(max_new_tokens=3, ignore_eos=True)) as stream:
            listening = asyncio.ensure_future(stream.listen(on_news))
            other = listened(runtime, 6, lambda stream: list(stream.take()), ENDLESS)
            (lost,) = await asyncio.gather(other, return_exceptions=True)
            await asyncio.sleep(0.02)
            may_take = True
            stream.remind()
            await listening
        return sizes, lost

    runtime = streaming(lost_after=12)
    sizes, lost = run(everything())
    assert isinstance(lost, DeviceLostError)
    assert sizes == [3]


@pytest.mark.parametrize(
    ("prompts", "params", "is_soon"),
    [
        ([[5], [6]], PARAMS, True),
        (["a text"], PARAMS, False),
        ([[5] * 8193], PARAMS, False),
        ([[5]] * 5, PARAMS, False),
        ([[5]], replace(PARAMS, bad_words=("never",)), False),
        ([[5]], replace(PARAMS, regex="a+"), False),
        ([[5]], {"max_new_tokens": 3}, False),
    ],
)
def test_requests_that_may_take_time_are_made_in_another_thread(
    prompts: list[Any], params: Any, is_soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(self: RequestBuilder, *_: Any, **__: Any) -> Any:
        threads.append(threading.get_ident())
        raise PromptError("noted")

    async def begun() -> None:
        async with runtime.live_stream(prompts, params):
            pass

    monkeypatch.setattr(RequestBuilder, "build_all", noted)
    with streaming() as runtime, pytest.raises(PromptError, match="noted"):
        run(begun())
    assert [thread == threading.get_ident() for thread in threads] == [is_soon]
