"""What a waiting request would find in the cache, pass after pass. Numpy only."""

from __future__ import annotations

from bisect import insort

from radixrt.cache.lease import Frontier, Lease, Loan
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import NO_MATCH, Match, Namespace, Tokens, common_prefix
from radixrt.cache.states import FEWEST


class PendingMatch:
    """The match of some waiting tokens, looked up again only where it may have changed.

    The tree changes with every pass, but seldom where a given match ends: as long as the node there keeps its edge
    and gets no child for the token that comes next, the match is what it was.

    `tokens` `[n]` do not change; at most `limit` of them may come from the cache. While they have a leader,
    `leader_match_len` of them will be there once it has computed all of its own.
    """

    def __init__(self, cache: PrefixCache, namespace: Namespace, tokens: Tokens, limit: int) -> None:
        self._cache, self._namespace, self._tokens, self._limit = cache, namespace, tokens, limit
        self._leader: Lease | None = None
        self._frontier: Frontier | None = None  # of the leader, when it was found
        self.leader_match_len = 0
        self._leader_version = 0  # of the states, when it was found
        self._usable: int | None = None  # of the match, at a version of the states; None: it is to be looked up
        self._states_version = 0
        self._version = cache.tree.version
        self._begin(cache.match(namespace, tokens, limit))

    def length(self) -> int:
        """Tokens that are in the cache now."""
        version = self._cache.tree.version
        if version != self._version and not self._is_current():
            self._look_up()
        self._version = version
        return self._match.length

    def usable_length(self) -> int:
        """Those of them that a lease would begin with: where layers keep states, up to the last one."""
        length, states = self.length(), self._cache.states
        if states is None:
            return length
        if self._usable is None or self._states_version != states.version:
            usable = self._cache.usable(self.match())  # its edge may have been split since
            self._usable, self._states_version = usable.length, states.version
        return self._usable

    def match(self) -> Match:
        """The match as it is now, until the tree next changes."""
        if not self._is_current():
            self._look_up()
        return self._match

    def has_leader(self) -> bool:
        """Whether a live request is computing the token that follows the match; or where there are states, will
        leave one that saves some tokens.
        """
        matched, states = self.length(), self._cache.states  # forgets the leader where the match has changed
        if self._leader is not None and self._leader.frontier is self._frontier:
            is_ahead = states is None or self.leader_match_len > matched
            # One that computes a part of the match again is needed until somebody's state is there.
            if is_ahead or (states is not None and self._leader_version == states.version):
                return True
        # The leader may have come further; or an edge was split, and the match is as long as before.
        self._leader = leader = self._cache.leader(self.match(), self._tokens, self._limit)
        if leader is None:
            return False
        self._frontier = leader.frontier
        length = min(len(leader.tokens), self._limit)
        # All of the match are its tokens, too; or a part of it, if it computes states again.
        agrees = matched if states is None else 0
        self.leader_match_len = agrees + common_prefix(leader.tokens[agrees:length], self._tokens[agrees:length])
        if states is not None:
            self._leader_version = states.version
            if self.leader_match_len < min(FEWEST, states.least_gain):
                self._leader = None
        return self._leader is not None

    def keep_where_it_parts(self) -> None:
        """Let the leader leave a state where these tokens part from its own, if it has not come there yet."""
        leader, stop = self._leader, self.leader_match_len
        if leader is not None and stop > leader.allocated_len and stop not in leader.stops:
            insort(leader.stops, stop)

    def loan(self) -> Loan | None:
        """What can be borrowed for the coming pass: only where the leader begins with it, too.

        Otherwise earlier passes compute what is missing, which may fail without this one, or later ones do.
        """
        if self._leader is None or self._leader.begun < self._cache.passes_launched:
            return None
        return self._cache.loan(self.match(), self._tokens, self._limit)

    def _look_up(self) -> None:
        before = self._match
        if before.length and before.inside == self._edge and len(before.node.tokens):
            # Its node still ends there, even if its edge was split: only what follows is new.
            before = before._replace(inside=len(before.node.tokens))
            self._begin(self._cache.tree.follow(before, self._tokens[before.length : self._limit]))
        else:
            self._begin(self._cache.match(self._namespace, self._tokens, self._limit))

    def _begin(self, match: Match) -> None:
        self._match = match
        self._edge = len(match.node.tokens)
        # With a child for this token the match would go on; None: no child matters.
        goes_on = match.at_boundary and match.length < self._limit
        self._next = int(self._tokens[match.length]) if goes_on else None
        self._leader = None
        self._usable = None

    def _is_current(self) -> bool:
        """Whether the match is sure to be what it was."""
        node = self._match.node
        if node.parent is None:
            is_there = self._cache.tree.roots.get(self._namespace, NO_MATCH.node) is node
        else:
            is_there = len(node.tokens) == self._edge  # an edge only ever gets shorter; without any it is gone
        return is_there and self._next not in node.children
