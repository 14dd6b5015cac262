"""Keeps event loops responsive: tasks are woken a few at a time, and no thread keeps the interpreter for long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

WOKEN_AT_ONCE = 16  # tasks, before others of the loop have their turn
PAUSE = 1e-5  # seconds


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
