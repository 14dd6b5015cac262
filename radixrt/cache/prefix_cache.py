"""The one place where a KV slot changes owner.

Every slot is in exactly one of these states:

    reserved   slot 0
    free       in the allocator's free list
    private    in a live lease's row, at a position in [committed, allocated_len)
    evictable  in a tree node that no lease locks
    locked     in a tree node that a lease locks; rows at positions in [0, committed) point at these
    pending    given up, but a pass in flight may still read or write it
    arriving   getting the KV of a kept cache; nothing points at it yet

    free --extend--> private --commit--> locked <--unlock/lock--> evictable --evict--> free
                        |  \\--duplicate of a token the tree has--> pending
                        \\--truncate, release--> pending --(passes in flight have ended)--> free
                                         locked --(the same, beyond what is reusable)--> free
    free --begin_adoption--> arriving --adopt--> evictable
                                 \\--cancel_adoption--> free

A lease that is released while passes are in flight keeps its row, its lock and its private slots until the last
of these passes has ended; then all of it is freed at once.

The tree and the host tier choose the slots that leave the device, and return them to be freed here. With a host
tier, evicted tokens live on in host slots, and a match may go on in nodes that only the host has; these are loaded
when a lease is acquired. The copies are booked as `transfers` and made before the next pass, while the books here
say at once what will be true then. No pass in flight minds: an evicted slot was computed by passes that have ended
and is read by none, and none reads or writes a free slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from memory_pool.kv_transfers import KVTransfers
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.frontiers import Frontier, Frontiers
from radixrt.cache.host_tier import HostTier
from radixrt.cache.radix_tree import NO_MATCH, Match, Namespace, Node, RadixTree, Slots, Tokens
from radixrt.cache.snapshot import Adoption, TreeSnapshot, adopt, plan_adoption


@dataclass(eq=False)
class Lease:
    """What one live request holds: a row, a locked path, private slots. 0 <= committed <= allocated_len."""

    row: int  # in `req_to_token` and in `allocated_lens`
    node: Node  # the end of the committed part of its tokens; locked
    committed: int  # positions whose slots belong to the tree
    matched: int  # positions that were found in the tree when the lease was made
    allocated_lens: NDArray[np.int32]  # the cache's
    loaded: int = 0  # matched positions that only the host had
    released: bool = False
    frontier: Frontier | None = None  # where others see what it computes next, if it computes anything for them
    reusable_len: int | None = None  # set on release: leading tokens that later requests may share; None: all

    @property
    def allocated_len(self) -> int:
        """Positions that have a slot; those from `committed` on are private."""
        return int(self.allocated_lens[self.row])


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache since it was made, and its sizes now. All are in tokens, a slot a token.

    Attributes:
        prompt_tokens, cached_tokens: of all prompts that were admitted, each once; those found in the tree.
        recomputed_tokens: tokens computed again, after a retraction or for one of several answers.
        evicted_tokens: tokens that had to leave the device.
        capacity: slots of the pool, without the reserved one.
        free, evictable, locked, private, pending, arriving: slots by state; they add up to the capacity.
        stored_tokens, loaded_tokens: tokens copied to the host, and back from it.
        host_capacity, host_free: slots of the host's pool, and how many of them are free; 0 without one.
    """

    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    evicted_tokens: int
    capacity: int
    free: int
    evictable: int
    locked: int
    private: int
    pending: int
    arriving: int
    stored_tokens: int = 0
    loaded_tokens: int = 0
    host_capacity: int = 0
    host_free: int = 0

    @property
    def host_tokens(self) -> int:
        """Tokens that have a copy on the host."""
        return self.host_capacity - self.host_free

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the tree; 0 before the first request."""
        return _share(self.cached_tokens, self.prompt_tokens)


@dataclass
class _Pending:
    """What becomes free once pass number `after` has ended: slots, or all that a released lease holds."""

    after: int
    tokens: int  # an estimate of the tokens that this makes available
    slots: Slots | None = None
    lease: Lease | None = None


class PrefixCache:
    """Matches prompts, lends slots and rows, publishes what was computed.

    Args:
        rows, slots: the table of positions to slots, and the free list of the KV pool.
        host_slots: the free list of the host's KV pool; None: evicted tokens are forgotten.
        min_store_tokens: see `HostTier`.
        enabled: False: nothing is matched and nothing is published.
        force_miss: nothing is matched, but everything is published and remapped as usual.

    Attributes:
        allocated_lens: `[max_requests]` int32, positions that have a slot, of the lease of each row.
        transfers: copies between the tiers, to be made before the next pass.
        leases: live ones, and released ones that are pending.
    """

    def __init__(
        self,
        rows: ReqToTokenPool,
        slots: SlotAllocator,
        *,
        host_slots: SlotAllocator | None = None,
        min_store_tokens: int = 256,
        enabled: bool = True,
        force_miss: bool = False,
    ) -> None:
        self.rows = rows
        self.slots = slots
        self.transfers = KVTransfers()
        self.tree = RadixTree()
        self.host: HostTier | None = None
        if host_slots is not None:
            self.host = HostTier(self.tree, host_slots, self.transfers, min_store_tokens=min_store_tokens)
        self.frontiers = Frontiers()
        self.enabled = enabled
        self.force_miss = force_miss
        self.passes_launched = self.passes_ended = 0
        self.leases: set[Lease] = set()
        self.allocated_lens = np.zeros(rows.max_requests, dtype=np.int32)
        self.prompt_tokens = self.cached_tokens = self.recomputed_tokens = self.evicted_tokens = 0
        self._pending: deque[_Pending] = deque()
        self._arriving = 0

    @property
    def available(self) -> int:
        """Slots that can be had at once: free ones, and evictable tokens."""
        return self.slots.num_free + self.tree.evictable_tokens

    @property
    def incoming(self) -> int:
        """About how many more slots will be available once the passes in flight have ended."""
        return sum(pending.tokens for pending in self._pending)

    @property
    def in_flight(self) -> int:
        """Passes launched and not yet ended."""
        return self.passes_launched - self.passes_ended

    def pending_slots(self) -> list[Slots]:
        """Slots that wait for passes to end: duplicates, truncated ones, the private slots of released leases."""
        own = [pending.slots for pending in self._pending if pending.slots is not None]
        return own + [self._private(lease) for lease in self.pending_leases()]

    def pending_leases(self) -> list[Lease]:
        """Released leases that wait for passes to end."""
        return [pending.lease for pending in self._pending if pending.lease is not None]

    def match(self, namespace: Namespace, tokens: Tokens, limit: int) -> Match:
        """The part of `tokens` `[n]` that need not be computed: at most `limit` tokens of it."""
        if self.force_miss or not self.enabled:
            return NO_MATCH
        return self.tree.match(namespace, tokens, limit)

    def leader(self, match: Match, tokens: Tokens, limit: int) -> Frontier | None:
        """The frontier of a lease that is computing the token after `match`, just made with the same arguments.

        Tokens beyond the limit are always computed by their own request: nobody waits for them.
        """
        if self.force_miss or not self.enabled or match.length >= limit:
            return None
        return self.frontiers.leader(match, tokens)

    def acquire(self, namespace: Namespace, tokens: Tokens, match: Match, reserve: int) -> Lease | None:
        """Lock `match`, the tokens found of `tokens`, and take a row for a request that will compute the rest.

        The tree has not changed since that match. Matched tokens that only the host has are loaded. Returns None,
        having at most split an edge, if there is no row, or if after locking the match fewer slots are available
        than `reserve` and all tokens that are not on the device need.
        """
        on_device = match.on_device
        node, matched = self.tree.node_at(namespace, on_device), on_device.length
        self.tree.lock(node)  # shrinks what is available, so the budget is checked after it
        needed = len(tokens) - matched + reserve
        row = self.rows.alloc() if needed <= self.available else None
        if row is None:
            self.tree.unlock(node)
            return None
        loaded = 0
        if matched < match.length:
            below = self._load(node, namespace, tokens, match)
            if below is None:  # slots were refused that should be there
                self.rows.free(row)
                self.tree.unlock(node)
                return None
            node, loaded = below
            matched += loaded
        self.tree.touch(node)
        if matched:
            self.rows.write(row, 0, self.tree.slots_of(node))
        self.allocated_lens[row] = matched
        lease = Lease(row, node, matched, matched, self.allocated_lens, loaded)
        self.leases.add(lease)
        self._announce(lease, tokens)
        return lease

    def extend(self, lease: Lease, count: int) -> Slots | None:
        """Give a lease slots for `count` more positions: `[count]` int32, or None, changing nothing."""
        slots = self._alloc(count)
        if slots is not None:
            self.rows.write(lease.row, lease.allocated_len, slots)
            self.allocated_lens[lease.row] += count
        return slots

    def extend_each(self, rows: NDArray[np.int32]) -> Slots | None:
        """Give the lease of each of `rows` `[n]` a slot for one more position: `[n]`; None changes nothing."""
        slots = self._alloc(len(rows))
        if slots is not None and len(rows):
            positions = self.allocated_lens[rows]
            self.rows.write_each(rows, positions, slots)
            self.allocated_lens[rows] = positions + 1
        return slots

    def truncate(self, lease: Lease, length: int) -> None:
        """Take the slots of positions [length, allocated_len) of a live lease back: the row ends at `length` then.

        They are free once the passes in flight have ended.

        Raises:
            ValueError: the lease is released, or `length` is not in committed .. allocated_len.
        """
        end = lease.allocated_len
        if lease.released or not lease.committed <= length <= end:
            kind = "released" if lease.released else "live"
            lens = f"{lease.committed} are committed, {end} allocated"
            raise ValueError(f"a {kind} lease cannot be truncated to {length} tokens: {lens}")
        if length < end:
            slots = self.rows.req_to_token[lease.row, length:end].copy()
            self.rows.truncate(lease.row, length)
            self.allocated_lens[lease.row] = length
            self._defer_free(_Pending(self.passes_launched, end - length, slots=slots))

    def commit(self, lease: Lease, tokens: Tokens, computed: int) -> None:
        """Publish positions [committed, computed) of a live lease: their KV is computed, finite, and of `tokens`.

        `tokens` `[n >= computed]` ends where the request's extend ends: others may wait for its uncomputed part.
        Where the tree has a token already, the row is turned to the tree's slot first, and the duplicate then
        becomes pending.
        """
        start = lease.committed
        if not self.enabled or computed <= start:
            return
        own = self.rows.req_to_token[lease.row, start:computed].copy()
        node, canonical = self.tree.insert(lease.node, tokens[start:computed], own)
        duplicates = len(canonical)
        if duplicates:
            self.rows.write(lease.row, start, canonical)
            self._defer_free(_Pending(self.passes_launched, duplicates, slots=own[:duplicates]))
        self.tree.lock(node, until=lease.node)
        lease.node, lease.committed = node, computed
        self._announce(lease, tokens)

    def release(self, lease: Lease, reusable_len: int | None = None) -> None:
        """Free all that a lease holds, once the passes in flight have ended. A second call does nothing.

        `reusable_len`: no later request shares more of its leading tokens. Tokens that it published beyond them
        are freed too, without waiting for eviction, as far as no other request holds them.
        """
        if lease.released:
            return
        lease.released, lease.reusable_len = True, reusable_len
        self._unannounce(lease)
        alone = takewhile(lambda node: node.lock == 1, self.tree.path(lease.node))
        tokens = lease.allocated_len - lease.committed + sum(len(node.tokens) for node in alone)
        self._defer_free(_Pending(self.passes_launched, tokens, lease=lease))

    def pass_launched(self) -> None:
        """Count a pass that has been launched and reads rows and slots as they are now."""
        self.passes_launched += 1

    def pass_ended(self) -> None:
        """Count the oldest pass in flight as ended, and free what waited for it alone."""
        self.passes_ended += 1
        while self._pending and self._pending[0].after <= self.passes_ended:
            self._free_pending(self._pending.popleft())

    def begin_adoption(self, snapshot: TreeSnapshot, weights_version: int) -> Adoption:
        """Choose the part of a faultless snapshot that is new and finds free slots, most recently used first.

        Nothing is evicted for it. Once the KV is in the slots that it names, `adopt` publishes it; or
        `cancel_adoption` frees them. Until then nothing else is to be asked of this cache.
        """
        adoption = plan_adoption(self.tree, snapshot, weights_version, self.slots.num_free)
        slots = self.slots.alloc(adoption.num_taken)
        assert slots is not None  # there are as many
        adoption.assign(slots)
        self._arriving = len(slots)
        return adoption

    def adopt(self, adoption: Adoption) -> None:
        """Publish an adoption. It counts as used before all else that is in the tree."""
        adopt(self.tree, adoption)
        self._arriving = 0

    def cancel_adoption(self, adoption: Adoption) -> None:
        """Free the slots of an adoption; the tree stays as it was."""
        self.slots.free(adoption.slots[adoption.slots > 0])
        self._arriving = 0

    def evict(self, num_tokens: int) -> None:
        """Take `num_tokens` evictable tokens or some more, or all there are, off the device."""
        # Who reads a slot locks its node until its last pass has ended, so evicted slots are free at once.
        self._free_evicted((self.tree if self.host is None else self.host).evict(num_tokens))

    def flush(self) -> int:
        """Forget every prefix that no live request uses, in both tiers. Returns how many tokens were forgotten."""
        before = self.tree.total_tokens
        if self.host is not None:
            self.host.flush()
        self._free_evicted(self.tree.evict(self.tree.evictable_tokens))
        return before - self.tree.total_tokens

    def count(self, *, prompt: int = 0, cached: int = 0, recomputed: int = 0) -> None:
        """Add to the token counters: a request's prompt when it is first admitted, recomputation whenever."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.recomputed_tokens += recomputed

    @property
    def hit_rate(self) -> float:
        """As `CacheStats.hit_rate`, at less cost."""
        return _share(self.cached_tokens, self.prompt_tokens)

    def stats(self) -> CacheStats:
        leases = tuple(self.leases)  # another thread may look while this one works
        private = sum(lease.allocated_len - lease.committed for lease in leases if not lease.released)
        host = self.host
        return CacheStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            evicted_tokens=self.evicted_tokens,
            capacity=self.slots.capacity,
            free=self.slots.num_free,
            evictable=self.tree.evictable_tokens,
            locked=self.tree.locked_tokens,
            private=private,
            pending=sum(len(slots) for slots in self.pending_slots()),
            arriving=self._arriving,
            stored_tokens=0 if host is None else host.stored_tokens,
            loaded_tokens=0 if host is None else host.loaded_tokens,
            host_capacity=0 if host is None else host.slots.capacity,
            host_free=0 if host is None else host.slots.num_free,
        )

    def _alloc(self, count: int) -> Slots | None:
        missing = count - self.slots.num_free
        if missing > self.tree.evictable_tokens:
            return None  # nothing is evicted in vain
        if missing > 0:
            self.evict(missing)
        return self.slots.alloc(count)

    def _free_evicted(self, slots: Slots) -> None:
        self.slots.free(slots)
        self.evicted_tokens += len(slots)

    def _load(self, top: Node, namespace: Namespace, tokens: Tokens, match: Match) -> tuple[Node, int] | None:
        """Load the part of a match that only the host has, below `top`, which is locked.

        Returns the node where the match ends, locked, and the number of tokens loaded; None if there are no slots.
        """
        assert self.host is not None  # it has something
        self.tree.touch(match.node)  # so other tokens leave first to make room
        slots = self._alloc(match.length - match.on_device.length)
        if slots is None:
            return None
        # Stores that made room may have dropped the end of the match from the host all the same.
        end = self.tree.node_at(namespace, self.tree.match(namespace, tokens, match.length))
        loaded = self.host.load(end, top, slots)
        self.slots.free(slots[loaded:])
        self.tree.lock(end, until=top)
        return end, loaded

    def _private(self, lease: Lease) -> Slots:
        return self.rows.req_to_token[lease.row, lease.committed : lease.allocated_len].copy()

    def _defer_free(self, pending: _Pending) -> None:
        if self.in_flight:
            self._pending.append(pending)
        else:
            self._free_pending(pending)

    def _free_pending(self, pending: _Pending) -> None:
        if pending.slots is not None:
            self.slots.free(pending.slots)
        if (lease := pending.lease) is not None:
            self.slots.free(self._private(lease))
            self.slots.free(self.tree.unlock(lease.node, lease.reusable_len))
            self.rows.free(lease.row)
            self.leases.remove(lease)

    def _announce(self, lease: Lease, tokens: Tokens) -> None:
        """Let others wait for the token that this lease computes next."""
        self._unannounce(lease)
        if self.enabled and lease.committed < len(tokens):
            lease.frontier = Frontier(lease.node, lease.committed, tokens)
            self.frontiers.announce(lease.frontier)

    def _unannounce(self, lease: Lease) -> None:
        if lease.frontier is not None:
            self.frontiers.unannounce(lease.frontier)
            lease.frontier = None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
