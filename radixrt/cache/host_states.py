"""States in host memory: what the device gives up lives on there, and is loaded where a lease begins with it."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from memory_pool.kv_transfers import KVTransfer, KVTransfers
from memory_pool.slot_allocator import SlotAllocator
from radixrt.arrays import Int32Array
from radixrt.cache.radix_tree import Node


class HostStates:
    """Owns the host's states, each free or at one node of the tree, in whichever tiers that node's tokens are.

    Copies are booked as transfers, in order before the next pass. So a state is free as soon as a transfer that
    reads it has been booked: whatever is copied there comes later. What a store reads was left by passes that have
    ended. What a load writes was free: no pass in flight reads or writes it.

    Attributes:
        kept: by state, the node that has it.
        ends: those of ends of answers with which no lease has begun.
        tokens_each: as many tokens have KV of a state's size.
        stored, loaded: states that were copied to the host, and back.
    """

    def __init__(self, allocator: SlotAllocator, transfers: KVTransfers, tokens_each: int = 1) -> None:
        self.allocator, self.tokens_each = allocator, tokens_each
        self.kept: dict[int, Node] = {}
        self.stored = self.loaded = 0
        self.ends = set[int]()
        self._transfers = transfers

    def store(self, node: Node, *, is_end: bool) -> None:
        """Copy the state of a node, which the device gives up, unless the host has it, or the node is in no tier,
        or what would have to go was used later: the one used longest ago, of ends of answers that nobody has gone
        on from, if they are more than half of all, and else of the others.
        """
        if node.host_state or not len(node.tokens):
            return
        taken = self.allocator.alloc(1)
        if taken is None:
            of_ends = 2 * len(self.ends) > self.allocator.capacity
            kind = (kept for state, kept in self.kept.items() if (state in self.ends) == of_ends)
            oldest = min(kind, key=attrgetter("last_access"))
            if oldest.last_access >= node.last_access:
                return
            self.drop(oldest)
            taken = self.allocator.alloc(1)
            assert taken is not None  # one has just gone
        state = node.host_state = int(taken[0])
        self.kept[state] = node
        if is_end:
            self.ends.add(state)
        self._transfers.book(KVTransfer(True, _one(node.state), taken, of_states=True))
        self.stored += 1

    def load(self, node: Node, state: int) -> None:
        """Copy a node's state to one on the device, which is free."""
        assert node.host_state  # nothing that was stored to make room was used later
        self._transfers.book(KVTransfer(False, _one(node.host_state), _one(state), of_states=True))
        self.loaded += 1

    def drop(self, node: Node) -> None:
        """Forget the state of a node."""
        state, node.host_state = node.host_state, 0
        del self.kept[state]
        self.ends.discard(state)
        self.allocator.free(_one(state))


def _one(state: int) -> Int32Array:
    return np.array([state], np.int32)
