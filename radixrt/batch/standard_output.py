"""Records on standard output, in the order of their lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import BinaryIO

from radixrt.batch.source import STANDARD, place_name
from radixrt.errors import BatchFileError


class StandardOutput:
    """Lines put at positions 0, 1, 2, ... in any order, each printed once all before it are.

    Leaving the context prints the lines that wait behind a gap, in order. Standard output itself stays open.

    Raises:
        BatchFileError: it takes no more, as when its reader has gone, or there is none. Nothing is tried again.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        try:
            self._file = _own_file()
        except OSError as error:
            raise _refusal(error) from error

    def __enter__(self) -> StandardOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            with self._refusals():
                for position in sorted(self._waiting):
                    self._file.write(self._waiting[position])
                self._file.close()

    def put(self, position: int, line: bytes) -> None:
        """Take the line of `position`, its newline included."""
        self._waiting[position] = line
        with self._refusals():
            while self._next in self._waiting:
                self._file.write(self._waiting.pop(self._next))
                self._next += 1

    def flush(self) -> None:
        """Hand what can be printed to the operating system, so that others see it."""
        with self._refusals():
            self._file.flush()

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
    return open(os.dup(sys.stdout.fileno()), "wb")


def _refusal(error: OSError) -> BatchFileError:
    return BatchFileError(f"cannot write {place_name(STANDARD, 'output')}: {error.strerror or error}")
