"""The one place where a KV slot changes owner.

Every slot is in exactly one of these states; docs/architecture/ownership.md draws the ways between them.

    reserved   slot 0
    free       in the allocator's free list
    private    in a live lease's row, at a position in [committed, allocated_len), if it is not lent by another
    evictable  in a tree node that no lease locks
    locked     in a tree node that a lease locks; rows at positions in [0, committed) point at these
    pending    given up, but a pass in flight may still read or write it
    arriving   getting the KV of a kept cache; nothing points at it yet

A lease may be made for the pass that computes a part of its prefix for another lease, its lender: until that pass
is booked, its row names the lender's private slots for these positions. See `Loan`.

With a host tier, a match may go on in nodes that only the host has; these are loaded when a lease is acquired, and
so is the state that it begins with, where there are states. The books here say at once what will be true once
`transfers` have been made. No pass in flight minds: an evicted slot was computed by passes that have ended and is
read by none, and none reads or writes a free slot.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from memory_pool.kv_transfers import KVTransfers
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.arrays import Int32Array
from radixrt.cache.cache_stats import CacheStats
from radixrt.cache.host_states import HostStates
from radixrt.cache.host_tier import HostTier
from radixrt.cache.lease import Frontier, Lease, Loan, Pending
from radixrt.cache.radix_tree import EMPTY, Match, Namespace, Node, RadixTree, Slots, Tokens, common_prefix
from radixrt.cache.snapshot import Adoption, TreeSnapshot, adopt, plan_adoption
from radixrt.cache.states import States
from radixrt.hit_rate import CountsHits


class PrefixCache(CountsHits):
    """Matches prompts, lends slots and rows, publishes what was computed."""

    def __init__(
        self,
        rows: ReqToTokenPool,
        slots: SlotAllocator,  # of the KV pool
        *,
        host_slots: SlotAllocator | None = None,  # of the host's KV pool; None: evicted tokens are forgotten
        min_store_tokens: int = 256,  # see `HostTier`
        states: States | None = None,  # of a model that has some: prefixes are of use up to where one was kept
        host_states: SlotAllocator | None = None,  # of the host's pool of them
        tokens_each_state: int = 1,  # see `HostStates`
        enabled: bool = True,  # False: nothing is matched and nothing is published
        force_miss: bool = False,  # nothing is matched, but everything is published and remapped as usual
    ) -> None:
        self.rows, self.slots = rows, slots
        self.enabled, self.force_miss, self.states = enabled, force_miss, states
        self.transfers = KVTransfers()  # between the tiers, to be made before the next pass
        self.tree = RadixTree()
        self.host: HostTier | None = None
        if host_slots is not None:
            self.host = HostTier(self.tree, host_slots, self.transfers, min_store_tokens)
        if states is not None and host_states is not None:
            states.host = HostStates(host_states, self.transfers, tokens_each_state)
        self.leases: set[Lease] = set()  # live ones, and released ones that are pending
        self.frontiers: dict[Frontier, list[Lease]] = {}  # of live leases that compute something for others
        # By frontier, those of live leases that were made for the coming pass and compute something for others in
        # it, each with its tokens from there on to the end of what it computes, in bytes that sort as they do.
        self._lenders: dict[Frontier, list[tuple[bytes, Lease]]] = {}
        self.pending: deque[Pending] = deque()  # what passes in flight may still use, in order
        # `[max_requests]`, positions that have a slot, of the lease of each row
        self.allocated_lens = np.zeros(rows.max_requests, dtype=np.int32)
        self.passes_launched = self.passes_ended = 0
        self.prompt_tokens = self.cached_tokens = self.recomputed_tokens = self.evicted_tokens = 0
        self.stateless_tokens = 0
        self._arriving = 0

    @property
    def available(self) -> int:
        """Slots that can be had at once: free ones, and evictable tokens."""
        return self.slots.num_free + self.tree.evictable_tokens

    @property
    def incoming(self) -> int:
        """About how many more slots will be available once the passes in flight have ended."""
        return sum(pending.tokens for pending in self.pending)

    @property
    def in_flight(self) -> int:
        """Passes launched and not yet ended."""
        return self.passes_launched - self.passes_ended

    @property
    def passes(self) -> tuple[int, int]:
        """How many were launched, and how many have ended."""
        return self.passes_launched, self.passes_ended

    @property
    def keeps_states(self) -> bool:
        """Whether states are kept for others."""
        return self.states is not None and self.enabled and not self.force_miss

    @property
    def may_match(self) -> bool:
        """Whether there is a prefix that can be matched."""
        return bool(self.tree.roots) and self.enabled and not self.force_miss

    def match(self, namespace: Namespace, tokens: Tokens, limit: int) -> Match:
        """The part of `tokens` `[n]` that need not be computed: at most `limit` tokens of it."""
        return self.tree.match(namespace, tokens, limit if self.may_match else 0)

    def usable(self, match: Match) -> Match:
        """The part of a match that a lease begins with: where there are states, up to the last one."""
        return match if self.states is None else match.at_state

    def leader(self, match: Match, tokens: Tokens, limit: int) -> Lease | None:
        """The lease that is computing the token after `match`, just made with the same arguments. Where there are
        states, that may be one that computes part of the match again, to leave a state there.

        One that began with an earlier pass comes before those that begin with the coming one.
        """
        leader = None
        if not self.force_miss and match.length < limit:  # tokens beyond are always computed by their own request
            leader = self._extending(match, tokens)
        if leader is None and self.keeps_states:
            leader = self._recomputing(match, tokens, limit)
        return leader

    def _extending(self, match: Match, tokens: Tokens) -> Lease | None:
        """A lease that will compute the token after `match`, which is not the last of `tokens`."""
        # Its frontier is at the match, or before it where others have published the tokens between.
        node: Node | None = match.node
        length = end = match.length
        if not match.at_boundary:
            node, end = match.node.parent, length - match.inside
        newcomer: Lease | None = None
        while node is not None:
            for lease in self.frontiers.get((node, tokens.item(end)), ()):
                # The frontier's own token is the same already.
                if end == length or np.array_equal(lease.tokens[end : length + 1], tokens[end : length + 1]):
                    if lease.begun < self.passes_launched:
                        return lease
                    newcomer = newcomer or lease
                    break  # all others after it are newcomers, too
            end -= len(node.tokens)
            node = node.parent
        return newcomer

    def _recomputing(self, match: Match, tokens: Tokens, limit: int) -> Lease | None:
        """A lease that computes again what `match` has of its tokens, or a part, and will leave a state there."""
        assert self.states is not None
        least = match.at_state.length + self.states.least_gain
        node: Node | None = match.node
        end = match.length
        if not match.at_boundary:
            node, end = match.node.parent, end - match.inside
        while node is not None and match.length >= least:
            for lease in self.frontiers.get((node, tokens.item(end)), ()):
                # The same for as long as it is worth it, and not there yet, or there with a state.
                length = min(len(lease.tokens), limit)
                common = common_prefix(lease.tokens[:length], tokens[:length])
                is_ahead = common > lease.allocated_len or (common > lease.committed and common in lease.stops)
                if common >= least and is_ahead:
                    return lease
            end -= len(node.tokens)
            node = node.parent
        return None

    def lend(self, lease: Lease) -> None:
        """Let others borrow what a lease that was made for the coming pass has got slots for: see `Loan`. Where
        there are states, nobody can: what a pass leaves is there only after it.
        """
        if lease.frontier is not None and self.states is None:
            known = sort_key(lease.tokens[lease.committed : lease.allocated_len])
            insort(self._lenders.setdefault(lease.frontier, []), (known, lease), key=itemgetter(0))

    def loan(self, match: Match, tokens: Tokens, limit: int) -> Loan | None:
        """The most that can be borrowed for the coming pass after `match`, just made with the same arguments.

        Only of leases that begin at the match: the borrower's row has the same slots as theirs before it, too.
        """
        node, start = match.node, match.length
        best = self._longest(node, tokens, start, limit) if match.at_boundary and start < limit else None
        while best is not None and node.parent is not None and len(self._lenders) > 1:
            node, start = node.parent, start - len(node.tokens)
            other = self._longest(node, tokens, start, limit)
            if other is not None and other.end > best.end:
                return None  # one that is scored computes what is there before, and more: it is waited for
        while best is not None and best.end <= best.lender.lent_end and best.lender.lender is not None:
            best = Loan(best.lender.lender, best.end)  # who computes the last of them
        return best

    def acquire(
        self, namespace: Namespace, tokens: Tokens, match: Match, reserve: int, loan: Loan | None = None
    ) -> Lease | None:
        """Lock `match`, the tokens found of `tokens`, and take a row for a request that will compute the rest.

        The tree has not changed since that match. Matched tokens that only the host has are loaded. What follows
        the match is borrowed where there is a `loan`. Returns None, having at most split an edge, if there is no
        row, or if after locking the match fewer slots are available than `reserve` and all tokens need that are
        not on the device and not borrowed. Where there are states, what counts is the match up to the last one;
        its own pass will leave another where the whole match ends. None, too, having loaded tokens at most, if
        there is none for its own.
        """
        stops: list[int] = []
        stateless = 0
        if self.states is not None:
            whole, match = match.length, self.usable(match)
            stateless = whole - match.length
            if stateless >= self.states.least_gain:
                stops.append(whole)
        on_device = match.on_device
        node, matched, loaded = self.tree.node_at(namespace, on_device), on_device.length, 0
        self.tree.lock(node)  # shrinks what is available, so the budget is checked after it
        slots: Slots | None = None
        borrowed = 0 if loan is None else loan.end - match.length
        if self.rows.num_free and len(tokens) - matched - borrowed + reserve <= self.available:
            slots = EMPTY
            if matched < match.length:
                self.tree.touch(match.node)  # so other tokens leave first to make room
                if self.states is not None:
                    self.states.expect(match.node)
                slots = self._alloc(match.length - matched)
        if slots is None:
            self.tree.unlock(node)
            return None
        row = self.rows.alloc()
        assert row is not None  # one is free
        if len(slots):
            node, matched, loaded = self._load(node, namespace, tokens[: match.length], slots)
        if self.states is not None:
            loads_state = self.states.loads(node)
            if not self.states.begin(row, node, self.passes):
                self.rows.free(row)
                self.tree.unlock(node)
                return None
            loaded += loads_state
            self.stateless_tokens += stateless
        self.tree.touch(node, hits=1)
        if matched:
            self.rows.write(row, 0, self.tree.slots_of(node))
        self.allocated_lens[row] = matched
        begun = self.passes_launched
        lease = Lease(row, node, matched, matched, loaded, tokens, self.allocated_lens, begun, stops=stops)
        if loan is not None:
            lease.lender, lease.lent_end = loan
            lease.lender.borrowers.append(lease)
            lease.matched = self.allocated_lens[row] = loan.end
            self.rows.write(row, matched, self._slots_of(lease.lender, matched, loan.end))
        self.leases.add(lease)
        self._announce(lease)
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

    def next_states(self, lease: Lease, keep_at: int | None) -> tuple[int, int]:
        """The states that a lease's row of the coming pass begins with and leaves. Where it ends at one of the
        lease's stops, `keep_at`, it leaves a fresh one, if there is one or one can make room.
        """
        assert self.states is not None
        return self.states.step(lease.row, keep_at, self.passes)

    def truncate(self, lease: Lease, length: int) -> None:
        """Take the slots of positions [length, allocated_len) of a live lease back: the row ends at `length` then.

        They are free once the passes in flight have ended. Raises ValueError where the lease is released, or
        `length` is not in committed .. allocated_len, or tokens that are lent begin there.
        """
        end = lease.allocated_len
        if lease.released or not max(lease.own_start, *(b.lent_end for b in lease.borrowers), 0) <= length <= end:
            kind = "released" if lease.released else "live"
            lens = f"{lease.committed} are committed, {end} allocated"
            raise ValueError(f"a {kind} lease cannot be truncated to {length} tokens: {lens}")
        if length < end:
            slots = self._slots_of(lease, length, end)
            self.rows.truncate(lease.row, length)
            self.allocated_lens[lease.row] = length
            self._defer_free(Pending(self.passes_launched, slots, len(slots)))

    def commit(self, lease: Lease, tokens: Tokens, computed: int) -> None:
        """Publish positions [committed, computed) of a live lease: their KV is computed, finite, and of `tokens`.

        `tokens` `[n >= computed]` ends where the request's extend ends: others may wait for its uncomputed part.
        Where the tree has a token already, the row is turned to the tree's slot first, and the duplicate then
        becomes pending. What is lent is published for the lender.
        """
        start, lender = lease.committed, lease.lender
        if not self.enabled or computed <= start:
            return
        if lender is not None and lender.committed < (lent := min(computed, lease.lent_end)):
            self.commit(lender, lender.tokens, lent)  # this lease has read it, and is finite
        own = self._slots_of(lease, start, computed)
        above, begin = self._published(lease, computed)
        node, canonical = self.tree.insert(above, tokens[begin:computed], own[begin - start :])
        if begin > start:
            assert lender is not None  # it has published what is before
            canonical = np.concatenate([self._slots_of(lender, start, begin), canonical])
        if duplicates := len(canonical):
            if not np.array_equal(own[:duplicates], canonical):
                self.rows.write(lease.row, start, canonical)
            if len(given_up := own[max(0, lease.lent_end - start) : duplicates]):
                self._defer_free(Pending(self.passes_launched, given_up, len(given_up)))
        self.tree.lock(node, until=lease.node)
        if lender is not None:
            self._count_borrowed(lease, node, computed)
        lease.node, lease.committed, lease.tokens = node, computed, tokens
        if self.states is not None:
            self.states.publish(lease.row, computed, node, self.passes)
        if lender is not None and computed >= lease.lent_end:
            lender.borrowers.remove(lease)
            lease.lender = None
        self._announce(lease)

    def release(
        self,
        lease: Lease,
        reusable_len: int | None = None,
        *,
        computed: Tokens | None = None,
        comes_back: bool = False,
    ) -> None:
        """Free all that a lease holds, once the passes in flight have ended. A second call does nothing.

        `reusable_len`: no later request shares more of its leading tokens. Tokens that it published beyond them
        are freed too, without waiting for eviction, as far as no other request holds them.

        Where there are states, that which its last pass leaves is kept, if all tokens before it are known, the
        first of `computed` `[n]`: they are published once that pass has ended. `comes_back`: its request will go
        on from there.
        """
        if lease.released:
            return
        lease.released, lease.reusable_len, lease.comes_back = True, reusable_len, comes_back
        if lease.frontier is not None:
            self._announce(lease)
        end = lease.allocated_len
        first = self._bequeath(lease) if lease.borrowers or lease.lender is not None else lease.own_start
        is_known = computed is not None and len(computed) >= end
        if self.keeps_states and is_known and (reusable_len is None or reusable_len >= end):
            lease.tail = computed
        slots = self._slots_of(lease, first, end) if first < end else EMPTY
        tokens = len(slots) + self.tree.held_alone(lease.node)
        self._defer_free(Pending(self.passes_launched, slots, tokens, lease))

    def pass_launched(self) -> None:
        """Count a pass that has been launched and reads rows and slots as they are now."""
        self.passes_launched += 1
        self._lenders.clear()
        if self.states is not None:
            self.states.pass_launched()

    def pass_ended(self, spoilt: Int32Array | None = None) -> None:
        """Count the oldest pass in flight as ended, and free what waited for it alone. What it computed of the
        rows `spoilt` `[n]` is of no use.
        """
        self.passes_ended += 1
        if self.states is not None and spoilt is not None and len(spoilt):
            for pending in self.pending:
                if pending.lease is not None and pending.lease.row in spoilt:
                    pending.lease.tail = None
        ended: list[Pending] = []
        while self.pending and self.pending[0].after <= self.passes_ended:
            ended.append(self.pending.popleft())
        self._free_pending(ended)
        if self.states is not None:
            self.states.pass_ended(self.passes_ended)

    def begin_adoption(self, snapshot: TreeSnapshot, weights_version: int) -> Adoption:
        """Choose the part of a faultless snapshot that is new and finds free slots and states, most recently used
        first.

        Nothing is evicted for it. Once KV and states are in those that it names, `adopt` publishes it; or
        `cancel_adoption` frees them. Until then nothing else is to be asked of this cache.
        """
        room_for_states = 0 if self.states is None else self.states.allocator.num_free
        plan = plan_adoption(self.tree, snapshot, weights_version, self.slots.num_free, room_for_states)
        slots, states = np.zeros(snapshot.num_tokens, np.int32), np.zeros(len(snapshot), np.int32)
        arriving = self.slots.alloc(int(plan.tokens.sum()))
        assert arriving is not None  # there are as many
        slots[plan.tokens], self._arriving = arriving, len(arriving)
        if self.states is not None:
            of_arriving = self.states.allocator.alloc(int(plan.states.sum()))
            assert of_arriving is not None
            states[plan.states] = of_arriving
        return Adoption(snapshot, weights_version, plan.kept, slots, states, plan.left_out_states)

    def adopt(self, adoption: Adoption) -> None:
        """Publish an adoption. It counts as used before all else that is in the tree."""
        ends = adopt(self.tree, adoption)
        if self.states is not None:
            for place in np.flatnonzero(adoption.states).tolist():
                self.states.keep(int(adoption.states[place]), ends[place])
        self._arriving = 0

    def cancel_adoption(self, adoption: Adoption) -> None:
        """Free the slots and states of an adoption; the tree stays as it was."""
        self.slots.free(adoption.slots[adoption.slots > 0])
        if self.states is not None:
            self.states.allocator.free(adoption.states[adoption.states > 0])
        self._arriving = 0

    def evict(self, num_tokens: int) -> None:
        """Take `num_tokens` evictable tokens or some more, or all there are, off the device."""
        # Who reads a slot locks its node until its last pass has ended, so evicted slots are free at once.
        self._free_evicted((self.tree if self.host is None else self.host).evict(num_tokens))

    def flush(self) -> int:
        """Forget every prefix that no live request uses, in both tiers. Returns how many tokens were forgotten."""
        before = self.tree.total_tokens
        if self.host is not None:
            self.host.drop(self.host.slots.capacity)
        self._free_evicted(self.tree.evict(self.tree.evictable_tokens))
        return before - self.tree.total_tokens

    def stats(self) -> CacheStats:
        host, host_states = self.host, None if self.states is None else self.states.host
        evictable, locked, free = self.tree.evictable_tokens, self.tree.locked_tokens, self.slots.num_free
        pending = sum(len(pending.slots) for pending in tuple(self.pending))
        # What is left, to ask no lease; and another thread may look while this one moves slots.
        private = max(0, self.slots.capacity - free - evictable - locked - pending - self._arriving)
        return CacheStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            evicted_tokens=self.evicted_tokens,
            capacity=self.slots.capacity,
            free=free,
            evictable=evictable,
            locked=locked,
            private=private,
            pending=pending,
            arriving=self._arriving,
            stored_tokens=0 if host is None else host.stored_tokens,
            loaded_tokens=0 if host is None else host.loaded_tokens,
            host_capacity=0 if host is None else host.slots.capacity,
            host_free=0 if host is None else host.slots.num_free,
            stateless_tokens=self.stateless_tokens,
            **({} if self.states is None else self.states.figures()),
            state_stored=0 if host_states is None else host_states.stored,
            state_loaded=0 if host_states is None else host_states.loaded,
            state_on_host=0 if host_states is None else len(host_states.kept),
            state_nodes=0 if self.states is None else self.states.num_kept,
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
        self._drop_states()

    def _drop_states(self) -> None:
        """Give up the states of nodes that have left a tier."""
        if self.states is not None and self.tree.left:
            self.states.drop(self.tree.left, self.passes)
            self.tree.left.clear()

    def _load(self, top: Node, namespace: Namespace, matched: Tokens, slots: Slots) -> tuple[Node, int, int]:
        """Load what only the host has of matched tokens, below `top`, which is locked, into `slots`. Returns their
        end, locked in its place, its length, and the number of tokens loaded.
        """
        assert self.host is not None  # it has something
        # Stores that made room may have dropped the end of the match from the host all the same, or its state: the
        # last one may be above `top` then.
        match = self.tree.match(namespace, matched)
        if self.states is not None:
            match = match.at_state
        end = self.tree.node_at(namespace, match)
        loaded = self.host.load(end, slots)
        self.slots.free(slots[loaded:])
        self.tree.lock(end)
        self.tree.unlock(top)
        return end, match.length, loaded

    def _slots_of(self, lease: Lease, start: int, end: int) -> Slots:
        return self.rows.req_to_token[lease.row, start:end].copy()

    def _defer_free(self, pending: Pending) -> None:
        if self.in_flight:
            self.pending.append(pending)
        else:
            self._free_pending([pending])

    def _free_pending(self, ended: Iterable[Pending]) -> None:
        freed: list[Slots] = []
        for pending in ended:
            lease = pending.lease
            keeps = lease is not None and self.states is not None and self._publish_tail(lease)
            if len(pending.slots) and not keeps:
                freed.append(pending.slots)
            if lease is not None:
                if len(unlocked := self.tree.unlock(lease.node, lease.reusable_len)):
                    freed.append(unlocked)
                self.rows.free(lease.row)
                self.leases.remove(lease)
        if freed:
            self.slots.free(np.concatenate(freed[::-1]))  # the first are the last to be had again
        self._drop_states()

    def _publish_tail(self, lease: Lease) -> bool:
        """Publish all that a released lease's passes computed, and let go of its state. Whether there was any."""
        assert self.states is not None
        tail = lease.tail
        if tail is not None:
            self.commit(lease, tail, lease.allocated_len)
        node = None if tail is None else lease.node
        ended = self.passes_ended  # none in flight has anything to do with its row
        self.states.release(lease.row, node, (ended, ended), comes_back=lease.comes_back)
        return tail is not None

    def _longest(self, node: Node, tokens: Tokens, start: int, limit: int) -> Loan | None:
        """The newcomer at `node`, where `tokens[start]` follows, that computes most of `tokens[:limit]`."""
        lenders = self._lenders.get((node, int(tokens[start])))
        if lenders is None:
            return None
        # Who has most in common comes just before or just after.
        at = bisect_left(lenders, sort_key(tokens[start:limit]), key=itemgetter(0))
        best: Loan | None = None
        for _, lender in lenders[max(0, at - 1) : at + 1]:
            end = min(lender.allocated_len, limit)
            end = start + common_prefix(lender.tokens[start:end], tokens[start:end])
            if not lender.released and (best is None or end > best.end):
                best = Loan(lender, end)
        return best

    def _published(self, lease: Lease, computed: int) -> tuple[Node, int]:
        """A node on the path of positions [committed, computed) of a lease that need not be walked to, and where
        it ends: the end of what its lender has published for it, or the lease's own node.
        """
        lender = lease.lender
        if lender is not None and lease.committed < lease.lent_end <= min(computed, lender.committed):
            node, end = lender.node, lender.committed
            while end > lease.lent_end:
                assert node.parent is not None  # it is below the lease's node
                node, end = node.parent, end - len(node.tokens)
            if end > lease.committed:  # else it ends inside an edge
                return node, end
        return lease.node, lease.committed

    def _count_borrowed(self, lease: Lease, end: Node, computed: int) -> None:
        """Count what a lease has borrowed of the path that it publishes as hits: the tree has it only now."""
        for node in self.tree.path(end, until=lease.node):
            computed -= len(node.tokens)
            node.hits += computed < lease.lent_end

    def _bequeath(self, lease: Lease) -> int:
        """End the loans of a released lease: who borrowed most of it owns that, and lends it to the others.

        Returns the first position whose slot is still its own.
        """
        for borrower in tuple(lease.borrowers):  # what is published is held by their own locks from now on
            self.commit(borrower, borrower.tokens, min(borrower.lent_end, lease.committed))
        first, lender, borrowers = lease.own_start, lease.lender, lease.borrowers
        lease.lender, lease.borrowers = None, []
        if lender is not None:
            lender.borrowers.remove(lease)
        if borrowers:
            heir = max(borrowers, key=lambda borrower: borrower.lent_end)
            first = max(first, heir.lent_end)
            heir.lender, heir.lent_end = lender, lease.lent_end
            if lender is not None:
                lender.borrowers.append(heir)
            for other in borrowers:
                if other is not heir:
                    other.lender = heir
                    heir.borrowers.append(other)
        return first

    def _announce(self, lease: Lease) -> None:
        """Let others wait for the token that a lease computes next, and for none before."""
        frontiers, before = self.frontiers, lease.frontier
        if before is not None:
            others = frontiers[before]
            others.remove(lease)
            if not others:
                del frontiers[before]
        lease.frontier = None
        if lease.committed < len(lease.tokens) and self.enabled and not lease.released:
            lease.frontier = frontier = lease.node, lease.tokens.item(lease.committed)
            frontiers.setdefault(frontier, []).append(lease)


def sort_key(tokens: Tokens) -> bytes:
    """Bytes that sort as tokens do, which are not negative."""
    return tokens.astype(">i4").tobytes()
