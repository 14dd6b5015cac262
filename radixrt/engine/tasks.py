"""What keeps an event loop responsive: few threads at work for its tasks, and tasks woken a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

WOKEN_AT_ONCE = 16  # tasks, before others of the loop have their turn
WORKERS = 2  # threads: one does short work while the other does long work


class Workshop:
    """Runs functions for tasks in threads of their loop's executor, never more than `WORKERS` of them at once.

    All threads share the interpreter with the loop's: each next function waits until the loop has got round to it.
    """

    def __init__(self) -> None:
        self._slots: tuple[asyncio.AbstractEventLoop | None, asyncio.Semaphore] = (None, asyncio.Semaphore())

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in another thread."""
        loop = asyncio.get_running_loop()
        served, slots = self._slots
        if served is not loop:
            self._slots = loop, slots = loop, asyncio.Semaphore(WORKERS)
        async with slots:
            return await asyncio.to_thread(function)


def wake_soon(futures: Iterable[asyncio.Future[None]], error: Exception | None = None) -> None:
    """Complete futures, or have them raise `error`, in their loops' threads; from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]] = {}
    for future in futures:
        by_loop.setdefault(future.get_loop(), deque()).append(future)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it was closed, and its tasks with it
            loop.call_soon_threadsafe(_wake, loop, waiting, error)


def _wake(loop: asyncio.AbstractEventLoop, futures: deque[asyncio.Future[None]], error: Exception | None) -> None:
    for future in [futures.popleft() for _ in range(min(WOKEN_AT_ONCE, len(futures)))]:
        if future.done():  # cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    if futures:
        loop.call_soon(_wake, loop, futures, error)
