"""Sorts many token sequences, and counts the tokens that each shares with the one before it. Numpy only.

Sequences are compared window by window from their beginning. Those that agree so far are a group, and only groups
of two or more go on. A group whose members all agree in a window is not sorted there: they are compared with its
first, one by one, as far as all agree. Others are sorted by the few tokens after the last one in which all agree.
So each shared token is read about once. Windows of large files are read region by region, in order, and then
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixrt.arrays import BoolArray, Int32Array, Int64Array

WINDOW = 64  # tokens of all members that are compared at a time
SORTED = 16  # tokens that are sorted by at a time
BLOCK = 512  # tokens of two sequences that are compared first, and four times as many each time they agree
CELLS = 1 << 18  # tokens compared at once: they stay in a processor's cache
ROWS = 1 << 17  # sequences sorted at once
REGION = 1 << 26  # tokens that may be resident at once


@dataclass(frozen=True)
class PrefixOrder:
    """N sequences in lexicographic order of their tokens; of equal ones the first comes first.

    Attributes:
        order: `[N]` int64, the number of the sequence at each place.
        shared: `[N]` int32, leading tokens that it shares with the one before; 0 for the first.
    """

    order: Int64Array
    shared: Int32Array


def prefix_order(
    tokens: Int32Array, starts: Int64Array, ends: Int64Array, forget: Callable[[], None] = lambda: None
) -> PrefixOrder:
    """Sort the sequences tokens[starts[i] : ends[i]], `[N]` each, of ids that are not negative.

    `forget` is called after at most REGION tokens were read: they need not stay resident.
    """
    return _Sorting(tokens, starts, ends, forget).run()


@dataclass(frozen=True)
class _Groups:
    """G ranges [begin, end) of places, each of two or more sequences whose first `depth` tokens agree."""

    begin: Int64Array
    end: Int64Array
    depth: Int64Array

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, which: slice | BoolArray) -> _Groups:
        return _Groups(self.begin[which], self.end[which], self.depth[which])

    def and_those(self, others: _Groups) -> _Groups:
        return _Groups(
            np.concatenate([self.begin, others.begin]),
            np.concatenate([self.end, others.end]),
            np.concatenate([self.depth, others.depth]),
        )

    def places(self) -> tuple[Int64Array, Int64Array]:
        """All places, group after group, and the number of the group of each."""
        sizes = self.end - self.begin
        group = np.repeat(np.arange(len(self)), sizes)
        first = np.cumsum(sizes) - sizes
        return np.arange(len(group)) - (first - self.begin)[group], group

    def parts(self, rows: int) -> Iterator[_Groups]:
        """The groups in parts of about `rows` sequences, at least one group each."""
        upto = np.cumsum(self.end - self.begin)
        first = 0
        while first < len(self):
            before = upto[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(upto, before + rows, side="right")))
            yield self[first:last]
            first = last


_NONE = _Groups(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


class _Sorting:
    def __init__(
        self, tokens: Int32Array, starts: Int64Array, ends: Int64Array, forget: Callable[[], None]
    ) -> None:
        # unsigned, so that one more than the largest id is a number too
        self._tokens = tokens.view(np.uint32) if len(tokens) else np.zeros(1, dtype=np.uint32)
        self._starts = starts
        self._ends = ends
        self._forget = forget
        self._order = np.arange(len(starts), dtype=np.int64)
        self._shared = np.zeros(len(starts), dtype=np.int32)
        self._todo = self._alike = _NONE  # to be compared in a window; and one by one, since they agree in one
        self._num_read = 0  # tokens, one by one, since the last were forgotten

    def run(self) -> PrefixOrder:
        count = len(self._order)
        if count > 1:
            self._todo = _Groups(np.array([0]), np.array([count]), np.array([0]))
        while len(self._todo) or len(self._alike):
            if len(self._todo):
                groups, self._todo = self._todo, _NONE
                for part in groups.parts(CELLS // WINDOW):
                    self._pass_or_split(part)
            else:
                groups, self._alike = self._alike, _NONE
                self._split_in_parts(_Groups(groups.begin, groups.end, self._common_depth(groups)))
        return PrefixOrder(self._order, self._shared)

    def _pass_or_split(self, groups: _Groups) -> None:
        agreeing = self._agreeing(groups)
        firsts = self._order[groups.begin]
        end = self._ends[firsts] - self._starts[firsts]
        agrees = agreeing == WINDOW
        are_equal = agrees & (end < groups.depth + WINDOW)  # the window shows where they end
        self._share(groups[are_equal], end[are_equal])
        go_on = groups[agrees & ~are_equal]
        self._alike = self._alike.and_those(_Groups(go_on.begin, go_on.end, go_on.depth + WINDOW))
        self._split_in_parts(_Groups(groups.begin, groups.end, groups.depth + agreeing)[~agrees])

    def _common_depth(self, groups: _Groups) -> Int64Array:
        """Leading tokens in which the sequences of each group agree, `[G]`, compared one by one."""
        found = np.empty_like(groups.depth)
        ranges = zip(groups.begin.tolist(), groups.end.tolist(), groups.depth.tolist(), strict=True)
        for nth, (begin, end, depth) in enumerate(ranges):
            members = self._order[begin:end]
            places = (self._starts[members] + depth).tolist()
            length = int((self._ends[members] - self._starts[members]).min()) - depth  # at most
            first = self._tokens[places[0] : places[0] + length]
            at, block = 0, BLOCK
            while at < length:  # with the last one, which may differ early, block by block
                block = min(block, length - at)
                same = self._agree(first[at : at + block], places[-1] + at)
                at += same
                if same < block:
                    length = at
                block *= 4
            whole = first[:length].tobytes()  # to compare with it is faster than to look for what differs
            for place in places[1:-1]:
                if self._read_bytes(place, length) != whole:
                    length = self._agree(first[:length], place)
                    whole = first[:length].tobytes()
            found[nth] = depth + length
        return found

    def _read_bytes(self, place: int, count: int) -> bytes:
        """So many tokens from a place on."""
        self._count(count)
        return self._tokens[place : place + count].tobytes()

    def _count(self, num_read: int) -> None:
        """Forget what was read where it is much, with so many tokens more."""
        self._num_read += num_read
        if self._num_read > REGION:
            self._forget()
            self._num_read = num_read

    def _agree(self, first: npt.NDArray[np.uint32], place: int) -> int:
        """In how many leading ones of so many tokens those from a place on agree."""
        count = len(first)
        self._count(count)
        differs = self._tokens[place : place + count] != first
        at = int(differs.argmax())
        return at if differs[at] else count

    def _split_in_parts(self, groups: _Groups) -> None:
        for part in groups.parts(ROWS):
            self._split(part)

    def _agreeing(self, groups: _Groups) -> Int64Array:
        """Leading tokens among the next WINDOW in which the sequences of each group agree, `[G]`."""
        places, group = groups.places()
        firsts = self._window(groups.begin, groups.depth, WINDOW)
        found = np.full(len(groups), WINDOW, dtype=np.int64)
        rows = max(1, CELLS // WINDOW)
        for at in range(0, len(places), rows):
            part = slice(at, at + rows)
            block = self._window(places[part], groups.depth[group[part]], WINDOW)
            np.minimum.at(found, group[part], _first_true(block != firsts[group[part]]))
        return found

    def _split(self, groups: _Groups) -> None:
        """Sort each group by its next tokens. Sequences that still agree are the next groups."""
        places, group = groups.places()
        depth = groups.depth[group]
        keys = np.empty((len(places), 1 + SORTED), dtype=">u4")
        keys[:, 0] = group
        keys[:, 1:] = self._window(places, depth, SORTED)
        ranks = np.argsort(keys.view(f"S{keys.itemsize * (1 + SORTED)}").ravel(), kind="stable")
        self._order[places] = self._order[places[ranks]]
        keys = keys[ranks]
        common = _first_true(keys[1:] != keys[:-1]) - 1  # -1: of another group
        own = np.flatnonzero((common >= 0) & (common < SORTED))
        self._shared[places[own + 1]] = depth[own + 1] + common[own]
        # Runs of sequences that agree in all of these tokens.
        is_same = np.concatenate([[False], common == SORTED, [False]])
        begin, last = np.flatnonzero(~is_same[:-1] & is_same[1:]), np.flatnonzero(is_same[:-1] & ~is_same[1:])
        runs = _Groups(places[begin], places[last] + 1, depth[begin] + SORTED)
        firsts = self._order[runs.begin]
        end = self._ends[firsts] - self._starts[firsts]
        are_equal = end < runs.depth
        self._share(runs[are_equal], end[are_equal])
        self._todo = self._todo.and_those(runs[~are_equal])

    def _share(self, groups: _Groups, lengths: Int64Array) -> None:
        """Note that the sequences of each group are equal, with these lengths."""
        places, group = groups.places()
        inner = places != groups.begin[group]
        self._shared[places[inner]] = lengths[group[inner]]

    def _window(self, places: Int64Array, depth: Int64Array, window: int) -> npt.NDArray[np.uint32]:
        """The tokens from `depth` on of the sequences at some places, one more than each; 0 beyond the end."""
        which = self._order[places]
        at = self._starts[which] + depth
        left = self._ends[which] - at
        if len(self._tokens) <= REGION:
            block = self._read(at, window)
        else:
            block = np.empty((len(places), window), dtype=np.uint32)
            for part in self._regions(at):
                block[part] = self._read(at[part], window)
                self._forget()
        short = np.flatnonzero(left < window)
        block[short] *= np.arange(window) < left[short, None]
        return block

    def _regions(self, at: Int64Array) -> Iterator[Int64Array]:
        """Indices into `at` `[R]` for each region of the tokens, region after region."""
        ascending = np.argsort(at)
        bounds = np.searchsorted(at[ascending], np.arange(0, len(self._tokens), REGION)[1:])
        return (part for part in np.split(ascending, bounds) if len(part))

    def _read(self, at: Int64Array, window: int) -> npt.NDArray[np.uint32]:
        """`window` tokens from each of the places `at` `[R]` on, one more than each; anything beyond the last."""
        beyond = np.flatnonzero(at > len(self._tokens) - window)
        if len(beyond) == len(at):
            block = np.take(self._tokens, at[:, None] + np.arange(window), mode="clip")
        else:
            views = np.lib.stride_tricks.sliding_window_view(self._tokens, window)
            block = views[np.minimum(at, len(views) - 1)]
            block[beyond] = np.take(self._tokens, at[beyond, None] + np.arange(window), mode="clip")
        block += 1
        return block


def _first_true(rows: BoolArray) -> Int64Array:
    """The first column of each row `[R, C]` that is true, C if none is."""
    first = rows.argmax(axis=1)
    found: Int64Array = np.where(rows[np.arange(len(rows)), first], first, rows.shape[1])
    return found
