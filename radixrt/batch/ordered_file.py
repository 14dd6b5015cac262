"""An output file whose lines become ready in any order and stand on disk in theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from radixrt.errors import BatchFileError


class OrderedFile:
    """Lines put at positions 0, 1, 2, ... in any order, written to `PATH.partial` in theirs.

    A line is written once all before it are. `finish` makes the file durable and renames it to PATH. Leaving
    the context without `finish` writes the lines that wait behind a gap, in order, and keeps the partial file.

    Raises:
        BatchFileError: the disk refuses; nothing is tried again.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self._path = path
        self.partial = partial_path(path)
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        try:
            self._file = open(self.partial, "wb" if overwrite else "xb")  # noqa: SIM115
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> OrderedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file.closed:
            return
        with self._refusals():
            for position in sorted(self._waiting):
                self._file.write(self._waiting[position])
            self._sync()
            self._file.close()

    def put(self, position: int, line: bytes) -> None:
        """Take the line of `position`, its newline included."""
        self._waiting[position] = line
        with self._refusals():
            while self._next in self._waiting:
                self._file.write(self._waiting.pop(self._next))
                self._next += 1

    def flush(self) -> None:
        """Hand what can be written to the operating system, so that others see it."""
        with self._refusals():
            self._file.flush()

    def finish(self) -> None:
        """Make the partial file durable and give it its name."""
        with self._refusals():
            self._sync()
            self._file.close()
            os.replace(self.partial, self._path)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._file.close()  # so that nothing is tried again: a second fsync may succeed with data lost
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> BatchFileError:
        return BatchFileError(f"cannot write {self.partial}: {error.strerror or error}")


def partial_path(path: Path) -> Path:
    """Where the records of `path` stand until it is whole."""
    return path.with_name(path.name + ".partial")
