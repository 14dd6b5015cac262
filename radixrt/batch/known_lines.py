"""The lines of a batch that are checked, as far as they are known: a thread may still read the file."""

# Tests: tests/batch/test_reading.py

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixrt.arrays import Int32Array, Int64Array
from radixrt.batch.formats.record import LineError, LineErrorType, Reply
from radixrt.files.disk import DISK, file_error
from radixrt.planning.token_store import TOKENS_FILE
from radixrt.sampling_params import SamplingParams

MAX_REMEMBERED = 1024  # parameters that a reader keeps
ENTRIES_FILE = "entries.jsonl"
_FIRST_ROWS = 4096

ROW = np.dtype(
    [
        ("line", np.int64),
        ("tokens_end", np.int64),
        ("entry_end", np.int64),
        ("new_tokens", np.int32),
        ("num_answers", np.int32),
        ("match_limit", np.int32),
        ("is_bad", np.bool_),
        ("is_open", np.bool_),
    ]
)
"""What memory holds of a line; see `Scan`. The ends are places in the files of tokens and of entries."""


@dataclass(frozen=True)
class SoundLine:
    """A line that can run, without its tokens."""

    sampling_params: SamplingParams
    reply: Reply


class KnownLines:
    """Lines that one thread adds, a block at a time, while others look at those before.

    Args:
        folder: of a scan, whose files have their tokens and entries. A scan that fails removes its tokens; those
            of known lines can be read all the same, until `close`.
    """

    def __init__(self, folder: Path) -> None:
        self._tokens_path, self.entries_path = folder / TOKENS_FILE, folder / ENTRIES_FILE
        self._tokens_fd = -1
        self._tokens: Int32Array = np.zeros(0, np.int32)
        self._rows: npt.NDArray[Any] = np.zeros(_FIRST_ROWS, ROW)
        self._count = 0
        self._is_over = False
        self._news = threading.Condition()

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> npt.NDArray[Any]:
        """`[N]` ROW, a view."""
        count = self._count  # first: the rows are replaced before there are more
        return self._rows[:count]

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Lines that are known now: their tokens and entries are in the files.

        Raises BatchFileError or JournalError if the tokens cannot be opened.
        """
        if self._tokens_fd < 0:
            with self._refusals():
                self._tokens_fd = DISK.open(self._tokens_path, os.O_RDONLY)
        count = self._count + len(rows)
        if count > len(self._rows):
            larger = np.zeros(max(count, 2 * len(self._rows)), ROW)
            larger[: self._count] = self._rows[: self._count]
            self._rows = larger
        self._rows[self._count : count] = rows
        with self._news:
            self._count = count
            self._news.notify_all()

    def end(self) -> None:
        """No more lines come."""
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def close(self) -> None:
        """Nobody looks at lines any more."""
        fd, self._tokens_fd = self._tokens_fd, -1
        if fd >= 0:
            DISK.close(fd)

    def wait(self, known: int, seconds: float) -> None:
        """Return once more lines than `known` are known, or no more come, or so many seconds have passed."""
        with self._news:
            self._news.wait_for(lambda: self._is_over or self._count > known, seconds)

    def prompt(self, position: int) -> Int32Array:
        """The tokens of a line, `[n]`. Raises BatchFileError or JournalError if their file cannot be read."""
        ends = self.rows["tokens_end"]
        begin, end = _span(ends, position)
        if end > len(self._tokens):  # mapped before they were there
            self._tokens = self._mapped(int(ends[-1]))
        return self._tokens[begin:end]

    def _mapped(self, count: int) -> Int32Array:
        """The first tokens of the file, so many."""
        with self._refusals():
            mapping = mmap.mmap(self._tokens_fd, 4 * count, access=mmap.ACCESS_READ)
        return np.frombuffer(mapping, np.dtype("<i4"))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it is shorter
            cause = error if isinstance(error, OSError) else OSError(errno.EIO, "the file is cut short")
            raise file_error(f"cannot read {self._tokens_path}", cause) from error

    def read(self, positions: Iterable[int]) -> Iterator[SoundLine | LineError]:
        """See `Scan.read`."""
        return read_entries(self.entries_path, self.rows["entry_end"], positions)


def read_entries(
    path: Path, ends: Int64Array | Sequence[int], positions: Iterable[int]
) -> Iterator[SoundLine | LineError]:
    """The lines at some positions, in the given order, from their entries, which end at `ends` `[N]` in a file.

    Raises BatchFileError if the file has gone, JournalError if the disk fails.
    """
    known: dict[str, SamplingParams] = {}
    try:
        with open(path, "rb") as file:
            for position in positions:
                begin, end = _span(ends, position)
                file.seek(begin)
                yield line_of_entry(json.loads(file.read(end - begin)), known)
    except OSError as error:
        raise file_error(f"cannot read {path}", error) from error


def line_of_entry(entry: dict[str, Any], known: dict[str, SamplingParams]) -> SoundLine | LineError:
    """The line of an entry. Equal parameters become one object, which `known` remembers."""
    if "error" in entry:
        return LineError(LineErrorType(entry["error"]), entry["message"], entry["reply"])
    text = repr(entry["params"])
    if text not in known:
        if len(known) == MAX_REMEMBERED:
            known.clear()
        known[text] = SamplingParams(**entry["params"])
    return SoundLine(known[text], entry["reply"])


def _span(ends: Int64Array | Sequence[int], position: int) -> tuple[int, int]:
    return int(ends[position - 1]) if position else 0, int(ends[position])
