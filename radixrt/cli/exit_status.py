"""Exit statuses of the commands."""

# Tests: tests/cli/test_cli.py

from __future__ import annotations

from radixrt.engine.signals import signal_of
from radixrt.errors import (
    DeviceLostError,
    ErrorRateError,
    JournalError,
    PassError,
    RadixrtError,
    ReaderGoneError,
    SchedulerError,
)

DONE = 0
FAILED = 1  # a failure during the run
UNUSABLE = 2  # options, prompts, model or files; also argparse's number
ALL_FAILED = 3  # a batch is complete, but every record is an error
DIFFERENT = 4  # `verify` has found other bits
RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: the disk or the device failed, and the same command goes on
SIGNALLED = 128  # with a signal's number added, as shells do: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP
PIPE_CLOSED = 141  # the shell's number for a process whose reader has gone


def exit_status(error: RadixrtError) -> int:
    """The status of a command that ended with an error."""
    if isinstance(error, (JournalError, DeviceLostError)):
        return RESUMABLE
    if isinstance(error, ReaderGoneError):
        return PIPE_CLOSED
    return FAILED if isinstance(error, (PassError, SchedulerError, ErrorRateError)) else UNUSABLE


def interrupt_status(error: KeyboardInterrupt) -> int:
    """The status of a command that ended by a signal."""
    return SIGNALLED + signal_of(error)
