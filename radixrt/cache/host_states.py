"""States in host memory: what the device gives up lives on there, and is loaded where a lease begins with it."""

from __future__ import annotations

import numpy as np

from memory_pool.kv_transfers import KVTransfer, KVTransfers
from memory_pool.slot_allocator import SlotAllocator
from radixrt.arrays import Int32Array
from radixrt.cache.radix_tree import Node

# What states are worth, least first: ends of answers that one lease has gone on from, to a later end; ends that
# none has gone on from; all others, such as those of places where prompts part.
PASSED, END, SHARED = 0, 1, 2


class HostStates:
    """Owns the host's states, each free or at one node of the tree, in whichever tiers that node's tokens are.

    Copies are booked as transfers, in order before the next pass. So a state is free as soon as a transfer that
    reads it has been booked: whatever is copied there comes later. What a store reads was left by passes that have
    ended. What a load writes was free: no pass in flight reads or writes it.

    Attributes:
        kept: by state, the node that has it.
        expected: the node that a lease is about to begin with: its state makes no room.
        tokens_each: as many tokens have KV of a state's size.
        stored, loaded: states that were copied to the host, and back.
    """

    def __init__(self, allocator: SlotAllocator, transfers: KVTransfers, tokens_each: int = 1) -> None:
        self.allocator, self.tokens_each = allocator, tokens_each
        self.kept: dict[int, Node] = {}
        self.stored = self.loaded = 0
        self.expected: Node | None = None
        self._transfers = transfers

    def store(self, node: Node) -> None:
        """Copy the state of a node, which the device gives up, unless the host has it, or the node is in no tier,
        or all that is kept is worth more, or as much and was used later.
        """
        if node.host_state or not len(node.tokens):
            return
        taken = self.allocator.alloc(1)
        if taken is None:
            others = (kept for kept in self.kept.values() if kept is not self.expected)
            least = min(others, key=_use_of, default=None)
            if least is None or _use_of(least) >= _use_of(node):
                return
            self.drop(least)
            taken = self.allocator.alloc(1)
            assert taken is not None  # one has just gone
        state = node.host_state = int(taken[0])
        self.kept[state] = node
        self._transfers.book(KVTransfer(True, _one(node.state), taken, of_states=True))
        self.stored += 1

    def load(self, node: Node, state: int) -> None:
        """Copy a node's state to one on the device, which is free."""
        assert node.host_state  # it was expected
        self._transfers.book(KVTransfer(False, _one(node.host_state), _one(state), of_states=True))
        self.loaded += 1

    def drop(self, node: Node) -> None:
        """Forget the state of a node."""
        state, node.host_state = node.host_state, 0
        del self.kept[state]
        self.allocator.free(_one(state))


def _use_of(node: Node) -> tuple[int, int]:
    return node.worth, node.last_access


def _one(state: int) -> Int32Array:
    return np.array([state], np.int32)
