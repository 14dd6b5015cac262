"""The tree whose leaves are rows of slots: rows that have a prefix in common have the same slots there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GUESSES = 4  # at what neighbours have in common, before all of them are searched
MOST_LEVELS = 32  # of nodes on a path; deeper trees are looked at more coarsely

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]
_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Nodes:
    """Nodes of the tree that rows in depth-first order are leaves of, level by level, int64 `[N]` each.

    A node has the rows from `firsts` on, `sizes` of them, and the positions up to `stops` that they all have in
    common. `parents`: -1 where there is none; `is_first` (bool): of its
    parent's children. `ancestors` `[N, num_levels]`: column 1 + j is the node of level j above the node, or -1,
    as is column 0. `levels` `[num_levels + 1]`: where each begins, and the end.
    """

    firsts: Int64Array
    sizes: Int64Array
    stops: Int64Array
    parents: Int64Array
    is_first: NDArray[np.bool_]
    ancestors: Int64Array
    levels: Int64Array

    @property
    def num_levels(self) -> int:
        return len(self.levels) - 1

    def level(self, number: int) -> slice:
        """The nodes of a level: children of a node are next to one another."""
        return slice(int(self.levels[number]), int(self.levels[number + 1]))

    def kept_above(self, kept: NDArray[np.bool_]) -> Int64Array:
        """The nearest of the `kept` nodes above each, or -1."""
        is_kept = np.append(kept, False)[self.ancestors]
        columns = (is_kept * np.arange(self.num_levels)).max(1)
        above: Int64Array = self.ancestors[np.arange(len(kept)), columns]
        return above

    def begins(self, kept: NDArray[np.bool_]) -> Int64Array:
        """Where the nearest of the `kept` nodes above each ends, or 0."""
        return np.append(self.stops, 0)[self.kept_above(kept)]

    def without_children(self, values: FloatArray) -> FloatArray:
        """What nodes have of `values` `[N]`, which are sums over their rows, when their children have theirs."""
        own: FloatArray = values - np.bincount(self.parents + 1, values, len(values) + 1)[1:]
        return own

    @classmethod
    def of(cls, common: Int64Array) -> Nodes:
        """The nodes of a tree, or, where it has more than `MOST_LEVELS` levels, of a coarser one: of prefixes that
        are as long or a little shorter.
        """
        nodes, grain = cls._between(common), 8
        while nodes is None:
            nodes = cls._between(common // grain * grain)
            grain *= 2
        return nodes

    @classmethod
    def _between(cls, common: Int64Array) -> Nodes | None:
        """The nodes with a token at least, from how many tokens rows have in common with the next `[R - 1]`;
        None where the tree is deeper than `MOST_LEVELS`.

        A border between two rows belongs to the node that ends there; runs of equal borders are one. The borders
        of a node are those between the nearest smaller ones on both sides, which are found for all at once.
        """
        begins = (common[1:] != common[:-1]).nonzero()[0] + 1
        last = len(begins) + 2
        border = np.zeros(last + 1, np.int64)
        border[2:last], border[last] = begins, len(common)
        value = np.full(last + 1, -1)
        value[1:last] = common[border[1:last]]
        left, right = np.arange(-1, last), np.arange(1, last + 2)
        left[0] = left[last] = 0
        right[0] = right[last] = last
        least = np.maximum(value, 1)
        while (jump := value[left] >= least).any():
            left = np.where(jump, left[left], left)
        while (jump := value[right] >= least).any():
            right = np.where(jump, right[right], right)
        # Equal ones between the same are of one node. Sorted, a node stands before those below it.
        inner = (value > 0).nonzero()[0]
        keys = (left[inner] << 32) + value[inner]
        sort = keys.argsort(kind="stable")
        inner, keys = inner[sort], keys[sort]
        is_new = np.ones(len(keys), bool)
        np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
        number = np.full(last + 1, -1)
        number[inner] = is_new.cumsum() - 1
        own = inner[is_new]
        left, right = left[own], right[own]
        parents = np.full(len(own) + 1, -1)  # the last one is its own
        parents[:-1] = number[np.where(value[left] >= value[right], left, right)]

        lineage = [np.arange(len(own))]  # of each node upwards
        while (above := parents[lineage[-1]]).max() >= 0:
            if len(lineage) == MOST_LEVELS:
                return None
            lineage.append(above)
        num_levels = len(lineage)
        lineage.append(above)
        upwards = np.array(lineage)
        depth = (upwards >= 0).sum(0) - 1
        order = depth.argsort(kind="stable")
        number = np.full(len(own) + 1, -1)
        number[order] = np.arange(len(own))
        depth = depth[order]
        steps = depth[:, None] + 1 - np.arange(num_levels)
        steps[steps <= 0] = num_levels  # from there, as from the last one, nothing is above
        ancestors = number[upwards[steps, order[:, None]]]
        parents = number[parents[order]]
        is_first = np.ones(len(own), bool)
        np.not_equal(parents[1:], parents[:-1], out=is_first[1:])
        firsts = border[left + 1]
        sizes = (border[right] + 1 - firsts)[order]
        levels = depth.searchsorted(np.arange(num_levels + 1))
        return cls(firsts[order], sizes, value[own[order]], parents, is_first, ancestors, levels)


def depth_first(slots: Int32Array, lines: Int64Array, lens: Int64Array) -> tuple[Int64Array, Int64Array]:
    """An order of rows in which those with any prefix in common stand together `[R]`, the order they have if it is
    one; and how many tokens each has in common with the next `[R - 1]`. `lens`: of what they may share.
    """
    order = np.arange(len(lines))
    positions = _NO_POSITIONS
    while True:
        line, length = lines[order], lens[order]
        common = _common(slots, line, length)
        torn = _torn(slots, line, length, common)
        if not len(torn):
            return order, common
        # Equal slots are equal prefixes: sorted by the slots there, rows with one of these prefixes are together.
        found, positions = len(positions), np.union1d(positions, torn)
        if len(positions) == found:
            raise ValueError(
                f"rows have the same slot at one of the positions {torn[:9].tolist()}, but others before it: all "
                "that is before a slot must be the same wherever it stands in req_to_token"
            )
        keys = slots.take(lines[:, None] + np.minimum(positions, lens[:, None] - 1))
        keys = np.where(positions < lens[:, None], keys, -1)
        # As bytes: equal prefixes stand together, and unlike np.lexsort it does not sort by each position in turn.
        order = keys.view(f"V{keys.itemsize * len(positions)}")[:, 0].argsort(kind="stable")


def _torn(slots: Int32Array, lines: Int64Array, lens: Int64Array, common: Int64Array) -> Int64Array:
    """Lengths of prefixes behind which rows are not together: a token is left, and come back to later."""
    twice = 2 * np.arange(len(common))
    leaves, comes = common < lens[:-1], common < lens[1:]
    left = slots.take((lines[:-1] + common)[leaves]).astype(np.int64)
    come = slots.take((lines[1:] + common)[comes]).astype(np.int64)
    keys = np.concatenate([(left << 32) + twice[leaves], (come << 32) + (twice[comes] + 1)])
    keys.sort()
    # Of the same token, and of a leave and then of a coming.
    again = ((keys[1:] ^ keys[:-1]) >> 32 == 0) & (keys[:-1] & 1 < keys[1:] & 1)
    if not again.any():
        return _NO_POSITIONS
    left, come = ((key[again] & 0xFFFFFFFF) >> 1 for key in (keys[:-1], keys[1:]))
    return np.unique(common[come[common[left] == common[come]]])


def _common(slots: Int32Array, lines: Int64Array, lens: Int64Array) -> Int64Array:
    """How many tokens each row has in common with the next `[R - 1]`, at most `lens` of either."""
    common = np.empty(len(lines) - 1, np.int64)
    at, most = np.array((lines[:-1], lines[1:])), np.minimum(lens[:-1], lens[1:])
    open_ = np.arange(len(common))
    # Most neighbours part where others do.
    for _ in range(GUESSES):
        some = len(open_) // 3
        a, b = (slots[line : line + most[some]] for line in at[:, some])
        differ = a != b
        guess = int(differ.argmax())
        if not differ[guess]:
            guess = len(differ)
        a, b = slots.take(at + guess)
        hit = (most == guess) | ((most > guess) & (a != b))
        if guess:
            a, b = slots.take(at + (guess - 1))
            hit &= a == b
        common[open_[hit]] = guess
        missed = (~hit).nonzero()[0]
        few = 2 * len(missed) > len(open_)
        open_, at, most = open_[missed], at[:, missed], most[missed]
        if not len(open_):
            return common
        if few:
            break
    found = np.zeros_like(most)
    for bit in range(int(most.max()).bit_length() - 1, -1, -1):
        further = np.minimum(found + (1 << bit), most)
        a, b = slots.take(at + (further - 1))
        np.copyto(found, further, where=a == b)
    common[open_] = found
    return common


def repeats(values: Int32Array) -> bool:
    """Whether one of them stands there twice."""
    values = np.sort(values)
    return bool((values[1:] == values[:-1]).any())


def ranges(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """All pairs (i, j) with j below counts[i], in order: two arrays."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
