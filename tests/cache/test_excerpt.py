"""The radix tree as numbers to look at: bounded, of chosen namespaces, and without tokens."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

import pytest

from radixrt.cache.excerpt import MAX_NODES, MAX_SEEN, Excerpts, TreeExcerpt
from radixrt.cache.radix_tree import DEVICE, HOST, Namespace, Node, RadixTree
from tests.support.cache_machine import HERE, cache, ids

OTHER = Namespace(tenant="other")


def everything(space: Namespace) -> bool:
    return True


def add(tree: RadixTree, *tokens: int, space: Namespace = HERE) -> Node:
    return tree.insert(tree.root(space), ids(*tokens), ids(*tokens))[0]


def rows(excerpt: TreeExcerpt) -> set[tuple[int, int, int]]:
    """Tokens, hits and locks of each node."""
    return set(zip(excerpt.tokens, excerpt.hits, excerpt.locks, strict=True))


def test_a_small_tree_is_told_whole() -> None:
    tree = RadixTree()
    add(tree, 1, 2, 3, 4)
    leaf = add(tree, 1, 2, 5)
    add(tree, 9, space=OTHER)
    tree.touch(leaf, hits=2)
    tree.lock(leaf)
    excerpt = Excerpts(everything).take(tree)
    assert rows(excerpt) == {(2, 2, 1), (1, 2, 1), (2, 0, 0), (1, 0, 0)}
    assert sorted(excerpt.parents) == [-1, -1, 0, 0]
    assert excerpt.tokens[0] == 2  # what is in use comes first
    assert all(parent < place for place, parent in enumerate(excerpt.parents))
    assert all(age is not None and 0 <= age < 60 for age in excerpt.ages)
    assert excerpt.left_out == {}
    assert sum(excerpt.tokens) == tree.total_tokens
    assert rows(Excerpts(lambda space: space == OTHER).take(tree)) == {(1, 0, 0)}


def test_tiers_and_what_was_loaded() -> None:
    tree = RadixTree()
    above = add(tree, 1, 2)
    _, _ = tree.insert(above, ids(3), ids(3), last_access=-1)
    leaf = tree.match(HERE, ids(1, 2, 3)).node
    tree.attach(leaf, HOST, ids(7))
    excerpt = Excerpts(everything).take(tree)
    assert excerpt.tiers == ["device", "both"]
    assert excerpt.ages[1] is None
    tree.detach(leaf, DEVICE)
    assert Excerpts(everything).take(tree).tiers == ["device", "host"]


def test_nodes_keep_their_ids() -> None:
    tree, excerpts = RadixTree(), Excerpts(everything)
    leaf = add(tree, 1, 2, 3)
    (first,) = excerpts.take(tree).ids
    add(tree, 1, 4)  # cuts it: the lower part is the same node
    excerpt = excerpts.take(tree)
    assert excerpt.ids[excerpt.tokens.index(2)] == first
    assert len(set(excerpt.ids)) == 3
    assert leaf.tokens.tolist() == [2, 3]


@pytest.mark.parametrize(
    "path",
    [
        lambda i: (1, 10 + i),
        lambda i: (i, 1),
        lambda i: (i % 50, 100 + i),
    ],
)
def test_a_large_tree_is_cut(path: Callable[[int], tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """However wide it is; and no child of a node that is shown is lost from the counts."""
    tree = RadixTree()
    for number in range(5_000):
        add(tree, *path(number))
    pushed: list[object] = []
    push = heapq.heappush
    monkeypatch.setattr(heapq, "heappush", lambda heap, item: (push(heap, item), pushed.append(item)))
    excerpt = Excerpts(everything).take(tree)
    assert len(excerpt) == MAX_NODES or len(excerpt) == len(pushed)
    assert len(pushed) <= MAX_SEEN
    shown = Counter(excerpt.parents)
    assert shown[-1] + excerpt.left_out.get(-1, 0) == len(tree.root(HERE).children)
    children = {len(node.children) for node in tree.root(HERE).children.values()}
    for place in range(len(excerpt)):
        assert shown[place] + excerpt.left_out.get(place, 0) in children | {0}


def test_what_is_used_most_is_shown() -> None:
    tree = RadixTree()
    hot = add(tree, 0, 1)
    for first in range(1, 200):
        add(tree, first, 1)
    tree.touch(hot, hits=3)
    excerpt = Excerpts(everything).take(tree, max_nodes=5, max_seen=40)
    assert (len(excerpt), excerpt.hits[0]) == (5, 3)
    assert excerpt.left_out == {-1: 195}
    assert excerpt.left_out_tokens == {-1: 2 * 15}  # of those that were seen


def test_hits_of_found_and_of_borrowed_prefixes() -> None:
    """A node's hits are the requests that did not compute it."""
    here = cache()
    first = here.acquire(HERE, ids(1, 2, 3, 4), here.match(HERE, ids(1, 2, 3, 4), 3), 0)
    assert first is not None
    assert here.extend(first, 4) is not None
    here.lend(first)
    tokens = ids(1, 2, 3, 5)
    match = here.match(HERE, tokens, 3)
    loan = here.loan(match, tokens, 3)
    assert loan is not None
    second = here.acquire(HERE, tokens, match, 0, loan)
    assert second is not None
    assert here.extend(second, 1) is not None
    here.pass_launched()
    here.commit(first, ids(1, 2, 3, 4), 4)
    here.commit(second, tokens, 4)
    here.pass_ended()
    assert rows(Excerpts(everything).take(here.tree)) == {(3, 1, 2), (1, 0, 1)}
    third = here.acquire(HERE, ids(1, 2, 3, 4, 6), here.match(HERE, ids(1, 2, 3, 4, 6), 4), 0)
    assert third is not None
    assert rows(Excerpts(everything).take(here.tree)) == {(3, 2, 3), (1, 1, 2), (1, 0, 1)}
