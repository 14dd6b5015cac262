"""Work for tasks of an event loop: few threads, every answer, and a loop that gets round to all."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from radixrt.engine.tasks import WOKEN_AT_ONCE, WORKERS, Workshop, wake_soon, with_pauses


def test_every_task_gets_its_own_answer_from_few_threads() -> None:
    workshop, threads, at_work = Workshop(), set(), []

    def square(number: int) -> int:
        threads.add(threading.get_ident())
        with_me.append(number)
        at_work.append(len(with_me))
        time.sleep(1e-4)
        with_me.remove(number)
        if number % 50 == 7:
            raise KeyError(number)
        return number * number

    async def everything() -> list[int | BaseException]:
        asked = (workshop.run(lambda number=number: square(number)) for number in range(300))  # type: ignore[misc]
        return await asyncio.gather(*asked, return_exceptions=True)

    for _ in range(3):  # each in a loop of its own
        with_me: list[int] = []
        found = asyncio.run(everything())
        assert [one for one in found if isinstance(one, int)] == [n * n for n in range(300) if n % 50 != 7]
        assert [one.args[0] for one in found if isinstance(one, KeyError)] == list(range(7, 300, 50))
    assert threading.get_ident() not in threads
    assert max(at_work) == WORKERS


def test_a_task_that_is_cancelled_costs_no_other_its_answer() -> None:
    async def everything() -> int:
        workshop, gate = Workshop(), threading.Event()
        held = [asyncio.create_task(workshop.run(gate.wait)) for _ in range(WORKERS)]
        cancelled, other = (asyncio.create_task(workshop.run(lambda: 5)) for _ in range(2))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await asyncio.gather(*held)
        return await other

    assert asyncio.run(everything()) == 5


def test_many_tasks_are_woken_in_turns() -> None:
    async def everything() -> list[int]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3 * WOKEN_AT_ONCE)]
        wake_soon(futures, None)
        done = []
        while not futures[-1].done():
            await asyncio.sleep(0)
            done.append(sum(future.done() for future in futures))
        return done

    counts = asyncio.run(everything())
    assert {WOKEN_AT_ONCE, 2 * WOKEN_AT_ONCE, 3 * WOKEN_AT_ONCE} <= set(counts)


def test_a_closed_loop_is_passed_over() -> None:
    async def make() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    wake_soon([asyncio.run(make())], None)


def test_a_pause_after_every_few(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    pauses: list[int] = []
    monkeypatch.setattr("radixrt.engine.tasks.time.sleep", lambda seconds: pauses.append(len(seen)))
    for number in with_pauses(range(2 * WOKEN_AT_ONCE + 3)):
        seen.append(number)
    assert seen == list(range(2 * WOKEN_AT_ONCE + 3))
    assert pauses == [WOKEN_AT_ONCE, 2 * WOKEN_AT_ONCE]
