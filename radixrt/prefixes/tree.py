"""The radix tree of many token sequences, in arrays. Numpy only."""

# Tests: tests/prefixes/test_order.py

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.arrays import Int64Array
from radixrt.prefixes.order import PrefixOrder


@dataclass(frozen=True)
class PrefixTree:
    """The nodes of the radix tree of N sequences that two or more of them share, parents before children.

    The leaf of a sequence, its tokens shared with no other, is no node here. Places are those of the lexicographic
    order, in which the sequences below a node are neighbours. Node 0 is the root: of all sequences, without
    tokens.

    Attributes:
        begin, end: `[K]` int64, the places [begin, end) of the sequences below each node.
        depth: `[K]` int64, tokens from the root to the node's end.
        parent: `[K]` int64; -1 of the root.
        leaf_parent: `[N]` int64, the deepest node above the sequence at each place.
    """

    begin: Int64Array
    end: Int64Array
    depth: Int64Array
    parent: Int64Array
    leaf_parent: Int64Array

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def num_sequences(self) -> Int64Array:
        """Sequences below each node, `[K]`."""
        return self.end - self.begin

    @property
    def num_tokens(self) -> Int64Array:
        """Tokens of each node's own edge, `[K]`."""
        return self.depth - np.where(self.parent < 0, 0, self.depth[self.parent])

    @property
    def fan_out(self) -> Int64Array:
        """Children of each node, `[K]`: nodes, and sequences that share no more with any other."""
        above = np.concatenate([self.parent[1:], self.leaf_parent])
        return np.bincount(above, minlength=len(self))

    @property
    def saved_tokens(self) -> Int64Array:
        """Tokens saved because each node's sequences share its edge, `[K]`."""
        return self.num_tokens * (self.num_sequences - 1)

    def greatest_below(self, numbers: Int64Array) -> Int64Array:
        """The greatest of the sequences' `numbers` `[N]`, at least 0, below each node, `[K]`; by their places."""
        own = np.zeros(len(self), dtype=np.int64)
        np.maximum.at(own, self.leaf_parent, numbers)
        greatest, parent = own.tolist(), self.parent.tolist()
        for node in range(len(greatest) - 1, 0, -1):
            above = parent[node]
            if greatest[node] > greatest[above]:
                greatest[above] = greatest[node]
        return np.array(greatest, dtype=np.int64)

    def least_below(self, numbers: Int64Array) -> Int64Array:
        """The least of the sequences' `numbers` `[N]`, none negative, below each node, `[K]`; by their places."""
        greatest = int(numbers.max(initial=0))
        return greatest - self.greatest_below(greatest - numbers)

    def with_leaves(self, places: Int64Array, depths: Int64Array) -> PrefixTree:
        """The same tree with a node for the whole of the sequence at each of some `places`, of so many tokens."""
        parents = np.concatenate([self.parent, self.leaf_parent[places]])
        begin, end = np.concatenate([self.begin, places]), np.concatenate([self.end, places + 1])
        leaves = self.leaf_parent.copy()
        leaves[places] = len(self) + np.arange(len(places))
        return _in_preorder(begin, end, np.concatenate([self.depth, depths]), parents, leaves)


def prefix_tree(order: PrefixOrder) -> PrefixTree:
    """The radix tree of sequences in lexicographic order, in linear time: a stack of the nodes that are open."""
    count = len(order.order)
    shared = [*order.shared.tolist(), 0][1:]  # with the sequence at the next place
    begin, end, depth, parent = [0], [count], [0], [-1]
    deepest = []  # node that each sequence shares with the next one
    open_nodes = [0]
    for place, length in enumerate(shared):
        first, child = place, -1
        while depth[open_nodes[-1]] > length:
            child = open_nodes.pop()
            end[child] = place + 1
            first = begin[child]
            parent[child] = open_nodes[-1]
        if depth[open_nodes[-1]] < length:
            node = len(begin)
            begin.append(first)
            end.append(0)
            depth.append(length)
            parent.append(open_nodes[-1])
            if child >= 0:
                parent[child] = node
            open_nodes.append(node)
        deepest.append(open_nodes[-1])
    begins, ends, depths, parents, nodes = (
        np.array(numbers, dtype=np.int64) for numbers in (begin, end, depth, parent, deepest)
    )
    # The deeper of the nodes shared with its two neighbours; after the last sequence that is the root.
    before = np.concatenate([[0], nodes[:-1]])[:count]
    above = np.where(depths[before] >= depths[nodes], before, nodes)
    return _in_preorder(begins, ends, depths, parents, above)


def _in_preorder(
    begin: Int64Array, end: Int64Array, depth: Int64Array, parent: Int64Array, leaf_parent: Int64Array
) -> PrefixTree:
    """The tree of these columns, whose nodes are in any order but for the root, which is the first."""
    preorder = np.lexsort((depth, begin))
    number = np.empty_like(preorder)
    number[preorder] = np.arange(len(preorder))
    parent = parent[preorder]
    parent[1:] = number[parent[1:]]
    return PrefixTree(begin[preorder], end[preorder], depth[preorder], parent, number[leaf_parent])
