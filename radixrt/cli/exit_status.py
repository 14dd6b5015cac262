"""Exit statuses of the commands."""

# Tests: tests/cli/test_cli.py

from __future__ import annotations

import signal

from radixrt.engine.signals import signal_of
from radixrt.errors import (
    DeviceLostError,
    ErrorRateError,
    JournalError,
    PassError,
    RadixrtError,
    SchedulerError,
)

DONE = 0
FAILED = 1  # a failure during the run
UNUSABLE = 2  # options, prompts, model or files; also argparse's number
RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: the disk or the device failed, and the same command goes on
INTERRUPTED = 130  # the shell's number for a process that Ctrl-C ended
TERMINATED = 143  # and for one that SIGTERM did
PIPE_CLOSED = 141  # the shell's number for a process whose reader has gone


def exit_status(error: RadixrtError) -> int:
    """The status of a command that ended with an error."""
    if isinstance(error, (JournalError, DeviceLostError)):
        return RESUMABLE
    return FAILED if isinstance(error, (PassError, SchedulerError, ErrorRateError)) else UNUSABLE


def interrupt_status(error: KeyboardInterrupt) -> int:
    """The status of a command that ended by a signal."""
    return TERMINATED if signal_of(error) == signal.SIGTERM else INTERRUPTED
