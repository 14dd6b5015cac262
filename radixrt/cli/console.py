"""The console that commands print to."""

# Tests: tests/cli/test_standard_files.py

from __future__ import annotations

import errno
import os

from rich.console import Console as RichConsole


class Console(RichConsole):
    """rich's, but where the reader of a pipe has gone it raises BrokenPipeError in place of ending the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
