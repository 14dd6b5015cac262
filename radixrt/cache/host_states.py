"""States in host memory: what the device gives up lives on there, and is loaded where a lease begins with it."""

from __future__ import annotations

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
        tokens_each: as many tokens have KV of a state's size.
        stored, loaded: states that were copied to the host, and back.
    """

    def __init__(self, allocator: SlotAllocator, transfers: KVTransfers, tokens_each: int = 1) -> None:
        self.allocator, self.tokens_each = allocator, tokens_each
        self.kept: dict[int, Node] = {}
        self.stored = self.loaded = 0
        self._ends = set[int]()  # of answers, with which no lease has begun
        self._transfers = transfers

    def store(self, node: Node, *, is_end: bool) -> None:
        """Copy the state of a node, which the device gives up, unless the host has it, or the node is in no tier,
        or all that is kept is of more use: of the least are ends of answers that nobody has gone on from, then
        what was used longest ago.
        """
        if node.host_state or not len(node.tokens):
            return
        taken = self.allocator.alloc(1)
        if taken is None:
            least = min(self.kept.values(), key=self._use_of)
            if self._use_of(least) >= (not is_end, node.last_access):
                return
            self.drop(least)
            taken = self.allocator.alloc(1)
            assert taken is not None  # one has just gone
        state = node.host_state = int(taken[0])
        self.kept[state] = node
        if is_end:
            self._ends.add(state)
        self._transfers.book(KVTransfer(True, _one(node.state), taken, of_states=True))
        self.stored += 1

    def expect(self, node: Node) -> None:
        """Let nothing that is stored take the place of a node's state until a lease has begun with it: nothing was
        used later.
        """
        self._ends.discard(node.host_state)

    def load(self, node: Node, state: int) -> None:
        """Copy a node's state to one on the device, which is free."""
        assert node.host_state  # what was stored since it was expected has left it there
        self._transfers.book(KVTransfer(False, _one(node.host_state), _one(state), of_states=True))
        self.loaded += 1

    def drop(self, node: Node) -> None:
        """Forget the state of a node."""
        state, node.host_state = node.host_state, 0
        del self.kept[state]
        self._ends.discard(state)
        self.allocator.free(_one(state))

    def _use_of(self, node: Node) -> tuple[bool, int]:
        return node.host_state not in self._ends, node.last_access


def _one(state: int) -> Int32Array:
    return np.array([state], np.int32)
