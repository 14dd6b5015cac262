"""Tasks of an event loop: the loop gets round to all of them."""

from __future__ import annotations

import asyncio

import pytest

from radixrt.engine.tasks import WOKEN_AT_ONCE, wake_soon, with_pauses


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
