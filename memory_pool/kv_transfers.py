"""Copies of KV between device and host that are booked and not yet made. Numpy only, like the free lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memory_pool.slot_allocator import Slots


@dataclass(frozen=True)
class KVTransfer:
    """Copy the KV of tokens from one tier to the other, in all layers.

    A store goes `to_host`, a load back to the device. Slots are `[n]` int32, token by token; targets are distinct.
    """

    to_host: bool
    device_slots: Slots
    host_slots: Slots

    def __len__(self) -> int:
        return len(self.device_slots)

    @property
    def sources(self) -> Slots:
        return self.device_slots if self.to_host else self.host_slots

    @property
    def targets(self) -> Slots:
        return self.host_slots if self.to_host else self.device_slots


class KVTransfers:
    """Transfers in the order in which they must be made: each may read or reuse slots of earlier ones.

    All are made before the next pass. Transfers that were taken and not made are given back; none may be made
    twice, as its source may have been overwritten since.
    """

    def __init__(self) -> None:
        self._booked: deque[KVTransfer] = deque()

    def store(self, device_slots: Slots, host_slots: Slots) -> None:
        """Book a copy to the host."""
        self._booked.append(KVTransfer(True, device_slots, host_slots))

    def load(self, host_slots: Slots, device_slots: Slots) -> None:
        """Book a copy to the device."""
        self._booked.append(KVTransfer(False, device_slots, host_slots))

    def take(self) -> deque[KVTransfer]:
        """The transfers booked since the last call, merged as far as their order allows."""
        booked, self._booked = self._booked, deque()
        out: deque[KVTransfer] = deque()
        while booked:
            run = [booked.popleft()]
            while booked and booked[0].to_host == run[0].to_host:
                run.append(booked.popleft())
            out.extend(_merged(run))
        return out

    def give_back(self, transfers: deque[KVTransfer]) -> None:
        """Put back transfers that were taken and not made, before all newer ones."""
        self._booked.extendleft(reversed(transfers))

    def pending(self) -> tuple[KVTransfer, ...]:
        """The booked transfers, in order (for checks)."""
        return tuple(self._booked)


def _merged(run: Sequence[KVTransfer]) -> Sequence[KVTransfer]:
    """Transfers of one direction as one, unless a target is written twice: the last must win."""
    if len(run) == 1:
        return run
    merged = KVTransfer(
        run[0].to_host,
        np.concatenate([transfer.device_slots for transfer in run]),
        np.concatenate([transfer.host_slots for transfer in run]),
    )
    return run if len(np.unique(merged.targets)) < len(merged) else [merged]
