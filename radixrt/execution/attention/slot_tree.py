"""The tree whose leaves are rows of slots: rows with a common prefix have the same slots there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixrt.arrays import BoolArray, Int32Array, Int64Array
from triton_ops.attention.plan import pairs

GUESSES = 3  # at how much rows have in common, before bisection finds it
MAX_LEVELS = 32  # of nodes on a path; deeper trees are looked at more coarsely


@dataclass(frozen=True)
class SlotTree:
    """The nodes of a tree that has rows in depth-first order as leaves, level by level; int64 arrays.

    A node is some rows, two at least, and the prefix, a token at least, that they and no others have in common.
    Node i of N has the rows from `firsts[i]` to `firsts[i] + sizes[i] - 1`.
    """

    firsts: Int64Array  # `[N]`
    sizes: Int64Array  # `[N]`
    stops: Int64Array  # `[N]`, the tokens of its prefix
    parents: Int64Array  # `[N]`, of the level above, or -1; children of a node are next to one another
    levels: list[slice]  # the nodes of each

    def nearest_kept_ancestor(self, kept: BoolArray) -> Int64Array:
        """The nearest of the `kept` nodes `[N]` above each, or -1."""
        found = self.parents.copy()
        for here in self.levels[1:]:
            parents = self.parents[here]
            found[here] = np.where(kept[parents], parents, found[parents])
        return found

    @classmethod
    def of(cls, common: Int64Array) -> SlotTree:
        """The tree of R rows in depth-first order, with `common` `[R - 1]` tokens in common with the next.
        Where it had more than `MAX_LEVELS` levels, prefixes end a little earlier.

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
        at_least = np.maximum(value, 1)
        while (jump := value[left] >= at_least).any():
            left = np.where(jump, left[left], left)
        while (jump := value[right] >= at_least).any():
            right = np.where(jump, right[right], right)
        # Equal ones between the same are of one node. Sorted, a node comes before those below it.
        inner = (value > 0).nonzero()[0]
        keys = (left[inner] << 32) + value[inner]
        sort = keys.argsort(kind="stable")
        inner, keys = inner[sort], keys[sort]
        begins, counts = _runs(keys)
        number = np.full(last + 1, -1)
        number[inner] = np.repeat(np.arange(len(begins)), counts)
        own = inner[begins]
        left, right = left[own], right[own]
        parents = number[np.where(value[left] >= value[right], left, right)]
        firsts, stops = border[left + 1], value[own]
        sizes = border[right] + 1 - firsts

        depths = _depths(parents)
        if depths.max(initial=0) >= MAX_LEVELS:
            kept, stops, parents = _coarser(stops, parents)
            firsts, sizes, depths = firsts[kept], sizes[kept], _depths(parents)
        sort = (depths * (len(common) + 1) + firsts).argsort()
        number = np.full(len(sort) + 1, -1)
        number[sort] = np.arange(len(sort))
        levels = [slice(*ends) for ends in pairwise([0, *np.bincount(depths).cumsum().tolist()])]
        return cls(firsts[sort], sizes[sort], stops[sort], number[parents[sort]], levels)


def _depths(parents: Int64Array) -> Int64Array:
    """How many nodes are above each, `[N]`, of `parents` or -1."""
    above = np.append(parents, -1)  # the last is nobody's
    depths = (above >= 0).astype(np.int64)
    while (above >= 0).any():
        depths, above = depths + depths[above], above[above]
    return depths[:-1]


def _coarser(stops: Int64Array, parents: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The nodes of a tree that is too deep, less those that end just after another one above them; their stops,
    rounded down, and their parents.
    """
    grain = 8
    while True:
        rounded = stops // grain * grain
        kept = (rounded > np.append(rounded, 0)[parents]).nonzero()[0]
        nearest = np.append(parents, -1)  # that is kept, at or above each
        nearest[kept] = kept
        while not np.array_equal(nearest, further := nearest[nearest]):
            nearest = further
        number = np.full(len(nearest), -1)
        number[kept] = np.arange(len(kept))
        above = number[nearest[parents[kept]]]
        if _depths(above).max(initial=0) < MAX_LEVELS:
            return kept, rounded[kept], above
        grain *= 2


def depth_first(
    slots: Int32Array, offsets: Int64Array, lens: Int64Array, max_stops: int
) -> tuple[Int64Array, Int64Array]:
    """Sort rows so that those with any common prefix are neighbours: their order `[R]`, and how many tokens each
    has in common with the next `[R - 1]`. Row r is `slots[offsets[r] : offsets[r] + lens[r]]`, a token at least.

    Equal slots are equal prefixes. So rows sorted by the slots before and after some stops are in such an order if
    all neighbours part at stops; positions where they part elsewhere are the next stops. If there are more than
    `max_stops`, each group of rows is sorted along one of its rows instead.
    """
    starts = slots.take(offsets)
    order = starts.argsort(kind="stable")
    starts = starts[order]
    common = np.zeros(len(offsets) - 1, np.int64)
    unknown = (starts[1:] == starts[:-1]).nonzero()[0]  # of common
    stops = np.zeros(1, np.int64)
    while len(unknown):
        row, after = order[unknown], order[unknown + 1]
        found = _common(slots, offsets[row], offsets[after], np.minimum(lens[row], lens[after]))
        common[unknown] = found
        more = np.concatenate([stops, found])
        more.sort()
        more = more[_runs(more)[0]]
        if len(more) == len(stops):
            break
        if len(more) > max_stops:
            return _by_paths(slots, offsets, lens)
        stops = more
        columns = np.array((stops - 1, stops)).T.reshape(-1)[1:]
        if int(lens.min()) > columns[-1]:
            keys = slots.take(offsets[:, None] + columns, mode="clip")
        else:
            keys = slots.take(offsets[:, None] + np.minimum(columns, lens[:, None] - 1))
            keys[columns >= lens[:, None]] = -1  # not there
        # As bytes: unlike np.lexsort it does not sort by each column in turn.
        order = keys.view(f"V{keys.itemsize * len(columns)}")[:, 0].argsort(kind="stable")
        keys = keys[order]
        differ = keys[1:] != keys[:-1]
        column = differ.argmax(1)
        common = stops[column >> 1]
        # Between two stops, or after the last.
        unknown = ((column & 1 == 1) | ((column == 0) & ~differ[:, 0])).nonzero()[0]
    return order, common


def _by_paths(slots: Int32Array, offsets: Int64Array, lens: Int64Array) -> tuple[Int64Array, Int64Array]:
    """`depth_first` in few rounds, however many stops there are.

    One row of a group is a path, which the others leave. Sorted by where they leave it, the last first, and by the
    slot that they have instead, rows are in order but for those that leave it for the same slot: the next groups.
    At first, rows with the same first slot are a group.
    """
    starts = slots.take(offsets)
    order = starts.argsort(kind="stable")
    first, size = _runs(starts[order])
    out = np.zeros(len(offsets) - 1, np.int64)
    while len(several := (size > 1).nonzero()[0]):
        first, size = first[several], size[several]
        group, nth = pairs(0, size)
        places = first[group] + nth
        rows, paths = order[places], order[first + size // 2][group]
        offset, length = offsets[rows], lens[rows]
        common = _common(slots, offset, offsets[paths], np.minimum(length, lens[paths]))
        to = slots.take(offset + np.minimum(common, length - 1))
        to[common == length] = -1  # rows that end there
        sort = np.lexsort((to, -common, group))
        order[places] = rows[sort]
        to, common = to[sort], common[sort]
        inside = (nth > 0).nonzero()[0]
        out[places[inside] - 1] = common[inside]
        begins, size = _runs(to, common, group)
        first = places[begins]
        size[to[begins] < 0] = 0
    return order, out


def _common(slots: Int32Array, a: Int64Array, b: Int64Array, lens: Int64Array) -> Int64Array:
    """How many of the first `lens` slots `[n]` from `a` and from `b` on are the same; one at least is."""
    common = lens.copy()
    left = ((a != b) & (lens > 1)).nonzero()[0]  # those that are not known yet
    a, b, lens = a[left], b[left], lens[left]

    def same(at: Int64Array | int) -> BoolArray:
        equal: BoolArray = slots.take(a + at, mode="clip") == slots.take(b + at, mode="clip")
        return equal

    for _ in range(GUESSES):  # most part where some other does
        if not len(left):
            return common
        some = len(left) // 3
        start, other, end = int(a[some]), int(b[some]), int(lens[some])
        differ = slots[start : start + end] != slots[other : other + end]
        guess = int(differ.argmax())
        if not differ[guess]:
            guess = end
        is_it = same(guess - 1) & ((lens == guess) | ((lens > guess) & ~same(guess)))
        common[left[is_it]] = guess
        still = (~is_it).nonzero()[0]
        left, a, b, lens = left[still], a[still], b[still], lens[still]
    if len(left):
        found = np.zeros_like(lens)
        for bit in range(int(lens.max()).bit_length() - 1, -1, -1):
            further = np.minimum(found + (1 << bit), lens)
            found = np.where(same(further - 1), further, found)
        common[left] = found
    return common


def _runs(*values: NDArray[np.integer[Any]]) -> tuple[Int64Array, Int64Array]:
    """Where runs of equal values begin, and how long they are."""
    differ = np.ones(len(values[0]) + 1, bool)
    np.not_equal(values[0][1:], values[0][:-1], out=differ[1:-1])
    for more in values[1:]:
        differ[1:-1] |= more[1:] != more[:-1]
    begins = differ.nonzero()[0]
    return begins[:-1], begins[1:] - begins[:-1]
