"""A PrefixCache on real pools, driven by hypothesis: all invariants are recomputed after every step."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.lease import Lease
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import DEVICE, Namespace, Node, Tokens

HERE = Namespace()
NUM_SLOTS, NUM_ROWS, CONTEXT_LEN = 30, 4, 14


def ids(*values: int) -> Tokens:
    return np.array(values, dtype=np.int32)


def cache(num_slots: int = NUM_SLOTS) -> PrefixCache:
    return PrefixCache(ReqToTokenPool(NUM_ROWS, CONTEXT_LEN), SlotAllocator(num_slots))


def slots_of(of: PrefixCache, lease: Lease) -> list[int]:
    slots: list[int] = of.rows.req_to_token[lease.row, : lease.allocated_len].tolist()
    return slots


def held_by(node: Node) -> list[int]:
    slots = node.slots[DEVICE]
    assert slots is not None
    held: list[int] = slots.tolist()
    return held


class CacheMachine(RuleBasedStateMachine):
    """Leases grow, shrink, publish and end while passes are in flight; a device is told of all row changes."""

    @initialize()
    def begin(self) -> None:
        self.cache = cache()
        self.tokens: dict[Lease, list[int]] = {}
        self.device_rows = np.zeros((NUM_ROWS, CONTEXT_LEN), dtype=np.int32)
        self.launched: dict[Lease, int] = {}  # positions that passes have computed, or are computing
        self.in_flight: deque[set[int]] = deque()  # slots that each pass reads or writes

    def live(self, data: st.DataObject) -> Lease:
        return data.draw(st.sampled_from([lease for lease in self.tokens if not lease.released]))

    def is_any_live(self) -> bool:
        return any(not lease.released for lease in self.tokens)

    def is_new(self, lease: Lease) -> bool:
        """Whether a lease begins with the coming pass, and has no slots of its own yet."""
        is_extended = lease.allocated_len > lease.matched
        return not (lease.released or is_extended) and lease.begun == self.cache.passes_launched

    def is_any_new(self) -> bool:
        return any(self.is_new(lease) for lease in self.tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=CONTEXT_LEN), reserve=st.integers(0, 4))
    def acquire(self, tokens: list[int], reserve: int) -> None:
        match = self.cache.match(HERE, ids(*tokens), len(tokens) - 1)
        loan = self.cache.loan(match, ids(*tokens), len(tokens) - 1)
        available = self.cache.available
        lease = self.cache.acquire(HERE, ids(*tokens), match, reserve, loan)
        if lease is not None:
            assert lease.matched == (match.length if loan is None else loan.end)
            assert lease.committed == match.length
            self.tokens[lease] = tokens
            self.launched[lease] = lease.committed
        elif self.cache.rows.num_free:
            assert available < len(tokens) + reserve

    @precondition(is_any_new)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        """Give a lease that begins with the coming pass all its slots, and let others borrow them."""
        lease = data.draw(st.sampled_from([lease for lease in self.tokens if self.is_new(lease)]))
        if self.cache.extend(lease, len(self.tokens[lease]) - lease.allocated_len) is not None:
            self.cache.lend(lease)

    @precondition(is_any_live)
    @rule(data=st.data(), count=st.integers(1, 6))
    def extend(self, data: st.DataObject, count: int) -> None:
        lease = self.live(data)
        count = min(count, len(self.tokens[lease]) - lease.allocated_len)
        if count and self.cache.extend(lease, count) is None:
            assert self.cache.available < count

    @precondition(is_any_live)
    @rule()
    def extend_each(self) -> None:
        able = [
            lease
            for lease, tokens in self.tokens.items()
            if not lease.released and lease.allocated_len < len(tokens)
        ]
        if self.cache.extend_each(np.array([lease.row for lease in able], dtype=np.int32)) is None:
            assert self.cache.available < len(able)

    @precondition(is_any_live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        lease = self.live(data)
        if lease.begun == self.cache.passes_launched:
            return  # what it may have lent is yet to be computed
        needed = max([lease.own_start, *(borrower.lent_end for borrower in lease.borrowers)])
        length = data.draw(st.integers(needed, lease.allocated_len))
        before, in_flight = slots_of(self.cache, lease), self.cache.in_flight
        free = self.cache.slots.num_free
        self.cache.truncate(lease, length)
        self.launched[lease] = min(self.launched[lease], length)
        assert slots_of(self.cache, lease) == before[:length]
        assert self.cache.slots.num_free == free + (0 if in_flight else len(before) - length)

    @precondition(is_any_live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self.live(data)
        computed = data.draw(st.integers(lease.committed, self.launched[lease]))
        self.cache.commit(lease, ids(*self.tokens[lease]), computed)
        assert lease.committed == computed

    @precondition(is_any_live)
    @rule(data=st.data(), reusable_len=st.none() | st.integers(0, CONTEXT_LEN))
    def release(self, data: st.DataObject, reusable_len: int | None) -> None:
        self.cache.release(self.live(data), reusable_len)

    @rule()
    def launch(self) -> None:
        changes = self.cache.rows.take_changes()
        told = Counter(zip(changes.rows.tolist(), changes.positions.tolist(), strict=True))
        assert not told or max(told.values()) == 1
        self.device_rows[changes.rows, changes.positions] = changes.slots
        used: set[int] = set()
        for lease in self.tokens:
            if not lease.released:
                own = slots_of(self.cache, lease)
                assert self.device_rows[lease.row, : len(own)].tolist() == own
                used.update(own)
                self.launched[lease] = len(own)
        self.in_flight.append(used)
        self.cache.pass_launched()

    @precondition(lambda self: self.in_flight)
    @rule()
    def end_pass(self) -> None:
        self.in_flight.popleft()
        self.cache.pass_ended()
        self.tokens = {lease: tokens for lease, tokens in self.tokens.items() if lease in self.cache.leases}

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        evictable = self.cache.tree.evictable_tokens
        self.cache.evict(count)
        assert self.cache.tree.evictable_tokens == max(0, evictable - count)

    def nodes(self) -> list[Node]:
        out = list(self.cache.tree.roots.values())
        for node in out:
            out.extend(node.children.values())
        return out

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        crossing = Counter(id(node) for lease in self.cache.leases for node in self.cache.tree.path(lease.node))
        groups: dict[str, list[int]] = {"free": self.cache.slots.free_slots().tolist()}
        groups["evictable"] = [s for n in self.nodes() if not crossing[id(n)] for s in held_by(n)]
        groups["locked"] = [s for n in self.nodes() if crossing[id(n)] for s in held_by(n)]
        groups["private"] = [
            s
            for lease in self.cache.leases
            if not lease.released
            for s in slots_of(self.cache, lease)[lease.own_start :]
        ]
        groups["pending"] = [s for pending in self.cache.pending for s in pending.slots.tolist()]
        everything = [slot for group in groups.values() for slot in group]
        assert sorted(everything) == list(range(1, NUM_SLOTS))
        stats = self.cache.stats()
        assert {name: getattr(stats, name) for name in groups} == {
            name: len(group) for name, group in groups.items()
        }
        assert all(node.lock == crossing[id(node)] for node in self.nodes())
        free = set(groups["free"])
        assert not any(used & free for used in self.in_flight)

    @invariant()
    def a_row_begins_with_its_path(self) -> None:
        for lease in self.cache.leases:
            assert 0 <= lease.committed <= lease.allocated_len
            own = slots_of(self.cache, lease)[: lease.committed]
            assert self.cache.tree.slots_of(lease.node).tolist() == own

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for lease in list(self.cache.leases):
            self.cache.release(lease)
        while self.cache.in_flight:
            self.cache.pass_ended()
        assert not self.cache.leases
        assert not self.cache.frontiers
        assert self.cache.rows.num_free == NUM_ROWS
        self.cache.flush()
        assert self.cache.slots.num_free == self.cache.slots.capacity
