"""The table of the slots that hold the KV of each request's positions. Numpy only."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memory_pool.slot_allocator import Slots


@dataclass(frozen=True)
class RowChanges:
    """Changed cells of the table: three int32 arrays `[n]` with distinct pairs (row, position)."""

    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: Slots

    def __len__(self) -> int:
        return len(self.slots)


NO_CHANGES = RowChanges(*(np.zeros(0, dtype=np.int32) for _ in range(3)))


class ReqToTokenPool:
    """The table `req_to_token` `[max_requests, max_context_len]` int32: position -> slot, one row a live request.

    This table on the host is the truth. A device keeps a copy and is sent the results of `take_changes`, in order,
    never the table. Raises ValueError for a size below 1.
    """

    def __init__(self, max_requests: int, max_context_len: int) -> None:
        if max_requests < 1 or max_context_len < 1:
            raise ValueError(f"a table of {max_requests} requests by {max_context_len} positions holds nothing")
        self.max_requests, self.max_context_len = max_requests, max_context_len
        self.req_to_token = sparse_table(max_requests, max_context_len)
        self._free = list(range(max_requests - 1, -1, -1))
        self._in_use: set[int] = set()
        # Changes that were not taken yet: cells, and runs of positions by row (first position, slots).
        self._changes: list[RowChanges] = []
        self._runs: dict[int, list[tuple[int, Slots]]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """Return a free row, or None if there is none."""
        if not self._free:
            return None
        row = self._free.pop()
        self._in_use.add(row)
        return row

    def free(self, row: int) -> None:
        """Take a row back, and drop its changes that were not taken. Raises ValueError where it is not in use."""
        if row not in self._in_use:
            raise ValueError(f"freeing row {row}, which is not in use")
        self._in_use.remove(row)
        self._free.append(row)
        self.truncate(row, 0)

    def truncate(self, row: int, length: int) -> None:
        """Void a row from position `length` on: changes there that nobody has taken are dropped."""
        runs = [(start, slots[: length - start]) for start, slots in self._runs.pop(row, ()) if start < length]
        if runs:
            self._runs[row] = runs
        for i, change in enumerate(self._changes):
            kept = (change.rows != row) | (change.positions < length)
            if not kept.all():
                self._changes[i] = RowChanges(change.rows[kept], change.positions[kept], change.slots[kept])

    def write(self, row: int, start: int, slots: Slots) -> None:
        """Map positions start .. start + len(slots) - 1 of a row to `slots` `[n]` int32, which must not change."""
        self.req_to_token[row, start : start + len(slots)] = slots
        self._runs.setdefault(row, []).append((start, slots))

    def write_each(self, rows: NDArray[np.int32], positions: NDArray[np.int32], slots: Slots) -> None:
        """Map one position of each of `rows` `[n]` to one slot. The arrays are kept and must not change."""
        self.req_to_token[rows, positions] = slots
        self._changes.append(RowChanges(rows, positions, slots))

    def take_changes(self) -> RowChanges:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        if self._runs:
            changes.append(_cells_of(self._runs))
            self._runs = {}
        if not changes:
            return NO_CHANGES
        if len(changes) == 1:
            return changes[0]
        return RowChanges(*map(np.concatenate, zip(*(vars(change).values() for change in changes), strict=True)))

    def give_back(self, changes: RowChanges) -> None:
        """Put back changes that never reached the device, before all newer ones."""
        self._changes.insert(0, changes)


def _cells_of(runs: Mapping[int, Sequence[tuple[int, Slots]]]) -> RowChanges:
    """The cells of runs by row; those of a row in the order in which they were written."""
    rows, starts, slots = zip(*((row, *run) for row, own in runs.items() for run in own), strict=True)
    lengths = np.fromiter(map(len, slots), np.int32, len(slots))
    positions = np.arange(lengths.sum(), dtype=np.int32)
    positions += np.repeat(np.array(starts, np.int32) - (np.cumsum(lengths, dtype=np.int32) - lengths), lengths)
    return RowChanges(np.repeat(np.array(rows, np.int32), lengths), positions, np.concatenate(slots))


def sparse_table(num_rows: int, num_columns: int) -> NDArray[np.int32]:
    """Zeros `[num_rows, num_columns]` int32, at least one, whose memory is taken page by page as they are written.

    np.zeros requests huge pages, with which the first cells of all rows would take nearly the whole table.
    """
    num_bytes = 4 * num_rows * num_columns
    if sys.platform == "win32":
        memory = mmap.mmap(-1, num_bytes)
    else:  # private, so that a forked process has its own table
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32).reshape(num_rows, num_columns)
