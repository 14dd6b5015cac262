"""The free list of KV slots. Numpy only: the scheduler and its simulation run on it without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]


class SlotAllocator:
    """Allocates slots 1 .. num_slots - 1. Slot 0 is reserved: padding is written there, and nothing reads it.

    Whenever nothing is in use, the order is that of the start again: ascending runs, which are read faster. Raises
    ValueError for fewer than two slots.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots is {num_slots}; slot 0 is reserved, so at least 2 are needed")
        self.num_free = self.capacity = num_slots - 1  # the latter: slots that can be in use at once
        self._stack = np.arange(self.capacity, 0, -1, dtype=np.int32)  # [0, num_free) of it is live
        self._in_use = np.zeros(num_slots, dtype=bool)
        self._mark = np.zeros(num_slots, dtype=np.int32)

    def alloc(self, count: int) -> Slots | None:
        """Return `count` slots `[count]` int32, or None, without a change, if fewer are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} slots")
        if count > self.num_free:
            return None
        self.num_free -= count
        slots = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self._in_use[slots] = True
        return slots

    def free(self, slots: Slots) -> None:
        """Take `slots` `[n]` int32 back. Raises ValueError, without a change, where one is out of range, reserved,
        free already, or occurs twice.
        """
        n = len(slots)
        if n == 0:
            return
        # As unsigned, the least is above all others if it is negative. Slot 0 is never in use.
        is_outside = np.maximum.reduce(slots.view(np.uint32)) > self.capacity
        if is_outside or np.count_nonzero(self._in_use[slots]) < n:
            if slots.min() < 1 or slots.max() > self.capacity:
                raise ValueError(f"slots from {slots.min()} to {slots.max()} are not all in 1..{self.capacity}")
            raise ValueError(f"freeing slots that are free already: {slots[~self._in_use[slots]][:8].tolist()}")
        order = np.arange(n, dtype=np.int32)
        self._mark[slots] = order
        if np.count_nonzero(self._mark[slots] != order):
            raise ValueError(f"freeing slots twice in one call: {slots[self._mark[slots] != order][:8].tolist()}")
        self._in_use[slots] = False
        self._stack[self.num_free : self.num_free + n] = slots[::-1]
        self.num_free += n
        if self.num_free == self.capacity:
            self._stack = np.arange(self.capacity, 0, -1, dtype=np.int32)

    def free_slots(self) -> Slots:
        """A copy of the free list `[num_free]` int32, in no particular order (for checks)."""
        return self._stack[: self.num_free].copy()
