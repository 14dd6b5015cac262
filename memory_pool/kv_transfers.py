"""Copies of KV and of states between device and host that are booked and not yet made. Numpy only, like the free
lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from memory_pool.slot_allocator import Slots


@dataclass(frozen=True)
class KVTransfer:
    """Copy the KV of tokens in all layers from slots of one tier to distinct ones of the other, `[n]` int32; or
    states of sequences, likewise.
    """

    to_host: bool
    sources: Slots
    targets: Slots
    of_states: bool = False


@dataclass
class KVTransfers:
    """Transfers in the order in which they must be made: each may read or reuse slots of earlier ones. Those of KV
    and those of states have no memory in common, so that each kind has its own order.

    All are made before the next pass. Transfers that were taken and not made are given back; none may be made
    twice, as its source may have been overwritten since.
    """

    booked: deque[KVTransfer] = field(default_factory=deque)

    def book(self, transfer: KVTransfer) -> None:
        """Add a transfer to those that wait."""
        self.booked.append(transfer)

    def take(self) -> deque[KVTransfer]:
        """The transfers booked since the last call, merged as far as their order allows."""
        booked, self.booked = self.booked, deque()
        by_kind = sorted(booked, key=lambda transfer: transfer.of_states)  # stable
        runs = groupby(by_kind, key=lambda transfer: (transfer.of_states, transfer.to_host))
        return deque(transfer for _, run in runs for transfer in _merged([*run]))

    def give_back(self, transfers: deque[KVTransfer]) -> None:
        """Put back transfers that were taken and not made, before all newer ones."""
        self.booked.extendleft(reversed(transfers))


def _merged(run: Sequence[KVTransfer]) -> Sequence[KVTransfer]:
    """Transfers of one direction as one, unless a target is written twice: the last must win."""
    if len(run) == 1:
        return run
    merged = KVTransfer(
        run[0].to_host,
        np.concatenate([transfer.sources for transfer in run]),
        np.concatenate([transfer.targets for transfer in run]),
        run[0].of_states,
    )
    return run if len(np.unique(merged.targets)) < len(merged.targets) else [merged]
