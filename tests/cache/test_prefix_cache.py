"""Who owns each slot: leases on real pools, all invariants recomputed from scratch after every step.

Requests with a scheduler and a device are in tests/properties/test_state_machine.py, the host tier in
test_host_tier.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.lease import Lease, Loan
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import Node, RadixTree, Tokens
from tests.support.cache_machine import CONTEXT_LEN, HERE, NUM_ROWS, NUM_SLOTS, CacheMachine, cache, ids, slots_of


def acquire(of: PrefixCache, tokens: Tokens) -> Lease:
    lease = of.acquire(HERE, tokens, of.match(HERE, tokens, len(tokens) - 1), 0)
    assert lease is not None
    return lease


def run(of: PrefixCache, tokens: Tokens) -> None:
    """Compute and publish tokens, in a pass of their own."""
    lease = acquire(of, tokens)
    assert of.extend(lease, len(tokens) - lease.matched) is not None
    of.pass_launched()
    of.commit(lease, tokens, len(tokens))
    of.release(lease)
    of.pass_ended()


def cells(of: PrefixCache) -> list[tuple[int, int, int]]:
    changes = of.rows.take_changes()
    return list(zip(changes.rows.tolist(), changes.positions.tolist(), changes.slots.tolist(), strict=True))


def test_incoming_counts_what_nobody_else_holds() -> None:
    here = cache()
    run(here, ids(1, 2, 3))
    first, other = (acquire(here, ids(1, 2, 3, last)) for last in (4, 5))
    assert here.extend(first, 1) is not None
    here.pass_launched()
    here.release(first)
    assert here.incoming == 1  # the prefix stays with the other
    before = here.available
    here.pass_ended()
    assert (here.available - before, here.incoming) == (1, 0)
    here.pass_launched()
    here.release(other)
    assert here.incoming == 3


# -- truncate ----------------------------------------------------------------------------------------------


def test_truncated_slots_are_free_at_once_where_nothing_is_in_flight() -> None:
    here = cache()
    lease = acquire(here, ids(1, 2, 3))
    here.extend(lease, 8)
    own = slots_of(here, lease)
    here.truncate(lease, 5)
    assert lease.allocated_len == 5
    assert slots_of(here, lease) == own[:5]
    assert set(own[5:]) <= set(here.slots.free_slots().tolist())
    assert here.stats().private == 5


def test_truncated_slots_are_pending_while_a_pass_may_write_them() -> None:
    here = cache()
    lease = acquire(here, ids(1, 2, 3))
    here.extend(lease, 6)
    own = slots_of(here, lease)
    here.pass_launched()
    here.pass_launched()
    here.truncate(lease, 4)
    here.pass_ended()
    assert [pending.slots.tolist() for pending in here.pending] == [own[4:]]
    assert here.incoming == 2
    assert not set(own) & set(here.slots.free_slots().tolist())
    here.pass_ended()
    assert not here.pending
    assert set(own[4:]) <= set(here.slots.free_slots().tolist())


def test_a_truncated_lease_goes_on() -> None:
    here, tokens = cache(), ids(1, 2, 3, 4, 5, 6)
    lease = acquire(here, tokens)
    here.extend(lease, 6)
    here.pass_launched()
    here.truncate(lease, 3)
    more = here.extend(lease, 2)
    assert more is not None
    assert slots_of(here, lease)[3:] == more.tolist()
    here.pass_ended()
    here.commit(lease, tokens[:5], 5)
    here.release(lease)
    assert here.match(HERE, tokens, 6).length == 5
    assert here.flush() == 5
    assert here.slots.num_free == here.slots.capacity


@pytest.mark.parametrize("length", [2, 3, 6])
def test_what_the_device_is_told_ends_where_the_row_ends(length: int) -> None:
    """Changes that nobody has taken are not told beyond it, and each cell is told once."""
    here = cache()
    lease, other = acquire(here, ids(1, 2, 3)), acquire(here, ids(4, 5, 6))
    here.extend(lease, 3)
    here.extend_each(np.array([lease.row, other.row], dtype=np.int32))
    here.extend(lease, 2)
    here.truncate(lease, length)
    kept = slots_of(here, lease)
    fresh = here.extend(lease, 2)
    assert fresh is not None
    expected = [(lease.row, i, slot) for i, slot in enumerate([*kept, *fresh.tolist()])]
    told = cells(here)
    assert sorted(told) == sorted([*expected, (other.row, 0, slots_of(here, other)[0])])


def test_nothing_to_truncate() -> None:
    here = cache()
    lease = acquire(here, ids(1, 2, 3))
    here.extend(lease, 3)
    here.pass_launched()
    here.truncate(lease, 3)
    assert lease.allocated_len == 3
    assert not here.pending


@pytest.mark.parametrize("length", [-1, 1, 6])
def test_what_cannot_be_truncated(length: int) -> None:
    here, tokens = cache(), ids(1, 2, 3)
    lease = acquire(here, tokens)
    here.extend(lease, 5)
    here.commit(lease, tokens[:2], 2)
    free = here.slots.num_free
    with pytest.raises(ValueError, match=f"to {length} tokens: 2 are committed, 5 allocated"):
        here.truncate(lease, length)
    assert (lease.allocated_len, here.slots.num_free) == (5, free)
    here.truncate(lease, 2)
    here.pass_launched()
    here.release(lease)
    with pytest.raises(ValueError, match="a released lease cannot be truncated"):
        here.truncate(lease, 2)


# -- leases ------------------------------------------------------------------------------------------------


def test_a_duplicate_is_remapped_before_it_is_pending() -> None:
    here, tokens = cache(), ids(1, 2, 3, 4)
    first, second = acquire(here, tokens), acquire(here, tokens)
    here.extend(first, 4)
    here.extend(second, 4)
    own = slots_of(here, second)
    here.pass_launched()
    here.commit(first, tokens, 4)
    here.commit(second, tokens, 4)
    assert slots_of(here, second) == slots_of(here, first)
    assert [pending.slots.tolist() for pending in here.pending] == [own]
    here.pass_ended()
    assert set(own) <= set(here.slots.free_slots().tolist())


def test_a_lease_is_refused_where_its_tokens_and_the_reserve_do_not_fit() -> None:
    here, tokens = cache(num_slots=9), ids(1, 2, 3, 4, 5)
    run(here, tokens)
    other = ids(1, 2, 3, 9, 9, 9)
    match = here.match(HERE, other, 5)
    assert match.length == 3
    assert here.acquire(HERE, other, match, 3) is None  # 5 are available once 3 are locked
    assert (here.available, here.rows.num_free) == (8, NUM_ROWS)
    lease = here.acquire(HERE, other, here.match(HERE, other, 5), 2)
    assert lease is not None
    assert (lease.matched, here.available) == (3, 5)


def test_released_tokens_that_nobody_reuses_are_free_at_once() -> None:
    here, tokens = cache(), ids(1, 2, 3, 4)
    lease = acquire(here, tokens)
    here.extend(lease, 4)
    here.commit(lease, tokens, 4)
    here.release(lease, reusable_len=1)
    here.release(lease)
    assert here.match(HERE, tokens, 4).length == 1
    assert here.slots.num_free == here.slots.capacity - 1


def test_a_disabled_cache_finds_and_keeps_nothing() -> None:
    here = PrefixCache(ReqToTokenPool(NUM_ROWS, CONTEXT_LEN), SlotAllocator(NUM_SLOTS), enabled=False)
    run(here, ids(1, 2, 3))
    assert here.match(HERE, ids(1, 2, 3), 3).length == 0
    assert here.slots.num_free == here.slots.capacity


# -- leaders -----------------------------------------------------------------------------------------------


def leader_of(of: PrefixCache, tokens: Tokens) -> Lease | None:
    return of.leader(of.match(HERE, tokens, len(tokens)), tokens, len(tokens))


def test_a_leader_is_found_at_the_match_and_before_it() -> None:
    here, asked = cache(), ids(1, 2, 3, 9)
    own = acquire(here, ids(1, 2, 3, 4))
    assert leader_of(here, asked) is own
    run(here, ids(1, 2, 8))  # another has published what comes between
    match = here.match(HERE, asked, 4)
    assert (match.length, match.at_boundary) == (2, False)
    assert leader_of(here, asked) is own
    run(here, ids(1, 2))  # an edge is split
    match = here.match(HERE, asked, 4)
    assert (match.length, match.at_boundary) == (2, True)
    assert leader_of(here, asked) is own
    assert leader_of(here, ids(1, 2, 8, 4)) is None  # the leader goes another way


def test_a_leader_whose_tokens_end_before_is_none() -> None:
    here = cache()
    acquire(here, ids(1, 2))
    run(here, ids(1, 2))
    assert leader_of(here, ids(1, 2, 3)) is None


def test_a_released_lease_leads_no_more() -> None:
    here, asked = cache(), ids(1, 5)
    first, second = (acquire(here, ids(1, last)) for last in (2, 3))
    assert sum(map(len, here.frontiers.values())) == 2
    assert leader_of(here, asked) is first
    here.release(first)
    assert (first.frontier, sum(map(len, here.frontiers.values()))) == (None, 1)
    assert leader_of(here, asked) is second
    here.release(second)
    assert leader_of(here, asked) is None
    assert not here.frontiers


# -- loans -------------------------------------------------------------------------------------------------


def loan_of(of: PrefixCache, tokens: Tokens) -> Loan | None:
    return of.loan(of.match(HERE, tokens, len(tokens) - 1), tokens, len(tokens) - 1)


def begin(of: PrefixCache, tokens: Tokens) -> Lease:
    """A lease for the coming pass, which computes all that it cannot borrow."""
    match = of.match(HERE, tokens, len(tokens) - 1)
    lease = of.acquire(HERE, tokens, match, 0, of.loan(match, tokens, len(tokens) - 1))
    assert lease is not None
    assert of.extend(lease, len(tokens) - lease.matched) is not None
    of.lend(lease)
    return lease


def test_a_loan_is_the_most_that_anybody_computes() -> None:
    here = cache()
    one, two, three = (begin(here, ids(*tokens)) for tokens in ([1, 2], [1, 2, 3, 3, 5], [1, 2, 3, 4]))
    assert [lease.matched for lease in (one, two, three)] == [0, 2, 3]
    assert (two.lender, three.lender) == (one, two)
    assert slots_of(here, three)[:3] == slots_of(here, two)[:3]
    assert slots_of(here, two)[:2] == slots_of(here, one)
    assert here.stats().private == 2 + 3 + 1
    assert loan_of(here, ids(1, 2, 3, 4, 9)) == Loan(three, 4)
    assert loan_of(here, ids(1, 2, 3, 4)) == Loan(two, 3)  # the last token is computed; two has the third
    assert loan_of(here, ids(1, 2, 9)) == Loan(one, 2)
    assert loan_of(here, ids(2, 2)) is None


def test_nothing_is_lent_that_an_earlier_pass_computes() -> None:
    here = cache()
    begin(here, ids(1, 2, 3))
    here.pass_launched()
    assert loan_of(here, ids(1, 2, 3, 4)) is None


def test_each_publishes_its_own_part_whoever_comes_first() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        here = cache()
        tokens = [ids(1, 2), ids(1, 2, 3, 4), ids(1, 2, 3, 4, 5)]
        leases = [begin(here, own) for own in tokens]
        here.pass_launched()
        here.pass_ended()
        for i in order:
            here.commit(leases[i], tokens[i], len(tokens[i]))
        assert here.stats().locked == 5
        assert [lease.lender for lease in leases] == [None] * 3
        for lease in leases:
            here.release(lease)
        assert here.flush() == 5
        assert here.slots.num_free == here.slots.capacity


def test_a_lender_that_ends_leaves_what_others_read() -> None:
    here = cache()
    first, second, third = (begin(here, ids(*tokens)) for tokens in ([1, 2, 3], [1, 2, 4], [1, 2, 3, 5]))
    lent = slots_of(here, first)
    here.pass_launched()
    here.release(first)
    assert (second.lender, third.lender) == (third, None)  # who borrowed most owns it
    here.pass_ended()
    assert not set(lent) & set(here.slots.free_slots().tolist())
    here.release(third)  # nothing is in flight any more
    assert set(lent) & set(here.slots.free_slots().tolist()) == {lent[2]}
    here.commit(second, ids(1, 2, 4), 3)
    assert here.match(HERE, ids(1, 2, 4), 3).length == 3
    here.release(second)
    assert here.flush() == 3
    assert here.slots.num_free == here.slots.capacity


def test_publishing_a_chain_takes_as_much_for_each_of_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower begins where its lender's part ends: the nodes before it are not walked again."""
    cut, visited, count = RadixTree.cut, [0], 12
    here = PrefixCache(ReqToTokenPool(count, count + 1), SlotAllocator(100))
    tokens = [ids(*range(1, length + 1)) for length in range(1, count + 1)]
    leases = [begin(here, own) for own in tokens]
    here.pass_launched()
    here.pass_ended()

    def counted(self: RadixTree, node: Node, at: int) -> Node:
        visited[0] += 1
        return cut(self, node, at)

    monkeypatch.setattr(RadixTree, "cut", counted)
    for lease, own in zip(leases, tokens, strict=True):
        here.commit(lease, own, len(own))
    assert visited[0] == 0  # each is a new leaf
    assert here.match(HERE, tokens[-1], count).length == count
    for lease in leases:
        here.release(lease)
    assert here.flush() == count


def test_the_readers_of_a_duplicate_turn_to_what_the_tree_has() -> None:
    here, tokens = cache(), ids(1, 2, 3)
    first, second = begin(here, tokens), begin(here, ids(1, 2, 3, 4))
    duplicates = slots_of(here, first)
    here.pass_launched()
    run(here, tokens)
    here.commit(first, tokens, 3)
    here.commit(second, ids(1, 2, 3, 4), 4)
    assert slots_of(here, first) == slots_of(here, second)[:3]
    here.pass_ended()
    assert set(duplicates) <= set(here.slots.free_slots().tolist())


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
