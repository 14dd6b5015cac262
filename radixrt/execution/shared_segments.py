"""SharedSegments: what the decodes of a batch share, found in their slots, and what of it is read once for all."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from triton_ops.attention_plan import Int32Array, SharedItems

GUESSES = 4  # at what neighbours have in common, before all of them are searched
MOST_LEVELS = 32  # of nodes on a path; deeper trees are looked at more coarsely
PIECE_TOKENS = 64  # tokens of a segment's pieces are multiples of it
MIN_PIECE = 128  # tokens; shorter pieces are not worth their partial results
MOST_PIECES = 64  # of a segment
MOST_WAVES = 4  # of items, that segments are cut for
MEAN_PARTIALS = 4  # a decode's, of items, at most; where a wave of items has more in all, as many

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class TreeCosts:
    """What reading costs on a card.

    Attributes:
        bandwidth: bytes a second.
        operations: a second, of the products of shared items.
        item: seconds that a program takes besides reading and multiplying.
        partial_crossings: how often a partial result crosses the memory bus.
        launches: seconds that a tree plan adds to a flat one, whatever it reads.

    The defaults are estimates for an H200.
    """

    bandwidth: float = 4.2e12
    operations: float = 6e14
    item: float = 2e-6
    partial_crossings: float = 2.0
    launches: float = 6e-6


class SharedSegments:
    """Segments of KV that several decodes of a batch read, chosen so that the whole is cheapest.

    Args:
        num_heads, num_kv_heads, head_dim: of the model.
        kv_bytes: of an element of the pool.
        num_programs: of shared items, that run side by side.
        rows_at_once: query rows that an item may have.
        costs: of the card.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_bytes: int,
        num_programs: int,
        rows_at_once: int,
        costs: TreeCosts,
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._num_programs = num_programs
        self._rows_at_once = rows_at_once
        # Seconds of the whole card.
        self._token = 2 * num_kv_heads * head_dim * kv_bytes / costs.bandwidth
        self._pair = 4 * num_heads * head_dim / costs.operations  # of a row and a token
        self._partial = costs.partial_crossings * num_heads * (4 * head_dim + 4) / costs.bandwidth  # of a row
        self._item = costs.item * num_kv_heads / num_programs
        self._launches = costs.launches

    def room(self, count: int) -> tuple[int, int]:
        """The items, and the results of rows in all, that plans of `count` decodes are to have room for."""
        wave = self._num_programs / self._num_kv_heads
        return ceil(MOST_WAVES * wave), max(MEAN_PARTIALS * count, ceil(wave) * min(count, self._rows_at_once))

    def find(
        self,
        req_to_token: Int32Array,
        rows: Int32Array,
        seq_lens: Int32Array,
        *,
        most_items: int,
        most_partials: int,
    ) -> tuple[Int32Array, SharedItems]:
        """What decodes share, in any order.

        Args:
            req_to_token: int32 `[num_lines, max_context_len]`, contiguous: position to slot. Where two lines have
                the same slot at a position, they have the same slots before it.
            rows: `[R]`, the line of each decode.
            seq_lens: `[R]`, its tokens, the last of which nobody shares; 0: a padded decode.
            most_items: that there may be; see `room`.
            most_partials: results of rows that items may have in all, those of tails not counted.

        Returns:
            `tail_starts` int32 `[R]`: the position from which on a decode reads by itself; and the items that hold
            all positions before it once for each, those that take longest first. Items of the same tokens and
            other rows are next to one another. No items where a plan without them is as cheap.

        Raises ValueError where it finds lines with the same slot at a position and others before it.
        """
        tail_starts = np.zeros(len(rows), np.int32)
        live = (seq_lens > 1).nonzero()[0]
        slots = req_to_token.reshape(-1)
        lines = rows[live].astype(np.int64) * req_to_token.shape[1]
        if not _repeats(slots.take(lines)):
            return tail_starts, _NOTHING
        order, common = _depth_first(slots, lines, seq_lens[live].astype(np.int64) - 1)
        queries = live[order]
        nodes, grain = _Nodes.between(common), 8
        while nodes is None:
            nodes = _Nodes.between(common // grain * grain)
            grain *= 2
        kept = self._within(nodes, self._worthwhile(nodes), most_items, most_partials)
        chosen = kept.nonzero()[0]
        if not chosen.size:
            return tail_starts, _NOTHING
        first, size, stops = nodes.firsts[chosen], nodes.sizes[chosen], nodes.stops[chosen]
        starts = nodes.begins(kept)[chosen]
        step, seconds = self._cut(stops - starts, size, most_items, most_partials)
        # Ends of deeper nodes come later and stay.
        node, nth_row = _ranges(size)
        tails = np.zeros(len(queries), np.int64)
        tails[first[node] + nth_row] = stops[node]
        saved = self._token * int(tails.sum())
        if self._launches + seconds + self._partial * np.count_nonzero(tails) >= saved:
            return tail_starts, _NOTHING
        tail_starts[queries] = tails

        tiles, share = self._tiles(size)
        segment = np.argsort(-(step * share), kind="stable")
        pieces = -(-(stops - starts)[segment] // step[segment])
        piece_of, nth_piece = _ranges(pieces)
        segment = segment[piece_of]
        piece_of, nth_tile = _ranges(tiles[segment])
        segment, nth_piece = segment[piece_of], nth_piece[piece_of]
        height = -(-size // tiles)
        start = starts[segment] + nth_piece * step[segment]
        query_start = nth_tile * height[segment]
        return tail_starts, SharedItems(
            lines=rows[queries[first[segment]]].astype(np.int32),
            starts=start.astype(np.int32),
            lens=np.minimum(step[segment], stops[segment] - start).astype(np.int32),
            query_starts=(first[segment] + query_start).astype(np.int32),
            query_lens=np.minimum(height[segment], size[segment] - query_start).astype(np.int32),
            queries=queries.astype(np.int32),
        )

    def _tiles(self, sizes: Int64Array) -> tuple[Int64Array, FloatArray]:
        """Of segments with so many rows: the items that share them, and the card's seconds that each takes a token
        (what the first has read is in the L2 cache for the others).
        """
        tiles = -(-sizes // self._rows_at_once)
        return tiles, np.maximum(self._token, sizes * self._pair) / tiles

    def _worthwhile(self, nodes: _Nodes) -> NDArray[np.bool_]:
        """The nodes whose tokens are to be read once, `[N]`: the best choice there is, but for waves.

        The tokens of a node that is not chosen are read with those of its children. So the cost of a node and all
        below it depends on where the nearest chosen node above it ends: a column each, the first for none.
        """
        tiles, share = self._tiles(nodes.sizes)
        per_token = tiles * share
        own = self._token * nodes.own_rows
        tails = self._partial * nodes.sizes
        fixed = tails + tiles * self._item + (per_token - own) * nodes.stops
        edges = np.append(nodes.stops, 0)[nodes.ancestors]
        best = np.zeros((len(edges), nodes.num_levels + 1))
        keeps = np.zeros(edges.shape, bool)
        for level in range(nodes.num_levels - 1, -1, -1):
            here, columns = nodes.level(level), slice(0, level + 1)
            below = np.zeros((here.stop - here.start, level + 2))
            if level + 1 < nodes.num_levels:
                children = nodes.level(level + 1)
                runs = nodes.is_first[children].nonzero()[0]
                sums = np.add.reduceat(best[children, : level + 2], runs)
                below[nodes.parents[children][runs] - here.start] = sums
            edge = edges[here, columns]
            without = below[:, columns] - own[here, None] * edge
            with_it = (fixed[here] + below[:, level + 1])[:, None] - per_token[here, None] * edge
            with_it[:, 0] += tails[here]
            keeps[here, columns] = with_it < without
            best[here, columns] = np.minimum(with_it, without)
        kept = np.zeros(len(nodes.stops) + 1, bool)
        column = np.zeros(len(kept), np.int64)
        for level in range(nodes.num_levels):
            here = nodes.level(level)
            above = nodes.parents[here]
            column[here] = np.where(kept[above], level, column[above])
            kept[here] = keeps[np.arange(here.start, here.stop), column[here]]
        return kept[:-1]

    def _within(
        self, nodes: _Nodes, kept: NDArray[np.bool_], most_items: int, most_partials: int
    ) -> NDArray[np.bool_]:
        """Those of the nodes, `[N]`, that save most and keep the limits."""
        tiles, share = self._tiles(nodes.sizes)
        if tiles[kept].sum() <= most_items and nodes.sizes[kept].sum() <= most_partials:
            return kept
        chosen = kept.nonzero()[0]
        size, per_token = nodes.sizes[chosen], (tiles * share)[chosen]
        above = nodes.kept_above(kept)[chosen]
        # What a token would cost if rows of a node's chosen children read it together, the others by themselves.
        apiece = np.append(nodes.sizes * self._token, 0.0)
        np.add.at(apiece, above, per_token - size * self._token)
        tokens = nodes.stops[chosen] - nodes.begins(kept)[chosen]
        saving = tokens * (apiece[chosen] - per_token) - size * self._partial - tiles[chosen] * self._item
        ranks = np.argsort(-saving, kind="stable")
        fits = (np.cumsum(tiles[chosen][ranks]) <= most_items) & (np.cumsum(size[ranks]) <= most_partials)
        within = np.zeros_like(kept)
        within[chosen[ranks[fits]]] = True
        return within

    def _cut(
        self, lens: Int64Array, sizes: Int64Array, most_items: int, most_partials: int
    ) -> tuple[Int64Array, float]:
        """Into pieces of how many tokens segments are cut `[S]`, and the seconds that all items take.

        Of cuts of the dearest segment into one piece, two, ..., and of the others into pieces about as dear, it is
        the one whose waves end first, of those that keep the limits, as uncut segments do.
        """
        tiles, share = self._tiles(sizes)
        dear = lens * share
        total, dearest = float(dear @ tiles), float(dear.max())
        wave = self._num_programs / self._num_kv_heads  # items
        most = min(MOST_PIECES, max(1, int(MOST_WAVES * wave * dearest / total)))
        step = np.ceil(lens / np.ceil(dear * (np.arange(1.0, most + 1)[:, None] / dearest) - 1e-9))
        step = np.maximum(np.ceil(step / PIECE_TOKENS) * PIECE_TOKENS, MIN_PIECE)
        parts = np.ceil(lens / step)
        items, partials = parts @ tiles, parts @ sizes
        work = items * self._item + total
        longest = self._item + (np.minimum(step, lens) * share).max(1)
        seconds = (
            np.maximum(np.ceil(items / wave) * wave * work / items, wave * longest) + self._partial * partials
        )
        seconds[(items > most_items) | (partials > most_partials)] = np.inf
        best = int(seconds.argmin())
        return step[best].astype(np.int64), float(seconds[best])


_NO_POSITIONS = np.zeros(0, np.int64)
_NONE = np.zeros(0, np.int32)
_NOTHING = SharedItems(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True)
class _Nodes:
    """Nodes of the tree that rows in depth-first order are leaves of, level by level, int64 `[N]` each.

    A node has the rows from `firsts` on, `sizes` of them, and the positions up to `stops` that they all have in
    common; of its rows, `own_rows` are in no child. `parents`: -1 where there is none; `is_first` (bool): of its
    parent's children. `ancestors` `[N, num_levels]`: column 1 + j is the node of level j above the node, or -1,
    as is column 0. `levels` `[num_levels + 1]`: where each begins, and the end.
    """

    firsts: Int64Array
    sizes: Int64Array
    stops: Int64Array
    own_rows: Int64Array
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

    @classmethod
    def between(cls, common: Int64Array) -> _Nodes | None:
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
        children = np.bincount(parents + 1, sizes, len(own) + 1)[1:].astype(np.int64)
        levels = depth.searchsorted(np.arange(num_levels + 1))
        return cls(firsts[order], sizes, value[own[order]], sizes - children, parents, is_first, ancestors, levels)


def _depth_first(slots: Int32Array, lines: Int64Array, lens: Int64Array) -> tuple[Int64Array, Int64Array]:
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


def _repeats(values: Int32Array) -> bool:
    """Whether one of them stands there twice."""
    values = np.sort(values)
    return bool((values[1:] == values[:-1]).any())


def _ranges(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """All pairs (i, j) with j below counts[i], in order: two arrays."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
