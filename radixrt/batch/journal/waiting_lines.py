"""Lines that wait for their turn, on disk."""

# Tests: tests/batch/journal/test_standard_output.py

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from radixrt.files.disk import DISK, file_error


class WaitingLines:
    """Lines by position, put in any order, each taken once. Each position up to the last one that was put takes 16
    to 32 bytes of memory.

    The file is made with the first line, and has all lines since it was last empty. It stays after `close`: its
    folder is temporary.

    Args:
        path: of the file, for this object alone. An existing file is replaced.

    Raises:
        BatchFileError: there can be no such file.
        JournalError: the disk refuses. That line is not kept; the others are.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._starts = np.zeros(0, dtype=np.int64)  # in the file; -1: the line does not wait
        self._lengths = np.zeros(0, dtype=np.int64)
        self._count = 0

    def __contains__(self, position: int) -> bool:
        return position < len(self._starts) and self._starts[position] >= 0

    def put(self, position: int, line: bytes) -> None:
        """Keep the line of a position that has none yet."""
        with self._refusals("write"):
            if self._fd < 0:
                self._fd = DISK.open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            start = DISK.fstat(self._fd).st_size  # after a partial line, too, if a write failed
            DISK.write_all(self._fd, line)
        if position >= len(self._starts):
            more = max(position + 1, 2 * len(self._starts)) - len(self._starts)
            self._starts = np.append(self._starts, np.full(more, -1))
            self._lengths = np.append(self._lengths, np.zeros(more, np.int64))
        self._starts[position], self._lengths[position] = start, len(line)
        self._count += 1

    def take(self, position: int) -> bytes:
        """Remove and return the line of a position."""
        length = int(self._lengths[position])
        with self._refusals("read"):
            line = DISK.pread_all(self._fd, length, int(self._starts[position]))
            if len(line) < length:
                raise OSError(errno.EIO, "the file is cut short")
            self._starts[position] = -1
            self._count -= 1
            if not self._count:
                DISK.truncate(self._fd, 0)
        return line

    def positions(self) -> Iterator[int]:
        """Positions of the waiting lines, ascending. Lines may be taken during the iteration."""
        return (int(position) for position in np.flatnonzero(self._starts >= 0))

    def close(self) -> None:
        """Forget the lines."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # its content is not needed any more
                DISK.close(fd)

    @contextmanager
    def _refusals(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise file_error(f"cannot {what} {self._path}", error) from error
