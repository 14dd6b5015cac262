"""Which slot holds the KV of which position of which request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memory_pool.slot_allocator import Slots
from memory_pool.sparse_table import sparse_table


@dataclass(frozen=True)
class RowChanges:
    """Cells of the table that have changed: three int32 arrays `[n]`, no (row, position) named twice."""

    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: Slots

    def __len__(self) -> int:
        return len(self.slots)


NO_CHANGES = RowChanges(*(np.zeros(0, dtype=np.int32) for _ in range(3)))


class ReqToTokenPool:
    """The table `req_to_token` `[max_requests, max_context_len]` int32: position -> slot, a row a live request.

    This table on the host is the truth. A device keeps a copy of it and is sent what `take_changes` returns,
    in order, never the table.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, max_requests: int, max_context_len: int) -> None:
        if max_requests < 1 or max_context_len < 1:
            raise ValueError(f"a table of {max_requests} requests by {max_context_len} positions holds nothing")
        self.max_requests = max_requests
        self.max_context_len = max_context_len
        self.req_to_token = sparse_table(max_requests, max_context_len)
        self._free = list(range(max_requests - 1, -1, -1))
        self._in_use = [False] * max_requests
        # What nobody has taken: cells of any rows, older than all else where they were given back, and stretches.
        self._changes: list[RowChanges] = []
        self._stretches: dict[int, list[tuple[int, Slots]]] = {}  # by row: first position, slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """Return a free row, or None if there is none."""
        if not self._free:
            return None
        row = self._free.pop()
        self._in_use[row] = True
        return row

    def free(self, row: int) -> None:
        """Take a row back. Changes of it that nobody has taken are dropped: the next owner writes its own.

        Raises:
            ValueError: the row is not in use.
        """
        if not 0 <= row < self.max_requests or not self._in_use[row]:
            raise ValueError(f"freeing row {row}, which is not in use")
        self._in_use[row] = False
        self._free.append(row)
        self.truncate(row, 0)

    def truncate(self, row: int, length: int) -> None:
        """Void a row from position `length` on: changes there that nobody has taken are dropped."""
        stretches = self._stretches.pop(row, ())
        kept_stretches = [(start, slots[: length - start]) for start, slots in stretches if start < length]
        if kept_stretches:
            self._stretches[row] = kept_stretches
        if self._changes:
            kept = []
            for change in self._changes:
                dropped = (change.rows == row) & (change.positions >= length)
                if not dropped.any():
                    kept.append(change)
                elif not dropped.all():
                    others = ~dropped
                    kept.append(RowChanges(change.rows[others], change.positions[others], change.slots[others]))
            self._changes = kept

    def write(self, row: int, start: int, slots: Slots) -> None:
        """Map positions start .. start + len(slots) - 1 of a row to `slots` `[n]` int32, which must not change."""
        self.req_to_token[row, start : start + len(slots)] = slots
        self._stretches.setdefault(row, []).append((start, slots))

    def write_each(self, rows: NDArray[np.int32], positions: NDArray[np.int32], slots: Slots) -> None:
        """Map one position of each of `rows` `[n]` to one slot. The arrays are kept, and must not change."""
        self.req_to_token[rows, positions] = slots
        self._changes.append(RowChanges(rows, positions, slots))

    def take_changes(self) -> RowChanges:
        """What has changed since the last call."""
        changes, self._changes = self._changes, []
        if self._stretches:
            changes.append(_cells(self._stretches))
            self._stretches = {}
        if not changes:
            return NO_CHANGES
        if len(changes) == 1:
            return changes[0]
        return RowChanges(
            np.concatenate([c.rows for c in changes]),
            np.concatenate([c.positions for c in changes]),
            np.concatenate([c.slots for c in changes]),
        )

    def give_back(self, changes: RowChanges) -> None:
        """Put changes that never reached the device before all newer ones."""
        self._changes.insert(0, changes)


def _cells(stretches: Mapping[int, Sequence[tuple[int, Slots]]]) -> RowChanges:
    """Stretches of rows as cells; those of a row in the order in which they were written."""
    slots = [own for row in stretches.values() for _, own in row]
    lengths = np.fromiter(map(len, slots), np.int32, len(slots))
    rows = np.fromiter((row for row, own in stretches.items() for _ in own), np.int32, len(slots))
    starts = np.fromiter((start for row in stretches.values() for start, _ in row), np.int32, len(slots))
    positions = np.arange(lengths.sum(), dtype=np.int32)
    positions += np.repeat(starts - (np.cumsum(lengths, dtype=np.int32) - lengths), lengths)
    return RowChanges(np.repeat(rows, lengths), positions, np.concatenate(slots))
