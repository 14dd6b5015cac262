"""Two halves of a pass, computed in turn, so that sums over ranks of one are made while the other is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Turns:
    """Two halves, each a thread of its own: one computes up to its next sum over ranks, then the other one does.

    What they launch is in one order, the same on all ranks. On a GPU all of it is on the current stream, but for
    the sums, which have a stream of their own: a half waits there for its last sum when its turn comes again, and
    by then the other half has launched what is computed meanwhile. So memory of one stream is used on another one
    only while the half that has it waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            # Of a high priority: a sum takes the first multiprocessors that products leave.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._baton: _Baton | None = None

    @property
    def are_taken(self) -> bool:
        """Whether halves are computed now."""
        return self._baton is not None

    def computed(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """What the halves return. What the first one launches up to its nth sum comes before what the second one
        does. Raises what one of them raises, once the other one has ended at its next sum.
        """
        baton = self._baton = _Baton()
        try:
            with ThreadPoolExecutor(1, "radixrt-half") as thread:
                try:
                    other = thread.submit(baton.run, 1, self._as_here(second))
                    own = baton.run(0, first)
                except _OtherHalfFailedError:
                    other.result()  # raises what that was
                    raise
                except BaseException:
                    baton.fail()  # a Ctrl-C may come before the first half begins
                    raise
                return own, other.result()
        finally:
            self._baton = None

    def _as_here(self, work: Callable[[], T]) -> Callable[[], T]:
        """The work, for another thread: on the current stream, which makes its device the current one, and in
        inference mode where this thread is.
        """
        stream: Any = None if self._stream is None else torch.cuda.current_stream(self._stream.device)
        without_grad = torch.is_inference_mode_enabled()

        def done() -> T:
            with (
                torch.inference_mode(without_grad),
                nullcontext() if stream is None else torch.cuda.stream(stream),
            ):
                return work()

        return done

    @contextmanager
    def summing(self) -> Iterator[None]:
        """What is launched inside is a sum of the half whose turn it is. After that the other half has had its
        turn, and what this one launches comes after the sum.
        """
        assert self._baton is not None
        if self._stream is None:
            yield
            self._baton.pass_on()
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
            made = self._stream.record_event()
            self._baton.pass_on()
            current.wait_event(made)
        except BaseException:
            current.wait_stream(self._stream)  # the sum's memory is free for others next
            raise


class _OtherHalfFailedError(Exception):
    """Ends a half whose other one has failed."""


class _Baton:
    """Lets one of two threads, 0 and 1, run at a time, 0 first."""

    def __init__(self) -> None:
        self._turns = Lock(), Lock()  # each is released when the turn is that thread's
        self._turns[1].acquire()
        self._own = 0  # whose turn it is
        self._has_ended = self._has_failed = False  # either

    def run(self, own: int, work: Callable[[], T]) -> T:
        """Do the work of one of them, from its first turn on; all turns are the other's then."""
        self._wait(own)
        try:
            return work()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._has_ended = True
            self._give(1 - own)

    def fail(self) -> None:
        """End thread 1, if it has not ended: at once where it waits for a turn."""
        self._has_failed = self._has_ended = True
        self._give(1)

    def pass_on(self) -> None:
        """Let the other one run, until it passes on or ends."""
        own = self._own
        if not self._has_ended:
            self._give(1 - own)
            self._wait(own)
        elif self._has_failed:
            raise _OtherHalfFailedError

    def _give(self, other: int) -> None:
        self._own = other
        if self._turns[other].locked():
            self._turns[other].release()

    def _wait(self, own: int) -> None:
        self._turns[own].acquire()
        if self._has_failed:
            raise _OtherHalfFailedError
