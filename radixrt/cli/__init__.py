"""The command `radixrt`. Torch is imported only when a model is loaded, so that help answers at once."""

# Tests: tests/cli/test_cli.py, tests/cli/test_ctrl_c.py, tests/cli/test_standard_files.py

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from radixrt import ctrl_c


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (sys.argv without the program's name if None); returns the exit status."""
    is_process = False
    try:
        from radixrt.cli.command import run_command
        from radixrt.engine.signals import termination_raises
        from radixrt.files.standard import standard_error

        _hold_standard_files()
        is_process = ctrl_c.becomes_an_exception()
        with termination_raises(), contextlib.redirect_stderr(standard_error()):
            return run_command(argv)
    except KeyboardInterrupt:  # while modules were imported
        if sys.stderr is not None:
            print("radixrt: interrupted", file=sys.stderr)
        return ctrl_c.INTERRUPTED
    finally:
        if is_process:
            ctrl_c.ends_the_process()
        _drop_unwritten()


def _hold_standard_files() -> None:
    """Open what is closed of the first three files, or the next file to be opened would get their messages."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)


def _drop_unwritten() -> None:
    """Drop what a lost standard error has not taken: the interpreter's own last flush would fail again."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
