"""The host tier: evicted nodes live on in host memory, and are loaded again when a prompt matches them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory_pool.kv_transfers import KVTransfer, KVTransfers
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.radix_tree import DEVICE, EMPTY, HOST, Node, RadixTree, Slots


@dataclass
class HostTier:
    """Moves nodes of a tree between the device and the host, and owns the host's slots.

    Each host slot is free or in exactly one tree node. Device slots stay the cache's: `evict` returns those to be
    freed, `load` takes those to be filled. Copies are booked as `transfers`, made in order before the next pass.
    """

    tree: RadixTree
    slots: SlotAllocator  # of the host's pool
    transfers: KVTransfers
    min_store_tokens: int  # of a node, as far as it has them, are stored together: small pieces cost time
    stored_tokens: int = 0
    loaded_tokens: int = 0

    def evict(self, num_tokens: int) -> Slots:
        """Move `num_tokens` tokens or some more, or all that can be, to the host. Returns their device slots."""
        freed: list[Slots] = [EMPTY]
        left = num_tokens
        while left > 0:
            node = self.tree.next_victim(min(max(left, self.min_store_tokens), self.slots.capacity))
            if node is None:
                break
            if node.slots[HOST] is None:
                self._store(node)
            freed.append(self.tree.detach(node, DEVICE))
            left -= len(freed[-1])
        return np.concatenate(freed)

    def load(self, end: Node, slots: Slots) -> int:
        """Put what only the host has of the path to `end` in `slots` too. Returns how many it takes."""
        loaded = 0
        for node in reversed([node for node in self.tree.path(end) if node.slots[DEVICE] is None]):
            host_slots = node.slots[HOST]
            assert host_slots is not None  # it is nowhere else
            own = slots[loaded : loaded + len(node.tokens)]
            self.transfers.book(KVTransfer(False, host_slots, own))
            self.tree.attach(node, DEVICE, own)
            loaded += len(own)
        self.loaded_tokens += loaded
        return loaded

    def drop(self, num_tokens: int) -> None:
        """Drop the copies of at least `num_tokens` tokens, or all, those used longest ago first."""
        self.slots.free(self.tree.evict(num_tokens, HOST))

    def _store(self, node: Node) -> None:
        """Copy a node, no longer than the host's pool, to the host, in place of the least recently used copies."""
        slots, missing = node.slots[DEVICE], len(node.tokens) - self.slots.num_free
        if missing > 0:
            self.drop(missing)
        host_slots = self.slots.alloc(len(node.tokens))
        assert slots is not None  # it is about to leave the device
        assert host_slots is not None  # nothing is locked there
        self.transfers.book(KVTransfer(True, slots, host_slots))
        self.tree.attach(node, HOST, host_slots)
        self.tree.offer(node, HOST)
        self.stored_tokens += len(host_slots)
