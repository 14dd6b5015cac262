"""What keeps an event loop responsive: few threads at work for its tasks, and tasks woken a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

WOKEN_AT_ONCE = 16  # tasks, before others of the loop have their turn
PAUSE = 1e-5  # seconds
WORKERS = 2  # threads: one does short work while the other does long work


class Workshop:
    """Runs functions for tasks in threads of their loop's executor, never more than `WORKERS` of them at once.

    All threads share the interpreter with the loop's: each next function waits until the loop has got round to it.
    """

    def __init__(self) -> None:
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in another thread."""
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(WORKERS)):
            return await asyncio.to_thread(function)


def with_pauses(items: Iterable[T]) -> Iterator[T]:
    """The items; after every few this thread lets go of the interpreter, which the loop's else waits 5 ms for."""
    for place, item in enumerate(items, 1):
        yield item
        if place % WOKEN_AT_ONCE == 0:
            time.sleep(PAUSE)


def wake_soon(futures: Iterable[asyncio.Future[T]], result: T) -> None:
    """Complete futures in their loops' threads; from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, deque[asyncio.Future[T]]] = {}
    for future in futures:
        by_loop.setdefault(future.get_loop(), deque()).append(future)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it was closed, and its tasks with it
            loop.call_soon_threadsafe(_wake, loop, waiting, result)


def _wake(loop: asyncio.AbstractEventLoop, futures: deque[asyncio.Future[T]], result: T) -> None:
    for future in [futures.popleft() for _ in range(min(WOKEN_AT_ONCE, len(futures)))]:
        if not future.done():  # else it was cancelled
            future.set_result(result)
    if futures:
        loop.call_soon(_wake, loop, futures, result)
