"""What a waiting request expects to find is what a fresh look-up finds, whatever has happened in between."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import Match, RadixTree, Tokens
from tests.cache.test_prefix_cache import run
from tests.support.cache_machine import CONTEXT_LEN, HERE, CacheMachine, cache, ids


class WaitingMachine(CacheMachine):
    """Some tokens wait while others are computed."""

    @initialize()
    def begin_to_wait(self) -> None:
        self.waiting: list[tuple[PendingMatch, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=CONTEXT_LEN))
    def wait(self, tokens: list[int]) -> None:
        self.waiting = [
            *self.waiting[-3:],
            (PendingMatch(self.cache, HERE, ids(*tokens), len(tokens) - 1), tokens),
        ]

    @invariant()
    def what_waits_is_up_to_date(self) -> None:
        for pending, tokens in self.waiting:
            limit = len(tokens) - 1
            fresh = self.cache.match(HERE, ids(*tokens), limit)
            assert pending.length() == fresh.length
            leader = self.cache.leader(fresh, ids(*tokens), limit)
            assert pending.has_leader() == (leader is not None)
            assert pending.match() == fresh
            if leader is not None:
                assert fresh.length < pending.leader_match_len <= limit


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


def waiting(here: PrefixCache, *tokens: int) -> PendingMatch:
    return PendingMatch(here, HERE, ids(*tokens), len(tokens) - 1)


def test_a_match_goes_on_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes before are not walked again; if they have left the tree, it begins at the root."""
    here, followed, follow = cache(), [0], RadixTree.follow
    pending = waiting(here, *range(1, 10))

    def counted(self: RadixTree, start: Match, tokens: Tokens) -> Match:
        followed[0] += len(tokens)
        return follow(self, start, tokens)

    for end in range(1, 7):
        run(here, ids(*range(1, end + 1)))
        monkeypatch.setattr(RadixTree, "follow", counted)
        followed[0] = 0
        assert pending.length() == end
        assert followed[0] == 8 - (end - 1 if end > 1 else 0)
        monkeypatch.undo()
    here.flush()
    assert pending.length() == 0


def test_nothing_is_known() -> None:
    pending = waiting(cache(), 1, 2, 3)
    assert pending.length() == 0
    assert not pending.has_leader()


def test_a_leader_is_waited_for_until_it_is_done() -> None:
    here, tokens = cache(), ids(1, 2, 3, 4, 5)
    pending = waiting(here, 1, 2, 3, 9, 9)
    lease = here.acquire(HERE, tokens, here.match(HERE, tokens, 4), 0)
    assert lease is not None
    assert pending.has_leader()
    assert pending.leader_match_len == 3
    here.extend(lease, 5)
    here.commit(lease, tokens, 2)
    assert pending.has_leader()
    assert pending.length() == 2
    here.commit(lease, tokens, 4)
    assert not pending.has_leader()
    assert pending.length() == 3


def test_a_leader_that_ends_early_is_forgotten() -> None:
    here, tokens = cache(), ids(1, 2, 3, 4, 5)
    pending = waiting(here, 1, 2, 3, 4)
    lease = here.acquire(HERE, tokens, here.match(HERE, tokens, 4), 0)
    assert lease is not None
    assert pending.has_leader()
    here.release(lease)
    assert not pending.has_leader()


def test_a_cache_that_misses_on_purpose_has_no_leaders() -> None:
    here, tokens = cache(), ids(1, 2, 3)
    here.force_miss = True
    assert here.acquire(HERE, tokens, here.match(HERE, tokens, 2), 0) is not None
    assert not waiting(here, 1, 2, 3).has_leader()
