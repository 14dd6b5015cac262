"""The one place where a KV slot changes owner.

Every slot is in exactly one of these states:

    reserved   slot 0
    free       in the allocator's free list
    private    in a live lease's row, at a position in [committed, allocated_len)
    evictable  in a tree node that no lease locks
    locked     in a tree node that a lease locks; rows at positions in [0, committed) point at these
    pending    let go, but a pass in flight may still read or write it
    arriving   getting the KV of a kept cache; nothing points at it yet

    free --extend--> private --commit--> locked <--unlock/lock--> evictable --evict--> free
                        |  \\--duplicate of a token the tree has--> pending
                        \\--release--> pending --(passes in flight have ended)--> free
                                         locked --(the same, where nobody wants it)--> free
    free --begin_adoption--> arriving --adopt--> evictable
                                 \\--cancel_adoption--> free

A lease that is released while passes are in flight keeps its row, its lock and its private slots until the last
of these passes has ended; then all of it is let go at once.

With a host tier, what is evicted goes on living in slots of the host, each free or in exactly one tree node, and a
match may go on in nodes that only the host has: these are loaded into device slots when a lease is acquired. Both
copies are booked as `transfers`, which are made in order before the next pass, while the books here say at once
what will be true then: an evicted slot is free at once here too. No pass in flight minds: what is evicted was
computed by passes that have ended and is read by none, and none reads or writes a free slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memory_pool.kv_transfers import KVTransfers
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.radix_tree import Match, Namespace, Node, RadixTree, Slots, Tokens, on_device
from radixrt.cache.snapshot import Adoption, TreeSnapshot, adopt, plan_adoption, take_snapshot

Frontier = tuple[Node, int]  # a node, and the token after it that somebody is computing


@dataclass(eq=False)
class Lease:
    """What one live request holds: a row, a locked path, private slots. 0 <= committed <= allocated_len.

    Attributes:
        row: the request's row in `req_to_token`.
        node: stands for the committed part of its tokens; locked.
        committed: positions whose slots belong to the tree.
        matched: positions that were found in the tree when the lease was made.
        allocated_lens: the cache's column of that name.
        loaded: those of them that only the host had.
        frontier: where others can see that it computes what comes next; None if it computes nothing for others.
        target: the tokens `[n]` that it computes up to.
        reusable_len: once it has been released, how many of its leading tokens anybody wants; None: perhaps all.
    """

    row: int
    node: Node
    committed: int
    matched: int
    allocated_lens: NDArray[np.int32]
    loaded: int = 0
    released: bool = False
    frontier: Frontier | None = None
    target: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    reusable_len: int | None = None

    @property
    def allocated_len(self) -> int:
        """Positions that have a slot; those from `committed` on are private."""
        return int(self.allocated_lens[self.row])


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache since it was made, and its sizes now. All are in tokens, a slot a token.

    Attributes:
        prompt_tokens: tokens of all prompts that were admitted, each request once.
        cached_tokens: those of them that were found in the tree.
        recomputed_tokens: tokens computed again, after a retraction or for one of several answers.
        evicted_tokens: tokens that had to leave the device.
        capacity: slots of the pool, without the reserved one.
        free, evictable, locked, private, pending, arriving: slots by state; they add up to the capacity.
        stored_tokens, loaded_tokens: tokens copied to the host, and back from it.
        host_capacity, host_free: slots of the host's pool, and those of them that hold nothing; 0 without one.
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
        """Tokens that the host has, those among them that are on the device too."""
        return self.host_capacity - self.host_free

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the tree; 0 before the first request."""
        return _share(self.cached_tokens, self.prompt_tokens)


@dataclass
class _Pending:
    """What becomes free once pass number `after` has ended."""

    after: int
    slots: Slots | None = None
    lease: Lease | None = None
    tokens: int = field(default=0)  # an estimate of the tokens that this will make available


class PrefixCache:
    """Matches prompts, lends slots and rows, publishes what was computed.

    Args:
        rows: the table of positions to slots.
        slots: the free list of the KV pool.
        host_slots: the free list of the host's KV pool; None: what is evicted is forgotten.
        min_store_tokens: a node goes to the host in pieces of at least so many tokens: small ones cost time.
        enabled: False: nothing is matched and nothing is published.
        force_miss: nothing is matched, but everything is published and remapped as usual.

    Attributes:
        allocated_lens: `[max_requests]` int32, positions that have a slot, of the lease of each row.
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
        self.host_slots = host_slots
        self.min_store_tokens = min_store_tokens
        self.transfers = KVTransfers()  # to be made before the next pass
        self.tree = RadixTree()
        self.enabled = enabled
        self.force_miss = force_miss
        self.passes_launched = 0
        self.passes_ended = 0
        self.leases: set[Lease] = set()  # live ones, and released ones that are pending
        self.allocated_lens = np.zeros(rows.max_requests, dtype=np.int32)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.recomputed_tokens = 0
        self.evicted_tokens = 0
        self.stored_tokens = 0
        self.loaded_tokens = 0
        self._pending: deque[_Pending] = deque()
        self._frontiers: dict[Frontier, list[Lease]] = {}
        self._arriving = 0

    # -- what there is -------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Slots that can be had at once: free ones, and evictable tokens."""
        return self.slots.num_free + self.tree.evictable_tokens

    @property
    def incoming(self) -> int:
        """About how many more slots will be available once the passes in flight have ended."""
        return sum(p.tokens for p in self._pending)

    @property
    def in_flight(self) -> int:
        """Passes launched and not yet ended."""
        return self.passes_launched - self.passes_ended

    def pending_slots(self) -> list[Slots]:
        """Slots that wait for passes to end: duplicates, and the private slots of released leases."""
        return [p.slots for p in self._pending if p.slots is not None] + [
            self._private(p.lease) for p in self._pending if p.lease is not None
        ]

    def match(self, namespace: Namespace, tokens: Tokens, limit: int) -> Match:
        """The part of `tokens` `[n]` that need not be computed: at most `limit` tokens of it."""
        if self.force_miss or not self.enabled:
            return Match(None, 0, 0)
        return self.tree.match(namespace, tokens, limit)

    def leader(self, match: Match, tokens: Tokens, limit: int) -> Lease | None:
        """Who is computing the token that follows `match`, just made with the same arguments, if somebody is.

        What is beyond the limit is always computed by its own request: nobody waits for that.
        """
        length = match.length
        if self.force_miss or not self.enabled or length >= limit:
            return None
        # Whoever computes it stands at the match, or before it where others have published what comes between.
        node, end = match.node, length
        if node is not None and not match.at_boundary:
            node, end = node.parent, length - match.inside
        while node is not None:
            for leader in self._frontiers.get((node, int(tokens[end])), ()):
                if len(leader.target) > length and np.array_equal(
                    leader.target[end : length + 1], tokens[end : length + 1]
                ):
                    return leader
            end -= len(node.tokens)
            node = node.parent
        return None

    # -- a lease, from acquire to release ------------------------------------------------------------------

    def acquire(self, namespace: Namespace, tokens: Tokens, match: Match, reserve: int) -> Lease | None:
        """Lock what `match` has found of `tokens`, and take a row for a request that will compute the rest.

        The tree has not changed since that match. What only the host has of it is loaded. Returns None, having at
        most split an edge, if there is no row, or if after locking the match fewer slots are available than what
        is to be loaded, the rest of `tokens` and `reserve` need.
        """
        if match.node is None or match.node.slots is not None:
            node, matched = self.tree.node_at(namespace, match), match.length
        else:
            node, _, matched = on_device(match.node, match.inside, match.length)
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
        insertion = self.tree.insert(lease.node, tokens[start:computed], own)
        duplicates = len(insertion.canonical)
        if duplicates:
            self.rows.write(lease.row, start, insertion.canonical)
            self._defer_free(_Pending(self.passes_launched, slots=own[:duplicates], tokens=duplicates))
        self.tree.lock(insertion.node, until=lease.node)
        lease.node = insertion.node
        lease.committed = computed
        self._announce(lease, tokens)

    def release(self, lease: Lease, reusable_len: int | None = None) -> None:
        """Let go of all that a lease holds, once the passes in flight have ended. A second call does nothing.

        `reusable_len`: no later request shares more of its leading tokens. The tokens that it published beyond
        them are freed then too, without an eviction, as far as no other request holds them.
        """
        if lease.released:
            return
        lease.released = True
        lease.reusable_len = reusable_len
        self._unannounce(lease)
        self._defer_free(_Pending(self.passes_launched, lease=lease, tokens=self.reclaimable(lease)))

    def truncate(self, lease: Lease, length: int) -> None:
        """Take the slots of positions [length, allocated_len) of a live lease back, once passes in flight have ended."""
        slots = self.rows.req_to_token[lease.row, length : lease.allocated_len].copy()
        self.allocated_lens[lease.row] = length
        self._defer_free(_Pending(self.passes_launched, slots=slots, tokens=len(slots)))

    def reclaimable(self, lease: Lease) -> int:
        """Slots that releasing this lease alone would make available."""
        count = lease.allocated_len - lease.committed
        for node in self.tree.path(lease.node):
            if node.lock != 1:
                break
            count += len(node.tokens)
        return count

    # -- passes --------------------------------------------------------------------------------------------

    def pass_launched(self) -> None:
        """A pass that reads rows and slots as they are now has been launched."""
        self.passes_launched += 1

    def pass_ended(self) -> None:
        """The oldest pass in flight has ended: what waited for it alone is let go."""
        self.passes_ended += 1
        while self._pending and self._pending[0].after <= self.passes_ended:
            self._free_pending(self._pending.popleft())

    # -- kept across runs; no pass is in flight ----------------------------------------------------------------

    def snapshot(self, weights_version: int) -> tuple[TreeSnapshot, Slots]:
        """All that is published of a version of the weights, and the slots `[T]` of its tokens: -s on the host."""
        return take_snapshot(self.tree, weights_version)

    def begin_adoption(self, snapshot: TreeSnapshot, weights_version: int) -> Adoption:
        """Choose what of a snapshot, which has no fault, is new and finds a free slot: what was used last first.

        Nothing is evicted for it. Once the KV is in the slots that it names, `adopt` publishes it; or
        `cancel_adoption` frees them. Until then nothing else is to be asked of this cache.
        """
        plan = plan_adoption(self.tree, snapshot, weights_version, self.slots.num_free)
        count = int(plan.taken.sum())
        slots = self.slots.alloc(count)
        assert slots is not None  # there are as many
        begins = snapshot.starts() + plan.known
        for begin, end, start in zip(begins, begins + plan.taken, np.cumsum(plan.taken) - plan.taken, strict=True):
            plan.slots[begin:end] = slots[start : start + end - begin]
        self._arriving = count
        return plan

    def adopt(self, adoption: Adoption) -> None:
        """Publish what `begin_adoption` chose. It counts as used before all else that is in the tree."""
        adopt(self.tree, adoption)
        self._arriving = 0

    def cancel_adoption(self, adoption: Adoption) -> None:
        """Free the slots that `begin_adoption` named; the tree stays as it was."""
        self.slots.free(adoption.slots[adoption.slots > 0])
        self._arriving = 0

    # -- the whole -----------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Forget every prefix that no live request uses, in both tiers. Returns how many tokens were forgotten."""
        before = self.tree.total_tokens
        if self.host_slots is not None:
            self.host_slots.free(self.tree.evict_from_host(self.host_slots.capacity))
        self._take_back(self.tree.evict(self.tree.evictable_tokens))
        return before - self.tree.total_tokens

    def count(self, *, prompt: int = 0, cached: int = 0, recomputed: int = 0) -> None:
        """Add to the token counters: a request's prompt when it is first admitted, recomputation whenever."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.recomputed_tokens += recomputed

    @property
    def hit_rate(self) -> float:
        """That of `stats`, which costs more."""
        return _share(self.cached_tokens, self.prompt_tokens)

    def stats(self) -> CacheStats:
        leases = tuple(self.leases)  # another thread may look while this one works
        private = sum(lease.allocated_len - lease.committed for lease in leases if not lease.released)
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
            stored_tokens=self.stored_tokens,
            loaded_tokens=self.loaded_tokens,
            host_capacity=0 if self.host_slots is None else self.host_slots.capacity,
            host_free=0 if self.host_slots is None else self.host_slots.num_free,
        )

    # -- inside --------------------------------------------------------------------------------------------

    def _alloc(self, count: int) -> Slots | None:
        missing = count - self.slots.num_free
        if missing > self.tree.evictable_tokens:
            return None  # nothing is evicted in vain
        if missing > 0:
            self._evict(missing)
        return self.slots.alloc(count)

    def _evict(self, count: int) -> None:
        # Whoever reads a slot has locked its node until its last pass has ended: evicted slots are free at once.
        host = self.host_slots
        self._take_back(self.tree.evict(count) if host is None else self._move_to_host(host, count))

    def _take_back(self, evicted: Slots) -> None:
        self.slots.free(evicted)
        self.evicted_tokens += len(evicted)

    def _move_to_host(self, host: SlotAllocator, count: int) -> Slots:
        """Evict `count` tokens or some more, or all that can be, to the host. Returns their slots."""
        freed: list[Slots] = []
        left = count
        while left > 0:
            node = self.tree.next_victim(min(max(left, self.min_store_tokens), host.capacity))
            if node is None:
                break
            if node.host_slots is None:
                self._store(host, node)
            freed.append(self.tree.detach_device(node))
            left -= len(freed[-1])
        return np.concatenate(freed) if freed else np.zeros(0, dtype=np.int32)

    def _store(self, host: SlotAllocator, node: Node) -> None:
        """Copy a node, no longer than the host's pool, to the host, in the place of what was used longest ago."""
        assert node.slots is not None  # it is about to leave the device
        missing = len(node.tokens) - host.num_free
        if missing > 0:
            host.free(self.tree.evict_from_host(missing))
        host_slots = host.alloc(len(node.tokens))
        assert host_slots is not None  # nothing is locked there
        self.transfers.store(node.slots, host_slots)
        self.tree.attach_host(node, host_slots)
        self.stored_tokens += len(host_slots)

    def _load(self, top: Node, namespace: Namespace, tokens: Tokens, match: Match) -> tuple[Node, int] | None:
        """Load what only the host has of a match, below `top`, where the device's part ends, which is locked.

        Returns the node where the match ends, locked, and the number of tokens loaded; None if there are no slots.
        """
        assert match.node is not None  # something is on the host
        self.tree.touch(match.node)  # room is made of what is not wanted, as long as there is any
        matched = match.on_device
        slots = self._alloc(match.length - matched)
        if slots is None:
            return None
        # What was stored to make room may have taken the place of the match's end all the same.
        match = self.tree.match(namespace, tokens, match.length)
        node = self.tree.node_at(namespace, match)
        end = 0
        for step in reversed(list(self.tree.path(node, until=top))):
            start, end = end, end + len(step.tokens)
            assert step.host_slots is not None  # it is nowhere else
            self.transfers.load(step.host_slots, slots[start:end])
            self.tree.attach_device(step, slots[start:end])
        self.slots.free(slots[end:])
        self.tree.lock(node, until=top)
        self.loaded_tokens += end
        return node, end

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
        lease = pending.lease
        if lease is not None:
            self.slots.free(self._private(lease))
            self.slots.free(self.tree.unlock(lease.node, lease.reusable_len))
            self.rows.free(lease.row)
            self.leases.remove(lease)

    def _announce(self, lease: Lease, tokens: Tokens) -> None:
        """Let others wait for the token that this lease computes next."""
        self._unannounce(lease)
        if self.enabled and lease.committed < len(tokens):
            lease.frontier = (lease.node, int(tokens[lease.committed]))
            lease.target = tokens
            self._frontiers.setdefault(lease.frontier, []).append(lease)

    def _unannounce(self, lease: Lease) -> None:
        if lease.frontier is not None:
            others = self._frontiers[lease.frontier]
            others.remove(lease)
            if not others:
                del self._frontiers[lease.frontier]
            lease.frontier = None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
