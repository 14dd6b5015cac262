"""Ending long work cleanly at Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that no pass is cut in two. The second one does what it did before.

    Outside the main thread, which alone gets signals, and where Ctrl-C is ignored, nothing changes.
    """
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupted
        return

    def stop(signal_number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)
        with contextlib.suppress(OSError):  # not print: a signal may come in the middle of another one
            os.write(2, b"\nstopping after the current pass; Ctrl-C again stops at once\n")

    signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside has its effect at the end, so that what stands here is not cut in two; a third one at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed = 0

    def remember(signal_number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 2:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(pressed):
        signal.raise_signal(signal.SIGINT)
