"""Finds prompts whose sharing is ruined by something small near their start: a timestamp, a counter, a name.

Below a node of the tree, prompts branch. If many of them continue with the same run of tokens soon after that, in
different branches, the few tokens in between keep them apart. Or many end alike, as with instructions after a
document of any length: that shows when prompts are sorted by their reversed tokens. The sharing without the tokens
in between is counted, not guessed: the rests of the prompts are sorted like prompts. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixrt.arrays import BoolArray, Int64Array
from radixrt.planning.token_store import TokenStore
from radixrt.prefixes.order import PrefixOrder, prefix_order
from radixrt.prefixes.tree import PrefixTree, prefix_tree

RUN = 16  # length of the run of tokens that prompts have in common
REACH = 48  # tokens that may differ before it
SAMPLED = 512  # prompts of a node in the first look
MIN_WAYS = 4  # branches that lead to the run
SEARCHES = 512  # nodes searched: those with the most tokens below them
MIN_REST = 64  # tokens that a branch must share with others after the differing ones
MIN_SHARE = 0.01  # of all prompt tokens: smaller hints are not worth telling
SAME_GAIN = 0.9  # of a common tail's: if that is known to be possible, the tail is not told
ROWS = 1 << 12  # prompts searched at once

_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Hint:
    """Prompts that differ in a few tokens and agree after them.

    Attributes:
        prompts: `[n]` int64, their numbers.
        position: length of their common beginning; the differing tokens come next.
        differing: `[n]` int64, differing tokens of each.
        tokens: further tokens that would be shared if the differing ones came last.
        tail: last tokens in which all of them agree, if that is what would come first; 0: they agree for a while.
    """

    prompts: Int64Array
    position: int
    differing: Int64Array
    tokens: int
    tail: int = 0


def find_hints(store: TokenStore, order: PrefixOrder, tree: PrefixTree) -> list[Hint]:
    """Hints, the worst first; none unless all together would save MIN_SHARE of the tokens."""
    hints = _Search(store, order, tree).hints()
    for tail in _tail_hints(store, order):
        overlap = [hint for hint in hints if np.isin(hint.prompts, tail.prompts).any()]
        if sum(hint.tokens for hint in overlap) < SAME_GAIN * tail.tokens:
            hints = [hint for hint in hints if hint not in overlap] + [tail]
    hints.sort(key=lambda hint: -hint.tokens)
    enough = MIN_SHARE * int((store.offsets[order.order + 1] - store.offsets[order.order]).sum())
    return hints if sum(hint.tokens for hint in hints) >= max(1, enough) else []


def _tail_hints(store: TokenStore, order: PrefixOrder) -> list[Hint]:
    """Groups of prompts with a common tail of MIN_REST tokens or more, as far as they do not overlap."""
    prompts = order.order
    starts, ends, count = store.offsets[prompts], store.offsets[prompts + 1], len(store.tokens)
    backwards = prefix_order(store.tokens[::-1], count - ends, count - starts, store.forget)
    tails = prefix_tree(backwards)
    gains = (tails.num_sequences - 1) * np.where(tails.depth >= MIN_REST, tails.depth, 0)
    is_taken = np.zeros(len(prompts), dtype=bool)
    hints = []
    for node in np.argsort(-gains, kind="stable")[:SEARCHES].tolist():
        group = slice(int(tails.begin[node]), int(tails.end[node]))
        if gains[node] <= 0 or group.stop - group.start < MIN_WAYS or is_taken[group].any():
            continue
        is_taken[group] = True
        places, tail = np.sort(backwards.order[group]), int(tails.depth[node])
        common = _min_between(order.shared, places)
        rests = prefix_order(store.tokens, starts[places], ends[places] - tail, store.forget)
        more = int(rests.shared.sum()) + tail * len(common) - int(common.sum())
        if more >= MIN_REST * len(common):
            position = min(int(common.min()), int((ends[places] - starts[places]).min()) - tail)
            differing = ends[places] - starts[places] - tail - position
            hints.append(Hint(prompts[places], position, differing, more, tail))
    return hints


@dataclass(frozen=True)
class _Found:
    """Places whose prompts contain a run, and its beginning in each window."""

    places: Int64Array
    at: Int64Array


class _Search:
    def __init__(self, store: TokenStore, order: PrefixOrder, tree: PrefixTree) -> None:
        self._store = store
        self._tree = tree
        self._order = order.order
        self._starts = store.offsets[order.order]
        self._ends = store.offsets[order.order + 1]
        self._shared = order.shared
        self._explained = np.zeros(len(order.order), dtype=bool)

    def hints(self) -> list[Hint]:
        """Hints, with those of one node united: their prompts differ at the same position."""
        tree, left = self._tree, SEARCHES
        hints: dict[int, list[Hint]] = {}  # by the deepest node above all of their prompts
        distinct = np.concatenate([[0], np.cumsum(self._ends - self._starts - self._shared)])
        below = distinct[tree.end] - distinct[np.minimum(tree.begin + 1, len(distinct) - 1)]
        largest = np.argsort(-below, kind="stable")[:SEARCHES]
        for node in np.sort(largest).tolist():  # parents first
            depth = int(tree.depth[node])
            while left > 0:
                left -= 1
                places = np.flatnonzero(~self._explained[tree.begin[node] : tree.end[node]]) + tree.begin[node]
                run = self._common_run(places, depth)
                if run is None:
                    break
                found = self._find(places, depth, run)
                self._explained[found.places] = True
                hint = self._hint(found, depth)
                if hint is not None:
                    hints.setdefault(self._node_above(found.places), []).append(hint)
        return [_united(found) for found in hints.values()]

    def _node_above(self, places: Int64Array) -> int:
        """The deepest node above all of some ascending places."""
        node = int(self._tree.leaf_parent[places[0]])
        while self._tree.end[node] <= places[-1]:
            node = int(self._tree.parent[node])
        return node

    def _common_run(self, places: Int64Array, depth: int) -> np.uint64 | None:
        """The hash of the run that the most branches lead to, if there is one."""
        if len(places) < MIN_WAYS:
            return None
        places = places[np.unique(np.linspace(0, len(places) - 1, SAMPLED).astype(np.int64))]
        hashes, is_run = self._hashes(places, depth)
        row, at = np.nonzero(is_run)
        if not len(row):
            return None
        run = hashes[row, at]
        ranks = np.lexsort((at, row, run))
        row, at, run = row[ranks], at[ranks], run[ranks]
        is_first = np.append(True, (run[1:] != run[:-1]) | (row[1:] != row[:-1]))  # of its row
        row, at, run = row[is_first], at[is_first], run[is_first]
        # A new branch: the prompt leaves that of the row before, among rows with this run, before the run begins.
        is_same = run[1:] == run[:-1]
        common = _min_between_all(_min_between(self._shared, places))
        is_other_way = is_same & (common[row[:-1], row[1:]] < depth + at[1:])
        begins = np.flatnonzero(np.append(True, ~is_same))
        ways = 1 + np.add.reduceat(np.append(False, is_other_way), begins, dtype=np.int64)
        mean_at = np.add.reduceat(at, begins) / np.diff(np.append(begins, len(run)))
        best = np.lexsort((mean_at, -ways))[0]
        return np.uint64(run[begins[best]]) if ways[best] >= MIN_WAYS else None

    def _find(self, places: Int64Array, depth: int, run: np.uint64) -> _Found:
        """All places whose prompts contain the run."""
        found, where = [], []
        for first in range(0, len(places), ROWS):
            part = places[first : first + ROWS]
            hashes, is_run = self._hashes(part, depth)
            is_here = is_run & (hashes == run)
            has_it = is_here.any(axis=1)
            found.append(part[has_it])
            where.append(is_here[has_it].argmax(axis=1))
        return _Found(np.concatenate(found), np.concatenate(where))

    def _hint(self, found: _Found, depth: int) -> Hint | None:
        places, at = found.places, found.at
        starts = self._starts[places] + depth + at
        rests = prefix_order(self._store.tokens, starts, self._ends[places], self._store.forget)
        common = _min_between(self._shared, places)
        already = np.maximum(0, common - depth - at[1:])
        ways = 1 + int((common < depth + at[1:]).sum())
        more = int(rests.shared.sum()) - int(already.sum())
        if ways < MIN_WAYS or more < MIN_REST * (ways - 1):
            return None
        position = int(common.min())
        return Hint(self._order[places], position, at + depth - position, more)

    def _hashes(self, places: Int64Array, depth: int) -> tuple[npt.NDArray[np.uint64], BoolArray]:
        """Hashes `[R, REACH]` of the runs from each token on after `depth`, and whether each is complete."""
        at = self._starts[places, None] + depth + np.arange(REACH + RUN - 1)
        is_there = at < self._ends[places, None]
        tokens = np.zeros(at.shape, dtype=np.uint64)
        tokens[is_there] = self._store.tokens[at[is_there]]
        hashes = np.zeros((len(places), REACH), dtype=np.uint64)
        for k in range(RUN):
            hashes = hashes * _BASE + tokens[:, k : k + REACH] + np.uint64(1)
        return hashes, is_there[:, RUN - 1 :]


def _united(hints: list[Hint]) -> Hint:
    """Several hints of the same position as one."""
    return Hint(
        np.concatenate([hint.prompts for hint in hints]),
        hints[0].position,
        np.concatenate([hint.differing for hint in hints]),
        sum(hint.tokens for hint in hints),
    )


def _min_between_all(common: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """From tokens shared by neighbours `[n - 1]` to those shared by the i-th and the j-th, i < j: `[n, n]`."""
    shared = np.zeros((len(common) + 1, len(common) + 1), dtype=np.int32)
    for i in range(len(common)):
        shared[i, i + 1 :] = np.minimum.accumulate(common[i:])
    return shared


def _min_between(shared: npt.NDArray[np.int32], places: Int64Array) -> npt.NDArray[np.int32]:
    """Tokens shared by the prompts at neighbouring `places` `[n]`, ascending: `[n - 1]`."""
    if len(places) < 2:
        return np.zeros(0, dtype=np.int32)
    return np.minimum.reduceat(shared[: places[-1] + 1], places[:-1] + 1)
