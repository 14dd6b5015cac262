"""Ctrl-C before the command `radixrt` begins, and after it has ended: one line and the status 130.

While modules are imported, KeyboardInterrupt would end in a traceback, or be lost in a callback of the import
system.
"""

# Tests: tests/cli/test_ctrl_c.py

from __future__ import annotations

import os
import sys

# `signal` itself imports more, which takes time.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

INTERRUPTED = 130  # the status of a command that Ctrl-C has ended


def end_at_once(number: int, frame: object) -> None:
    """End the process, as a handler of SIGINT."""
    try:
        os.write(2, b"radixrt: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def becomes_an_exception() -> bool:
    """Let Ctrl-C raise KeyboardInterrupt where it would end this process at once; whether it would have."""
    if getsignal(SIGINT) is not end_at_once:
        return False
    signal(SIGINT, default_int_handler)
    return True


def ends_the_process() -> None:
    """Let Ctrl-C end this process at once."""
    signal(SIGINT, end_at_once)


def _is_command() -> bool:
    """Whether this process is `radixrt` or `python -m radixrt`, whose argv[0] is "-m" at first."""
    name = os.path.basename(sys.argv[0])
    return name == "radixrt" or (name == "-m" and "radixrt" in sys.orig_argv)


if _is_command() and getsignal(SIGINT) is default_int_handler:  # it may be ignored
    ends_the_process()
