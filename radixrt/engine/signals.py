"""SIGINT (Ctrl-C) and SIGTERM end long work cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

DRAIN_SECONDS = 20.0  # that a batch gives to started requests, after the first signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], object] | int | None  # as `signal.getsignal` gives it


class Interrupted(KeyboardInterrupt):
    """The signal `signal_number` has ended what ran."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def signal_of(error: KeyboardInterrupt) -> int:
    """The signal behind an exception: SIGINT, unless it says another."""
    return error.signal_number if isinstance(error, Interrupted) else signal.SIGINT


class FirstSignal:
    """The first signal.

    Attributes:
        notice: for stderr when it comes; may be changed until then.
        number: the signal; None before it has come.
    """

    def __init__(self, notice: str) -> None:
        self.notice = notice
        self.number: int | None = None
        self._moment = 0.0

    def is_set(self) -> bool:
        return self.number is not None

    @property
    def age(self) -> float:
        """Seconds since it came; 0 before it has come."""
        return time.monotonic() - self._moment if self.is_set() else 0.0

    def _set(self, number: int) -> None:
        self._moment, self.number = time.monotonic(), number


@contextlib.contextmanager
def first_interrupt(notice: str) -> Iterator[FirstSignal]:
    """Only note the first SIGINT or SIGTERM, for the code inside to look for.

    The second one raises: SIGINT what it raised before, SIGTERM `Interrupted`. An ignored signal stays ignored,
    and an application's own handler for SIGTERM stays. Outside the main thread, which alone gets signals, nothing
    changes.
    """
    first = FirstSignal(notice)
    if threading.current_thread() is not threading.main_thread():
        yield first
        return
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    taken = [(number, handler) for number, handler in before if _is_ours(number, handler)]
    at_second = [(number, _terminate if number == signal.SIGTERM else handler) for number, handler in taken]

    def stop(signal_number: int, frame: FrameType | None) -> None:
        if first.is_set():  # `deferred` has put this handler back
            _install(at_second)
            signal.raise_signal(signal_number)
            return
        first._set(signal_number)
        _install(at_second)
        with contextlib.suppress(OSError):  # not print: a signal may come in the middle of another one
            os.write(2, f"\n{first.notice}; Ctrl-C again stops at once\n".encode())

    try:
        _install([(number, stop) for number, _ in taken])
        yield first
    finally:
        _install(taken)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delay SIGINT and SIGTERM to the end, so that the code inside is not cut in two; a third one acts at once.

    A signal without a handler of Python's, which ends the process, is not delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    # An outer `deferred` delays its signals to its own end.
    before = [(number, old) for number, old in before if callable(old) and type(old) is not _Pending]
    pending = _Pending()
    try:
        _install([(number, pending) for number, _ in before])
        yield
    finally:
        _install(before)
    for number in pending.numbers:
        signal.raise_signal(number)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM inside raises `Interrupted`, where it would end the process silently."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Pending:
    """A handler that remembers signals, and raises at the third."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        self.numbers.append(signal_number)
        if len(self.numbers) > 2:
            if signal_number == signal.SIGTERM:
                _terminate(signal_number, frame)
            raise KeyboardInterrupt


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise Interrupted("terminated", signal_number)


def _is_ours(number: int, handler: Handler) -> bool:
    """Whether a signal with this handler is for radixrt to take."""
    if number == signal.SIGTERM:
        return handler in (signal.SIG_DFL, _terminate)
    return callable(handler)


def _install(handlers: Sequence[tuple[int, Handler]]) -> None:
    """Install all, whatever one of the signals raises meanwhile."""
    if handlers:
        try:
            signal.signal(*handlers[0])
        finally:
            _install(handlers[1:])
