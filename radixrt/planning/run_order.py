"""The order in which known prompts run: depth-first in their radix tree, long answers first. Numpy only.

Depth-first order computes the fewest tokens of any order, if the cache holds the longest request (Zheng et al.
2024, "SGLang", theorem 3.1): prompts with a common prefix follow one another, so that the prefix is needed from
the first of them to the last, and never again. Where some compute a part of the prefix in any case, for its
logits, those that compute the most of it come first, and the others find that part in the cache. Apart from that
the order of a node's children does not matter. They are sorted by the longest answer below them, longest first:
the last prompts have short answers, and the end of a run does not wait for a few long ones.
"""

# Tests: tests/prefixes/test_order.py

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.arrays import Int32Array, Int64Array
from radixrt.planning.demands import Demands
from radixrt.prefixes.order import PrefixOrder
from radixrt.prefixes.tree import PrefixTree


@dataclass(frozen=True)
class RunOrder:
    """The order in which N prompts run.

    Attributes:
        order: `[N]` int64, the number of the prompt at each place.
        shared: `[N]` int32, leading tokens that it shares with the one before it, and it shares no more with any
            earlier one; 0 for the first.
    """

    order: Int64Array
    shared: Int32Array

    @property
    def keep(self) -> Int32Array:
        """Leading tokens of the prompt at each place that later ones need, `[N]` int32; 0 for the last.

        In a depth-first order no later prompt shares more with it than the next one does.
        """
        return np.append(self.shared[1:], np.zeros(min(1, len(self.shared)), dtype=np.int32))


def run_order(order: PrefixOrder, tree: PrefixTree, asked: Demands) -> RunOrder:
    """Depth-first order; first the prompts that compute the most of a shared prefix, then those with long answers.

    A prompt that ends at a node, too, computes its last token, so that it comes before others that take all of the
    node from the cache. Equal ones stay in lexicographic order.

    Args:
        order: of the N prompts.
        tree: of that order.
        asked: what they ask for, by their places in the order.
    """
    count, nodes = len(order.order), len(tree)

    # The children of all nodes: first the nodes among them, then the prompts.
    parent = np.concatenate([tree.parent[1:], tree.leaf_parent])
    size = np.concatenate([tree.num_sequences[1:], np.ones(count, dtype=np.int64)])
    begin = np.concatenate([tree.begin[1:], np.arange(count)])
    longest = np.concatenate([tree.greatest_below(asked.new_tokens)[1:], asked.new_tokens])
    limit = np.concatenate([tree.least_below(asked.match_limits)[1:], asked.match_limits])
    ranks = np.lexsort((begin, -longest, np.minimum(limit, tree.depth[parent]), parent))

    # The number of prompts below the same parent that run before each child.
    parent = parent[ranks]
    upto = np.cumsum(size[ranks]) - size[ranks]
    is_first = np.concatenate([[True], parent[1:] != parent[:-1]])[: len(parent)]
    prompts_before = np.empty_like(upto)
    prompts_before[ranks] = upto - np.repeat(
        upto[is_first], np.diff(np.append(np.flatnonzero(is_first), len(parent)))
    )

    place = _places(tree, prompts_before[: nodes - 1])
    places = np.concatenate([place[1:], place[tree.leaf_parent] + prompts_before[nodes - 1 :]])
    out = np.empty(count, dtype=np.int64)
    out[places[nodes - 1 :]] = order.order
    shared = np.zeros(count, dtype=np.int32)
    later = prompts_before > 0
    shared[places[later]] = tree.depth[np.concatenate([tree.parent[1:], tree.leaf_parent])[later]]
    return RunOrder(out, shared)


def _places(tree: PrefixTree, prompts_before: Int64Array) -> Int64Array:
    """The first place of each node in the run, `[K]`, from those relative to the parents `[K - 1]`."""
    place = [0]
    for above, offset in zip(tree.parent[1:].tolist(), prompts_before.tolist(), strict=True):
        place.append(place[above] + offset)
    return np.array(place, dtype=np.int64)
