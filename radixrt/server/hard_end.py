"""The end of a process in which something hangs."""

# Tests: tests/cli/test_serve.py

from __future__ import annotations

import os
import threading
from contextlib import suppress


def end_process_within(seconds: float, number: int) -> None:
    """End this process by the signal of this number after that time, unless it has ended before: nobody can end a
    pass that hangs, and Python waits for the thread that runs it.
    """
    timer = threading.Timer(seconds, _end, (seconds, number))
    timer.daemon = True
    timer.start()


def _end(seconds: float, number: int) -> None:
    told = f"radixrt: what runs has not ended within {seconds:g} s, and the process ends with it\n"
    with suppress(OSError):  # there may be no stderr any more
        os.write(2, told.encode())
    os._exit(128 + number)  # as a shell says it
