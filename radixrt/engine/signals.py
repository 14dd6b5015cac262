"""SIGINT (Ctrl-C), SIGTERM and SIGHUP end long work cleanly."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

DRAIN_SECONDS = 20.0  # that a batch gives to started requests, after the first signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAMES = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

Handler = Callable[[int, FrameType | None], object] | int | None  # as `signal.getsignal` gives it


class Interrupted(KeyboardInterrupt):
    """The signal `signal_number` has ended what ran."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def signal_of(error: KeyboardInterrupt) -> int:
    """The signal behind an exception: SIGINT, unless it says another."""
    return error.signal_number if isinstance(error, Interrupted) else signal.SIGINT


@dataclass
class Interrupt:
    """Ends long work early, once it is set: as by the signal `number`, at a `moment` (time.monotonic)."""

    number: int | None = None  # None before it is set
    moment: float = 0.0

    def set(self, number: int = signal.SIGINT, *, at_once: bool = False) -> None:
        """What has not begun does not begin any more; `at_once`: nor does what has begun get time to end."""
        if at_once:
            self.moment = -math.inf
        elif self.number is None:
            self.moment = time.monotonic()
        self.number = number  # last: from now on others look at the moment

    def is_set(self) -> bool:
        return self.number is not None

    @property
    def age(self) -> float:
        """Seconds since it was set; 0 before."""
        return time.monotonic() - self.moment if self.is_set() else 0.0


@dataclass
class FirstSignal(Interrupt):
    """Set by the first signal; the `notice` is for stderr when that comes."""

    notice: str = ""


@contextlib.contextmanager
def first_interrupt(notice: str) -> Iterator[FirstSignal]:
    """Only note the first SIGINT, SIGTERM or SIGHUP, for the code inside to look for; the second raises.

    SIGINT raises what it raised before, the others `Interrupted`. A signal that is ignored stays so, as SIGHUP is
    under nohup, and so does an application's own handler for SIGTERM or SIGHUP.
    """
    first, at_sigint = FirstSignal(notice=notice), signal.getsignal(signal.SIGINT)

    def is_ours(number: int, handler: Handler) -> bool:
        return callable(handler) if number == signal.SIGINT else handler in (signal.SIG_DFL, _raise)

    def stop(number: int, frame: FrameType | None) -> None:
        if first.is_set():
            at_second = at_sigint if number == signal.SIGINT and callable(at_sigint) else _raise
            at_second(number, frame)
            return
        first.set(number)
        if sys.__stderr__ is None:  # what was opened since may have its number
            return
        with contextlib.suppress(OSError):  # not print: a signal may come in the middle of another one
            os.write(2, f"\n{first.notice}; Ctrl-C again stops at once\n".encode())

    with _handled(is_ours, stop):
        yield first


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP inside call `handler`; one that is ignored stays so, as SIGHUP is under nohup."""
    with _handled(lambda number, before: before is not signal.SIG_IGN, handler):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delay the signals to the end, so that the code inside is not cut in two; a third one acts at once.

    A signal without a handler of Python's, which ends the process, is not delayed. An outer `deferred` delays its
    signals to its own end.
    """
    pending = _Pending()
    with _handled(lambda number, handler: callable(handler) and type(handler) is not _Pending, pending):
        yield
    for number in pending:
        signal.raise_signal(number)


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP inside raise `Interrupted`, where they would end the process silently."""
    with _handled(lambda number, handler: number in _NAMES and handler is signal.SIG_DFL, _raise):
        yield


class _Pending(list[int]):
    """Signals that wait for an end; as their handler it raises at the third."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.append(number)
        if len(self) > 2:
            _raise(number, frame)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(_NAMES[signal.Signals(number)], number) if number in _NAMES else KeyboardInterrupt


@contextlib.contextmanager
def _handled(is_ours: Callable[[int, Handler], bool], handler: Handler) -> Iterator[None]:
    """Handle the signals that are ours; none outside the main thread, which alone gets signals."""
    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    with contextlib.ExitStack() as restored:  # all are, whatever one of the signals raises meanwhile
        for number in numbers:
            if is_ours(number, before := signal.getsignal(number)):
                restored.callback(signal.signal, number, before)
                signal.signal(number, handler)
        yield
