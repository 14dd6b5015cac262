"""Records on standard output, in the order of their lines."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from radixrt.arrays import BoolArray
from radixrt.batch.journal.waiting_lines import WaitingLines
from radixrt.errors import BatchFileError, ReaderGoneError
from radixrt.files.standard import STANDARD, place_name

_WAITING_FILE = "waiting"


class StandardOutput:
    """Lines put at positions from 0 on in any order, each printed once all before it are.

    Leaving the context prints the lines that wait after a gap, in order. Standard output itself stays open.

    Attributes:
        durable: lines written so far.

    Args:
        folder: for a file of waiting lines, of at most the size of all lines.

    Raises:
        BatchFileError: it is closed, or refuses. Nothing is tried again.
        ReaderGoneError: its reader has gone.
        JournalError: the disk with the waiting lines refuses. Lines that wait already are printed on leaving.
    """

    def __init__(self, folder: Path) -> None:
        self._waiting = WaitingLines(folder / _WAITING_FILE)
        self.durable = 0
        try:
            self._file = _own_file()
        except OSError as error:
            raise _refusal(error) from error

    def __enter__(self) -> StandardOutput:
        return self

    def __exit__(self, *error: object) -> None:
        with closing(self._waiting):
            if not self._file.closed:
                with self._refusals(), self._file:
                    for position in self._waiting.positions():
                        self._print(self._waiting.take(position))

    @property
    def finished(self) -> BoolArray:
        """No lines: no earlier run has left any."""
        return np.zeros(0, np.bool_)

    @property
    def keeps(self) -> bool:
        """Yes: what is printed stays."""
        return True

    def begin(self) -> None:
        """Nothing changes once all lines are known."""

    def append(self, position: int, line: bytes) -> None:
        """Take the line of `position`, its newline included."""
        if position != self.durable:
            self._waiting.put(position, line)
            return
        with self._refusals():
            self._print(line)
            while self.durable in self._waiting:
                self._print(self._waiting.take(self.durable))

    def sync(self) -> None:
        """Hand the printed lines to the operating system, so that readers see them."""
        with self._refusals():
            self._file.flush()

    def sync_if_due(self) -> None:
        """`sync`, which is always due."""
        self.sync()

    def _print(self, line: bytes) -> None:
        self._file.write(line)
        self.durable += 1

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            raise _refusal(error) from error


def _own_file() -> BinaryIO:
    """A file of our own on standard output: if its reader goes away, Python's is not left with unsent bytes."""
    if sys.stdout is None:
        raise OSError("it is closed")
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except io.UnsupportedOperation:
        raise OSError("it is not that of a process, such as a notebook's; give the name of a file") from None
    return open(os.dup(number), "wb")


def _refusal(error: OSError) -> BatchFileError:
    kind = ReaderGoneError if isinstance(error, BrokenPipeError) else BatchFileError
    return kind(f"cannot write {place_name(STANDARD, 'output')}: {error.strerror or error}")
