"""Which lease computes the token that another one waits for."""

from __future__ import annotations

from radixrt.cache.frontiers import Frontier, Frontiers
from radixrt.cache.radix_tree import Namespace, RadixTree
from tests.support.cache_machine import ids

HERE = Namespace()


def test_a_leader_is_found_at_the_match_and_before_it() -> None:
    tree, frontiers = RadixTree(), Frontiers()
    root = tree.root(HERE)
    own = Frontier(root, 0, ids(1, 2, 3, 4))
    frontiers.announce(own)
    asked = ids(1, 2, 3, 9)
    assert frontiers.leader(tree.match(HERE, asked), asked) is own
    tree.insert(root, ids(1, 2, 8), ids(1, 2, 3))  # another has published what comes between
    match = tree.match(HERE, asked)
    assert (match.length, match.at_boundary) == (2, False)
    assert frontiers.leader(match, asked) is own
    tree.insert(root, ids(1, 2), ids(1, 2))  # an edge is split
    match = tree.match(HERE, asked)
    assert (match.length, match.at_boundary) == (2, True)
    assert frontiers.leader(match, asked) is own
    far = ids(1, 2, 8, 4)  # the leader goes another way
    assert frontiers.leader(tree.match(HERE, far), far) is None


def test_a_leader_whose_tokens_end_before_is_none() -> None:
    tree, frontiers = RadixTree(), Frontiers()
    root = tree.root(HERE)
    frontiers.announce(Frontier(root, 0, ids(1, 2)))
    tree.insert(root, ids(1, 2), ids(1, 2))
    asked = ids(1, 2, 3)
    assert frontiers.leader(tree.match(HERE, asked), asked) is None


def test_a_closed_frontier_is_found_no_more() -> None:
    tree, frontiers = RadixTree(), Frontiers()
    first, second = (Frontier(tree.root(HERE), 0, ids(1, last)) for last in (2, 3))
    for frontier in (first, second):
        frontiers.announce(frontier)
    assert len(frontiers) == 2
    frontiers.unannounce(first)
    assert (first.is_open, second.is_open, len(frontiers)) == (False, True, 1)
    asked = ids(1, 5)
    assert frontiers.leader(tree.match(HERE, asked), asked) is second
    frontiers.unannounce(second)
    assert not len(frontiers)
