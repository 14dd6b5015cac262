"""SharedSegments: what the decodes of a batch share, found in their slots, and what of it is read once for all."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from radixrt.execution.slot_tree import FloatArray, Int64Array, Nodes, depth_first, ranges, repeats
from triton_ops.attention_plan import Int32Array, SharedItems

PIECE_TOKENS = 64  # tokens of a segment's pieces are multiples of it
MIN_PIECE = 128  # tokens; shorter pieces are not worth their partial results
MOST_PIECES = 64  # of a segment
MOST_WAVES = 4  # of items, that segments are cut for
MEAN_PARTIALS = 4  # a decode's, of items, at most; where a wave of items has more in all, as many


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

        Raises ValueError where it finds lines with the same slot at a position and others before it.
        """
        tail_starts = np.zeros(len(rows), np.int32)
        live = (lens > 0).nonzero()[0]
        slots = req_to_token.reshape(-1)
        lines = rows[live].astype(np.int64) * req_to_token.shape[1]
        if not repeats(slots.take(lines)):
            return tail_starts, _NOTHING
        order, common = depth_first(slots, lines, lens[live].astype(np.int64))
        requests = live[order]
        first_query, alone = self._query_rows(None if counts is None else counts[requests], len(requests))
        nodes = Nodes.of(common)
        ends = nodes.firsts + nodes.sizes
        sizes = first_query[ends] - first_query[nodes.firsts]
        apart = alone[ends] - alone[nodes.firsts]
        kept = self._worthwhile(nodes, sizes, apart)
        kept = self._within(nodes, kept, sizes, apart, most_items, most_partials)
        chosen = kept.nonzero()[0]
        if not chosen.size:
            return tail_starts, _NOTHING
        first, size, stops = first_query[nodes.firsts[chosen]], sizes[chosen], nodes.stops[chosen]
        starts = nodes.begins(kept)[chosen]
        step, seconds = self._cut(stops - starts, size, most_items, most_partials)
        # Ends of deeper nodes come later and stay.
        node, nth_request = ranges(nodes.sizes[chosen])
        tails = np.zeros(len(requests), np.int64)
        tails[nodes.firsts[chosen][node] + nth_request] = stops[node]
        saved = float(tails @ np.diff(alone))
        partials = int(np.diff(first_query)[tails > 0].sum())
        if self._launches + seconds + self._partial * partials >= saved:
            return tail_starts, _NOTHING
        tail_starts[requests] = tails

        tiles, share = self._tiles(size)
        segment = np.argsort(-(step * share), kind="stable")
        pieces = -(-(stops - starts)[segment] // step[segment])
        piece_of, nth_piece = ranges(pieces)
        segment = segment[piece_of]
        piece_of, nth_tile = ranges(tiles[segment])
        segment, nth_piece = segment[piece_of], nth_piece[piece_of]
        height = -(-size // tiles)
        start = starts[segment] + nth_piece * step[segment]
        query_start = nth_tile * height[segment]
        queries = requests if first_rows is None else first_rows[requests]
        if counts is not None:
            request, nth_row = ranges(counts[requests].astype(np.int64))
            queries = queries[request] + nth_row
        return tail_starts, SharedItems(
            lines=rows[requests[nodes.firsts[chosen][segment]]].astype(np.int32),
            starts=start.astype(np.int32),
            lens=np.minimum(step[segment], stops[segment] - start).astype(np.int32),
            query_starts=(first[segment] + query_start).astype(np.int32),
            query_lens=np.minimum(height[segment], size[segment] - query_start).astype(np.int32),
            queries=queries.astype(np.int32),
        )

    def _query_rows(self, counts: Int32Array | None, num_requests: int) -> tuple[Int64Array, FloatArray]:
        """The number of query rows before each request and in all `[R + 1]`, and so the card's seconds that they
        take for a token that each request reads by itself.
        """
        if counts is None:
            before = np.arange(num_requests + 1)
            return before, self._token * before
        before = np.zeros(num_requests + 1, np.int64)
        np.cumsum(counts, out=before[1:])
        tiles, share = self._tiles(-(-counts.astype(np.int64) // self._rows_at_once) * self._rows_at_once)
        seconds = np.zeros(num_requests + 1)
        np.cumsum(tiles * share, out=seconds[1:])
        return before, seconds

    def _tiles(self, sizes: Int64Array) -> tuple[Int64Array, FloatArray]:
        """Of segments with so many rows: the items that share them, and the card's seconds that each takes a token
        (what the first has read is in the L2 cache for the others).
        """
        tiles = -(-sizes // self._rows_at_once)
        return tiles, np.maximum(self._token, sizes * self._pair) / tiles

    def _worthwhile(self, nodes: Nodes, sizes: Int64Array, apart: FloatArray) -> NDArray[np.bool_]:
        """The nodes whose tokens are to be read once, `[N]`: the best choice there is, but for waves.

        They have so many query rows, `sizes`; their requests take so long for a token that each reads, `apart`.

        The tokens of a node that is not chosen are read with those of its children. So the cost of a node and all
        below it depends on where the nearest chosen node above it ends: a column each, the first for none.
        """
        tiles, share = self._tiles(sizes)
        per_token = tiles * share
        own = nodes.without_children(apart)
        tails = self._partial * sizes
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
        self,
        nodes: Nodes,
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
        above = nodes.kept_above(kept)[chosen]
        # What a token would cost if rows of a node's chosen children read it together, the others by themselves.
        otherwise = np.append(apart, 0.0)
        np.add.at(otherwise, above, per_token - apart[chosen])
        tokens = nodes.stops[chosen] - nodes.begins(kept)[chosen]
        saving = tokens * (otherwise[chosen] - per_token) - size * self._partial - tile * self._item
        ranks = np.argsort(-saving, kind="stable")
        fits = (np.cumsum(tile[ranks]) <= most_items) & (np.cumsum(size[ranks]) <= most_partials)
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


_NONE = np.zeros(0, np.int32)
_NOTHING = SharedItems(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
