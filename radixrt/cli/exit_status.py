"""What the commands tell the shell."""

from __future__ import annotations

from radixrt.errors import JournalError, PassError, RadixrtError, SchedulerError

DONE = 0
FAILED = 1  # something failed while it ran
UNUSABLE = 2  # options, prompts, model or files; also argparse's number
RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: a batch stopped, and the same command goes on with it
INTERRUPTED = 130  # the shell's number for a process that Ctrl-C ended
PIPE_CLOSED = 141  # the shell's number for a process whose reader has gone


def exit_status(error: RadixrtError) -> int:
    """The status of a command that an error has ended."""
    if isinstance(error, JournalError):
        return RESUMABLE
    return FAILED if isinstance(error, (PassError, SchedulerError)) else UNUSABLE
