"""The host tier: evicted nodes live on in host memory, and are loaded again when a prompt matches them."""

from __future__ import annotations

import numpy as np

from memory_pool.kv_transfers import KVTransfers
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.radix_tree import Node, RadixTree, Slots


class HostTier:
    """Moves nodes of a tree between the device and the host, and owns the host's slots.

    Each host slot is free or in exactly one tree node. Device slots stay the cache's: `evict` returns those to be
    freed, `load` takes those to be filled. Copies are booked as `transfers`, made in order before the next pass.

    `slots` is the free list of the host's pool. At least `min_store_tokens` tokens of a node are stored together:
    small pieces cost time.
    """

    def __init__(
        self, tree: RadixTree, slots: SlotAllocator, transfers: KVTransfers, *, min_store_tokens: int
    ) -> None:
        self.slots = slots
        self.stored_tokens = self.loaded_tokens = 0
        self._tree = tree
        self._transfers = transfers
        self._min_store_tokens = min_store_tokens

    def evict(self, num_tokens: int) -> Slots:
        """Move `num_tokens` tokens or some more, or all that can be, to the host. Returns their device slots."""
        freed: list[Slots] = [np.zeros(0, dtype=np.int32)]
        left = num_tokens
        while left > 0:
            node = self._tree.next_victim(min(max(left, self._min_store_tokens), self.slots.capacity))
            if node is None:
                break
            if node.host_slots is None:
                self._store(node)
            freed.append(self._tree.detach_device(node))
            left -= len(freed[-1])
        return np.concatenate(freed)

    def load(self, end: Node, top: Node, slots: Slots) -> int:
        """Put the path from `top` to `end`, which only the host has, in `slots` too. Returns how many it takes."""
        loaded = 0
        for node in reversed(list(self._tree.path(end, until=top))):
            assert node.host_slots is not None  # it is nowhere else
            own = slots[loaded : loaded + len(node.tokens)]
            self._transfers.load(node.host_slots, own)
            self._tree.attach_device(node, own)
            loaded += len(own)
        self.loaded_tokens += loaded
        return loaded

    def flush(self) -> None:
        """Drop every copy."""
        self.slots.free(self._tree.evict_from_host(self.slots.capacity))

    def _store(self, node: Node) -> None:
        """Copy a node, no longer than the host's pool, to the host, in place of the least recently used copies."""
        assert node.slots is not None  # it is about to leave the device
        missing = len(node.tokens) - self.slots.num_free
        if missing > 0:
            self.slots.free(self._tree.evict_from_host(missing))
        host_slots = self.slots.alloc(len(node.tokens))
        assert host_slots is not None  # nothing is locked there
        self._transfers.store(node.slots, host_slots)
        self._tree.attach_host(node, host_slots)
        self.stored_tokens += len(host_slots)
