"""The order in which known prompts run: depth-first in their radix tree, long answers first. Numpy only.

Depth-first order wants the fewest tokens computed of any order, as soon as the cache holds the longest request
(Zheng et al. 2024, "SGLang", theorem 3.1): all that share a prefix come one after the other, so that it is needed
from the first of them to the last, and never again. That holds whatever the order of a node's children is, as only
whole subtrees change places. So children are sorted, those with the longest answer below them first: what begins
last has short answers, and the end of a run does not wait for a few long ones.
"""

# Tests: tests/planning/test_prefix_order.py

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.arrays import Int32Array, Int64Array
from radixrt.planning.prefix_order import PrefixOrder
from radixrt.planning.prefix_tree import PrefixTree


@dataclass(frozen=True)
class RunOrder:
    """The order in which N prompts run.

    Attributes:
        order: `[N]` int64, which prompt runs at each place.
        shared: `[N]` int32, leading tokens that it has in common with the one before it, and no more with any that
            ran before; 0 at first.
    """

    order: Int64Array
    shared: Int32Array

    @property
    def keep(self) -> Int32Array:
        """Leading tokens of the prompt at each place that one after it needs, `[N]` int32; 0 of the last.

        In a depth-first order no later one shares more with it than the next does.
        """
        return np.append(self.shared[1:], np.zeros(min(1, len(self.shared)), dtype=np.int32))


def run_order(order: PrefixOrder, tree: PrefixTree, lengths: Int64Array, new_tokens: Int64Array) -> RunOrder:
    """Depth-first order with the longest answers first.

    A prompt that ends at a node comes before all others below it, since the other way round it would be wholly
    cached and still compute its last token. Equals stay in lexicographic order.

    Args:
        order: of the N prompts.
        tree: of that order.
        lengths: tokens of each prompt, by its number.
        new_tokens: tokens that are expected of its answer, likewise.
    """
    count, nodes = len(order.order), len(tree)
    expected, ends_there = new_tokens[order.order], lengths[order.order] == tree.depth[tree.leaf_parent]
    longest = np.zeros(nodes, dtype=np.int64)
    np.maximum.at(longest, tree.leaf_parent, expected)
    longest = _greatest_below(tree, longest)

    # The children of all nodes: first the nodes among them, then the prompts.
    parent = np.concatenate([tree.parent[1:], tree.leaf_parent])
    size = np.concatenate([tree.num_sequences[1:], np.ones(count, dtype=np.int64)])
    comes_later = np.concatenate([np.ones(nodes - 1, dtype=bool), ~ends_there])
    begin = np.concatenate([tree.begin[1:], np.arange(count)])
    ranks = np.lexsort((begin, -np.concatenate([longest[1:], expected]), comes_later, parent))

    # Behind how many prompts of the same parent each child begins.
    parent = parent[ranks]
    upto = np.cumsum(size[ranks]) - size[ranks]
    is_first = np.concatenate([[True], parent[1:] != parent[:-1]])[: len(parent)]
    behind = np.empty_like(upto)
    behind[ranks] = upto - np.repeat(upto[is_first], np.diff(np.append(np.flatnonzero(is_first), len(parent))))

    place = _places(tree, behind[: nodes - 1])
    places = np.concatenate([place[1:], place[tree.leaf_parent] + behind[nodes - 1 :]])
    out = np.empty(count, dtype=np.int64)
    out[places[nodes - 1 :]] = order.order
    shared = np.zeros(count, dtype=np.int32)
    later = behind > 0
    shared[places[later]] = tree.depth[np.concatenate([tree.parent[1:], tree.leaf_parent])[later]]
    return RunOrder(out, shared)


def _greatest_below(tree: PrefixTree, own: Int64Array) -> Int64Array:
    """The greatest number of each node and of all below it, `[K]`."""
    greatest, parent = own.tolist(), tree.parent.tolist()
    for node in range(len(greatest) - 1, 0, -1):
        above = parent[node]
        if greatest[node] > greatest[above]:
            greatest[above] = greatest[node]
    return np.array(greatest, dtype=np.int64)


def _places(tree: PrefixTree, behind: Int64Array) -> Int64Array:
    """Where each node begins in the run, `[K]`, from where the nodes 1.. `[K - 1]` begin below their parents."""
    place = [0]
    for above, offset in zip(tree.parent[1:].tolist(), behind.tolist(), strict=True):
        place.append(place[above] + offset)
    return np.array(place, dtype=np.int64)
