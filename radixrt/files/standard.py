"""Standard input and output in place of a path; standard error, whose loss ends nothing."""

# Tests: tests/batch/formats/test_source.py

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from radixrt.errors import PromptError

STANDARD = "-"
"""Names standard input or output in place of a path. A file of that name is Path("-") or "./-"."""


def place_name(place: str | Path, what: str) -> str:
    """A path, or "standard input" or "standard output", for messages."""
    return f"standard {what}" if place == STANDARD else str(place)


def standard_input() -> TextIO:
    """Standard input as text. Raises PromptError where it is closed."""
    if sys.stdin is None:
        raise PromptError("cannot read standard input: it is closed")
    return sys.stdin


class _Forgiving:
    """A text file that drops what it cannot write."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def standard_error() -> TextIO:
    """Standard error for bars and messages: where it is closed, full, or without a reader, they are dropped."""
    file = sys.stderr
    if isinstance(file, _Forgiving):
        return cast("TextIO", file)
    return cast("TextIO", _Forgiving(open(os.devnull, "w") if file is None else file))
