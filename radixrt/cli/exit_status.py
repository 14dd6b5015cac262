"""What the commands tell the shell."""

from __future__ import annotations

from radixrt.errors import PassError, RadixrtError, SchedulerError

DONE = 0
FAILED = 1  # something failed while it ran
UNUSABLE = 2  # options, prompts, model or files; also argparse's number
INTERRUPTED = 130  # the shell's number for a process that Ctrl-C ended
PIPE_CLOSED = 141  # the shell's number for a process whose reader has gone


def exit_status(error: RadixrtError) -> int:
    """The status of a command that an error has ended."""
    return FAILED if isinstance(error, (PassError, SchedulerError)) else UNUSABLE
