"""SharedSegments: what the decodes of a batch share, found in their slots, and what of it is read once for all."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from radixrt.execution.attention.slot_tree import FloatArray, Int64Array, SlotTree, depth_first, ranges
from triton_ops.attention.plan import NOTHING_SHARED, Int32Array, SharedItems

PIECE_TOKENS = 64  # tokens of a segment's pieces are multiples of it
MIN_PIECE = 128  # tokens; shorter pieces are not worth their partial results
MOST_PIECES = 64  # of a segment
WITH_ROOM = 0.75  # of the programs that run side by side leave room for others
MOST_WAVES = 4  # of items, that segments are cut for
MEAN_PARTIALS = 4  # a decode's, of items, at most; where a wave of items has more in all, as many


@dataclass(frozen=True)
class TreeCosts:
    """What reading costs on a card.

    Attributes:
        bandwidth: bytes a second.
        reread_bandwidth: bytes a second, of what others read, too: without shared items, those who read the same
            stand side by side, and the L2 cache has it for all but the first.
        operations: a second, of the products of shared items: of whole tiles, as the kernel makes them.
        item: seconds that a program takes besides reading and multiplying.
        partial_crossings: how often a partial result crosses the memory bus.
        launches: seconds that a tree plan adds to a flat one, whatever it reads.

    The defaults are for an H200: the bandwidths and operations as measured, the others estimated.
    """

    bandwidth: float = 4.2e12
    reread_bandwidth: float = 7.5e12
    operations: float = 4.85e14
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
        self._reread = self._token * costs.bandwidth / costs.reread_bandwidth
        # Of a token and a tile of rows, which is as long in the making if it has fewer.
        self._tile = 4 * num_heads * head_dim * rows_at_once / costs.operations
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
        lens: Int32Array,
        *,
        first_rows: Int32Array | None = None,
        counts: Int32Array | None = None,
        most_items: int,
        most_partials: int,
    ) -> tuple[Int32Array, SharedItems]:
        """What requests share, in any order.

        Args:
            req_to_token: int32 `[num_lines, max_context_len]`, contiguous: position to slot. Where two lines have
                the same slot at a position, they have the same slots before it.
            rows: `[R]`, the line of each request.
            lens: `[R]`, its first tokens that may be shared: of a decode all but the last, of an extend those of
                its prefix; 0: none.
            first_rows, counts: `[R]`: request r has the query rows `first_rows[r]` to
                `first_rows[r] + counts[r] - 1`, at least one if it has tokens; None: row r. With counts, who reads
                by itself does so in whole tiles, as extends do.
            most_items: that there may be; see `room`.
            most_partials: results of query rows that items may have in all, those of tails not counted.

        Returns:
            `tail_starts` int32 `[R]`: the position from which on a request reads by itself; and the items that
            hold all positions before it once for each of its query rows, those that take longest first. Items of
            the same tokens and other query rows are next to one another. No items where a plan without them is as
            cheap.
        """
        tail_starts = np.zeros(len(rows), np.int32)
        live = (lens > 0).nonzero()[0]
        slots = req_to_token.reshape(-1)
        lines = rows[live].astype(np.int64) * req_to_token.shape[1]
        if not lines.size:
            return tail_starts, NOTHING_SHARED
        order, common = depth_first(slots, lines, lens[live].astype(np.int64))
        if not common.any():
            return tail_starts, NOTHING_SHARED
        tree = SlotTree.of(order, common)
        requests = live[tree.order]
        first_query, alone = self._query_rows(None if counts is None else counts[requests], len(requests))
        ends = tree.firsts + tree.sizes
        sizes = first_query[ends] - first_query[tree.firsts]
        apart = alone[ends] - alone[tree.firsts]
        kept = self._worthwhile(tree, sizes, apart)
        kept = self._within(tree, kept, sizes, apart, most_items, most_partials)
        chosen = kept.nonzero()[0]
        if not chosen.size:
            return tail_starts, NOTHING_SHARED
        first, size, start = tree.firsts[chosen], sizes[chosen], tree.begins(kept)[chosen]
        length = tree.stops[chosen] - start
        tails = (
            np.bincount(first, length, len(requests)) - np.bincount(ends[chosen], length, len(requests) + 1)[:-1]
        )
        tails = tails.cumsum()
        own = self._token * float(lens.sum() - tails.sum())
        step, seconds = self._cut(length, size, most_items, most_partials, own)
        saved = float(tails @ (alone[1:] - alone[:-1]))
        partials = int((first_query[1:] - first_query[:-1])[tails > 0].sum())
        if self._launches + seconds + self._partial * partials >= saved:
            return tail_starts, NOTHING_SHARED
        tail_starts[requests] = tails

        tiles, share = self._tiles(size)
        height = -(-size // tiles)
        sort = (-(step * share)).argsort(kind="stable")
        segment, nth = ranges((-(-length // step) * tiles)[sort])
        segment = sort[segment]
        nth_piece, nth_tile = np.divmod(nth, tiles[segment])
        piece_start, first_row = nth_piece * step[segment], nth_tile * height[segment]
        queries = requests if first_rows is None else first_rows[requests]
        if counts is not None:
            request, nth = ranges(counts[requests].astype(np.int64))
            queries = queries[request] + nth
        return tail_starts, SharedItems(
            req_pool_indices=rows[requests[first]][segment].astype(np.int32),
            starts=(start[segment] + piece_start).astype(np.int32),
            lens=np.minimum(step[segment], length[segment] - piece_start).astype(np.int32),
            query_starts=(first_query[first][segment] + first_row).astype(np.int32),
            query_lens=np.minimum(height[segment], size[segment] - first_row).astype(np.int32),
            queries=queries.astype(np.int32),
        )

    def _query_rows(self, counts: Int32Array | None, num_requests: int) -> tuple[Int64Array, FloatArray]:
        """The number of query rows before each request and in all `[R + 1]`, and so the card's seconds that they
        take for a token that each request reads by itself.
        """
        before: Int64Array = np.arange(num_requests + 1)
        seconds: FloatArray = np.zeros(num_requests + 1)
        if counts is None:
            seconds += self._reread * before
            return before, seconds
        np.cumsum(counts, out=before[1:])
        tiles = -(-counts.astype(np.int64) // self._rows_at_once)
        np.cumsum(np.maximum(self._reread, tiles * self._tile), out=seconds[1:])
        return before, seconds

    def _tiles(self, sizes: Int64Array) -> tuple[Int64Array, FloatArray]:
        """Of segments with so many rows: the items that share them, and the card's seconds that each takes a token
        (what the first has read is in the L2 cache for the others).
        """
        tiles = -(-sizes // self._rows_at_once)
        return tiles, np.maximum(self._token, tiles * self._tile) / tiles

    def _worthwhile(self, tree: SlotTree, sizes: Int64Array, apart: FloatArray) -> NDArray[np.bool_]:
        """The nodes whose tokens are to be read once, `[N]`: the best choice there is, but for waves.

        They have so many query rows, `sizes`; their requests take so long for a token that each reads, `apart`.

        The tokens of a node that is not chosen are read with those of its children. So the cost of a node and all
        below it depends on where the nearest chosen node above it ends: a column each, the first for none.
        """
        tiles, share = self._tiles(sizes)
        per_token = tiles * share
        own = tree.without_children(apart)
        tails = self._partial * sizes
        fixed = tails + tiles * self._item + (per_token - own) * tree.stops
        width = tree.num_levels + 1
        edges = np.zeros((len(sizes), width))
        for level in range(1, tree.num_levels):
            here = tree.level(level)
            edges[here] = edges[tree.parents[here]]
            edges[here, level] = tree.stops[tree.parents[here]]
        without = -own[:, None] * edges
        with_it = fixed[:, None] - per_token[:, None] * edges
        with_it[:, 0] += tails
        keeps = np.zeros(edges.shape, bool)
        is_first = np.ones(len(sizes), bool)
        np.not_equal(tree.parents[1:], tree.parents[:-1], out=is_first[1:])
        for level in range(tree.num_levels - 1, -1, -1):
            here = tree.level(level)
            np.less(with_it[here], without[here], out=keeps[here])
            if level:
                runs = is_first[here].nonzero()[0]
                above = tree.parents[here][runs]
                sums = np.add.reduceat(np.minimum(with_it[here], without[here]), runs)
                without[above] += sums
                with_it[above] += sums[:, level, None]
        column = np.zeros(len(sizes), np.int64)
        kept = keeps[:, 0].copy()
        for level in range(1, tree.num_levels):
            here = tree.level(level)
            above = tree.parents[here]
            column[here] = np.where(kept[above], level, column[above])
            kept[here] = keeps[here][np.arange(here.stop - here.start), column[here]]
        return kept

    def _within(
        self,
        tree: SlotTree,
        kept: NDArray[np.bool_],
        sizes: Int64Array,
        apart: FloatArray,
        most_items: int,
        most_partials: int,
    ) -> NDArray[np.bool_]:
        """Those of the nodes, `[N]`, that save most and keep the limits; `sizes`, `apart` as for `_worthwhile`."""
        tiles, share = self._tiles(sizes)
        if tiles[kept].sum() <= most_items and sizes[kept].sum() <= most_partials:
            return kept
        chosen = kept.nonzero()[0]
        size, tile, per_token = sizes[chosen], tiles[chosen], (tiles * share)[chosen]
        above = tree.above(kept)[chosen]
        # What a token would cost if rows of a node's chosen children read it together, the others by themselves.
        otherwise = np.append(apart, 0.0)
        np.add.at(otherwise, above, per_token - apart[chosen])
        tokens = tree.stops[chosen] - tree.begins(kept)[chosen]
        saving = tokens * (otherwise[chosen] - per_token) - size * self._partial - tile * self._item
        ranks = np.argsort(-saving, kind="stable")
        fits = (np.cumsum(tile[ranks]) <= most_items) & (np.cumsum(size[ranks]) <= most_partials)
        within = np.zeros_like(kept)
        within[chosen[ranks[fits]]] = True
        return within

    def _cut(
        self, lens: Int64Array, sizes: Int64Array, most_items: int, most_partials: int, own: float
    ) -> tuple[Int64Array, float]:
        """Into pieces of how many tokens segments are cut `[S]`, and the seconds that all items take.

        Of cuts of the dearest segment into one piece, two, ..., and of the others into pieces about as dear, it is
        the one whose waves end first, of those that keep the limits, as uncut segments do. What requests read by
        themselves, which takes `own` seconds, is read beside: where that is the longer part, it gets room for it.
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

        def seconds(wave: float) -> FloatArray:
            waves = np.ceil(items / wave) * wave
            taken: FloatArray = np.maximum(waves * work / items, wave * longest) + self._partial * partials
            return taken

        chosen_by = seconds(max(1, WITH_ROOM * wave // 1) if own > total else wave)
        chosen_by[(items > most_items) | (partials > most_partials)] = np.inf
        best = int(chosen_by.argmin())
        return step[best].astype(np.int64), float(seconds(wave)[best])
