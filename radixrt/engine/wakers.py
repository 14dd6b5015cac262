"""What waits in event loops for news of calls, and is woken from the thread that steps."""

# Tests: tests/engine/test_driver.py, tests/engine/test_live_stream.py

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from radixrt.engine.calls import PendingCall

WOKEN_AT_ONCE = 16  # before others of the event loop have their turn


class Waker(Protocol):
    """Waits in an event loop.

    Attributes:
        loop: that one.
    """

    loop: asyncio.AbstractEventLoop

    def wake(self, error: BaseException | None = None) -> None:
        """Tell it that there is news, or that there will be none because of an error; in its loop's thread."""
        ...


class Sleeper:
    """A task that waits for the next news.

    Attributes:
        told: None once there is news, or an error for it to raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.told: asyncio.Future[BaseException | None] = loop.create_future()

    def wake(self, error: BaseException | None = None) -> None:
        """See `Waker`."""
        if not self.told.done():  # else it was cancelled
            self.told.set_result(error)


class NewsListener:
    """Calls `on_news` for all news of a call until it returns False or raises, or the call is over. It takes them.
    For news that have come together it is called once: a loop that is late has fewer calls, not a queue of them.

    Attributes:
        told: None in the end, or an error to raise.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, call: PendingCall[Any], on_news: Callable[[], bool]
    ) -> None:
        self.loop, self._call, self._on_news = loop, call, on_news
        self.told: asyncio.Future[BaseException | None] = loop.create_future()
        self._is_due = False

    def becomes_due(self) -> bool:
        """Note that it is to be woken; from one thread at a time. Returns whether that was not noted already."""
        before, self._is_due = self._is_due, True  # at once, as no other thread gets the interpreter in between
        return not before

    def wake(self, error: BaseException | None = None) -> None:
        """See `Waker`."""
        self._is_due = False  # first: what comes from now on may not be taken this time
        if self.told.done():
            return
        try:
            is_over = error is not None or not self._on_news() or self._call.is_over
        except BaseException as raised:  # also a panic of the tokenizer's: it must not cost the others their news
            if not self.told.done():
                self.told.set_exception(raised)
            return
        if is_over and not self.told.done():
            self.told.set_result(error)


def wake_soon(wakers: Iterable[Waker], error: BaseException | None = None) -> None:
    """Wake them in their loops' threads; from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, deque[Waker]] = {}
    for waker in wakers:
        by_loop.setdefault(waker.loop, deque()).append(waker)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it was closed, and its tasks with it
            loop.call_soon_threadsafe(_wake, loop, waiting, error)


def _wake(loop: asyncio.AbstractEventLoop, waiting: deque[Waker], error: BaseException | None) -> None:
    for waker in [waiting.popleft() for _ in range(min(WOKEN_AT_ONCE, len(waiting)))]:
        waker.wake(error)
    if waiting:
        loop.call_soon(_wake, loop, waiting, error)
