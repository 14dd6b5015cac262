"""Many texts as a tree of what they share, of which each stretch is encoded once."""

# Tests: tests/text/test_text_tree.py

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.prefixes.order import PrefixOrder
from radixrt.prefixes.tree import prefix_tree
from radixrt.text.common_length import common_length
from radixrt.text.cuts import Cuts

BLOCK = 1 << 22  # characters that are encoded at a time

Encode = Callable[[list[str]], list[list[int]]]


class TextTree:
    """N texts in lexicographic order, in stretches: what several of them begin with, and what each has of its own.

    Attributes:
        order: the number of the text at each place.
    """

    def __init__(self, texts: Sequence[str], cuts: Cuts) -> None:
        self._texts, self._drops_blank = texts, cuts.drops_blank
        self.order = sorted(range(len(texts)), key=texts.__getitem__)
        shared = [0] * len(texts)
        found, cut = -1, 0
        for place, (one, other) in enumerate(pairwise(self.order), 1):
            common = common_length(texts[one], texts[other])
            if common == len(texts[one]) == len(texts[other]):
                shared[place] = common  # nothing follows
                continue
            if common != found:  # that of neighbours which share as much is the same
                found, cut = common, cuts.last(texts[other], 0, common)
            shared[place] = cut
        tree = prefix_tree(PrefixOrder(np.array(self.order, np.int64), np.array(shared, np.int32)))
        self._first, self._end = tree.begin.tolist(), tree.end.tolist()
        self._depth, self._parent = tree.depth.tolist(), tree.parent.tolist()
        self._leaf_parent = tree.leaf_parent.tolist()

    def encoded(self, encode: Encode, lead: Sequence[int]) -> Iterator[list[Int32Array]]:
        """The ids of the texts in their order, with `lead` before each, a block at a time.

        Raises what `encode` does, which makes ids of a list of stretches.
        """
        whole: dict[int, Int32Array] = {0: np.array(lead, np.int32)}  # ids up to the end of nodes that are open
        node = 1
        for begin, end in pairwise(self._blocks()):
            nodes = []
            while node < len(self._first) and self._first[node] < end:
                nodes.append(node)
                node += 1
            places = range(begin, end)
            stretches = [self._stretch(self._first[i], self._parent[i], self._depth[i]) for i in nodes]
            stretches += [self._stretch(place, self._leaf_parent[place], None) for place in places]
            ids = iter([np.array(own, np.int32) for own in encode(stretches)])
            for i in nodes:
                whole[i] = np.concatenate([whole[self._parent[i]], next(ids)])
            yield [np.concatenate([whole[self._leaf_parent[place]], next(ids)]) for place in places]
            whole = {i: own for i, own in whole.items() if self._end[i] > end}

    def _stretch(self, place: int, parent: int, end: int | None) -> str:
        """What is encoded of the text at a place, from a node's end on."""
        begin = self._depth[parent]
        text = self._texts[self.order[place]][begin:end]
        return text[1:] if begin and self._drops_blank else text

    def _blocks(self) -> Iterator[int]:
        """The places between blocks, the first and the last included."""
        yield 0
        size, node = 0, 1
        for place, number in enumerate(self.order):
            size += len(self._texts[number]) - self._depth[self._leaf_parent[place]]
            while node < len(self._first) and self._first[node] == place:
                size += self._depth[node] - self._depth[self._parent[node]]
                node += 1
            if size >= BLOCK:
                yield place + 1
                size = 0
        if size:
            yield len(self.order)
