"""Many texts as a tree of what they share, of which each stretch is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.prefixes.order import PrefixOrder
from radixrt.prefixes.tree import prefix_tree
from radixrt.text.common_length import common_length
from radixrt.text.cuts import Cuts
from radixrt.text.text_order import text_order

FIRST, LARGEST = 1 << 14, 1 << 20  # characters that are encoded at a time: few at first, twice as many each time

Encode = Callable[[list[str]], list[list[int]]]


class TextTree:
    """N texts in lexicographic order, in stretches: what several of them begin with, and what each has of its own.

    Attributes:
        order: the number of the text at each place.
    """

    def __init__(self, texts: Sequence[str], cuts: Cuts) -> None:
        self._texts, self._cuts = texts, cuts
        self.order = text_order(texts)

    def encoded(
        self, encode: Encode, lead: Sequence[int], paced: Callable[[Iterable[Any]], Iterable[Any]] = iter
    ) -> Iterator[list[Int32Array]]:
        """The ids of the texts in their order, with `lead` before each, a block at a time; `paced` walks long
        lists.

        Raises what `encode` does, which makes ids of a list of stretches.
        """
        known = {0: np.array(lead, np.int32)}  # ids of beginnings of the last text, by their lengths
        last, place, room = "", 0, FIRST
        while place < len(self.order):
            block, shared, size, common = [last], [0], 0, 0
            for number in paced(islice(self.order, place, None)):
                if size >= room:
                    break
                text = self._texts[number]
                common = common_length(block[-1], text, common)
                shared.append(self._shared(block[-1], text, common))
                size += len(text) - shared[-1]
                block.append(text)
                place += 1
            ids, known = self._encoded(block, shared, known, encode, paced)
            yield ids
            last, room = block[-1], min(2 * room, LARGEST)

    def _shared(self, one: str, other: str, common: int) -> int:
        """Of the characters that two texts begin with alike, those up to a cut, or all where both end."""
        return common if common == len(one) == len(other) else self._cuts.last(other, 0, common)

    def _encoded(
        self,
        block: list[str],
        shared: list[int],
        known: dict[int, Int32Array],
        encode: Encode,
        paced: Callable[[Iterable[Any]], Iterable[Any]],
    ) -> tuple[list[Int32Array], dict[int, Int32Array]]:
        """The ids of the texts of a block but for its first, of which beginnings are `known`; and what is known of
        the last. Each text shares so many characters with the one before it.
        """
        tree = prefix_tree(PrefixOrder(np.arange(len(block)), np.array(shared, np.int32)))
        depth, parent = tree.depth.tolist(), tree.parent.tolist()
        first, above = tree.begin.tolist(), tree.leaf_parent.tolist()
        whole = {i: known[depth[i]] for i in range(len(depth)) if first[i] == 0 and depth[i] in known}
        new = [node for node in range(len(depth)) if node not in whole]
        stretches = [self._stretch(block[first[node]], depth[parent[node]], depth[node]) for node in new]
        stretches += [self._stretch(block[i], depth[above[i]], None) for i in range(1, len(block))]
        found = iter(_arrays(encode(stretches)))
        for node in new:
            whole[node] = np.concatenate([whole[parent[node]], next(found)])
        texts = [np.concatenate([whole[above[i]], next(found)]) for i in paced(range(1, len(block)))]
        node, path = above[-1], {}
        while node >= 0:
            path[depth[node]] = whole[node]
            node = parent[node]
        return texts, path

    def _stretch(self, text: str, begin: int, end: int | None) -> str:
        """What is encoded of a text from one place to another."""
        return text[begin + 1 : end] if begin and self._cuts.drops_blank else text[begin:end]


def _arrays(lists: Sequence[Sequence[int]]) -> list[Int32Array]:
    """Each list as an array, of which all are parts of one."""
    ends = list(accumulate(map(len, lists), initial=0))
    ids = np.fromiter(chain.from_iterable(lists), np.int32, ends[-1])
    return [ids[begin:end] for begin, end in pairwise(ends)]
