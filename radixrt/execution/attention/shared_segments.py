"""SharedSegments: finds the KV that requests share in their slots, and chooses which of it is read once."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixrt.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.pass_plans import Capacity
from radixrt.execution.attention.slot_tree import SlotTree, depth_first
from radixrt.execution.attention.tuning import PlanTuning
from triton_ops.attention.ordered import MAX_CHAIN, STATE_NUMBERS
from triton_ops.attention.plan import NOTHING_SHARED, SharedItems, pairs


class _Segments(NamedTuple):
    """S segments of KV that requests share; int64 arrays `[S]`."""

    first: Int64Array  # of its requests, which are neighbours
    num_rows: Int64Array  # of their query rows
    start: Int64Array  # KV position
    length: Int64Array  # tokens
    piece_len: Int64Array  # of the pieces that it is cut into


class SharedSegments:
    """Chooses the segments of KV, in elements of `kv_bytes`, that are read once for several requests: so that the
    whole pass is cheapest.

    With a `superblock` they are for deterministic attention: each has tokens of one superblock, and ends with it
    or at a multiple of 16, where others go on from its state.
    """

    def __init__(
        self, shape: KernelShape, kv_bytes: int, tuning: PlanTuning, superblock: int | None = None
    ) -> None:
        self._superblock = superblock
        self.rows_at_once = shape.shared_rows  # query rows that an item may have
        self._tuning = tuning
        num_programs = tuning.shared_programs_per_sm * shape.gpu.num_sms
        self._wave = num_programs / shape.num_kv_heads  # items that run side by side
        # Seconds of the whole card.
        costs, head_dim = tuning.costs, shape.head_dim
        self._token = 2 * shape.num_kv_heads * head_dim * kv_bytes / costs.bandwidth
        self._reread = self._token * costs.bandwidth / costs.reread_bandwidth
        # Of a token and a tile of rows, which takes as long if it has fewer.
        self._tile = 4 * shape.num_heads * head_dim * self.rows_at_once / costs.operations
        row_bytes = shape.num_heads * 4 * (head_dim + (1 if superblock is None else STATE_NUMBERS))
        self._partial = costs.partial_crossings * row_bytes / costs.bandwidth  # of a row
        self._item = costs.item * shape.num_kv_heads / num_programs

    def capacity(self, count: int, *, whole_tiles: bool = False) -> Capacity:
        """What plans of `count` query rows are to have room for; `whole_tiles`: also if all items have those."""
        wave, tuning = self._wave, self._tuning
        num_items = ceil(tuning.max_waves * wave)
        mean_partials = tuning.mean_partials * (1 if self._superblock is None else 2)  # one a superblock
        num_partials = max(mean_partials * count, ceil(wave) * min(count, self.rows_at_once))
        return Capacity(num_items + whole_tiles * (num_partials // self.rows_at_once), num_partials)

    def find(
        self,
        req_to_token: Int32Array,
        req_pool_indices: Int32Array,
        lens: Int32Array,
        *,
        query_rows: tuple[Int32Array, Int32Array] | None = None,
        capacity: Capacity,
    ) -> tuple[Int32Array, SharedItems]:
        """Find what requests share, whatever their order.

        Args:
            req_to_token: int32 `[max_requests, max_context_len]`, contiguous: position to slot. Rows that have
                the same slot at a position have the same slots before it.
            req_pool_indices: `[R]`, the row of each request.
            lens: `[R]`, its first tokens that may be shared: all but the last of a decode, or an extend's prefix.
            query_rows: `[R]` each, of extends, which read by themselves in whole tiles: the first query row of
                each, and how many it has, at least one if it has tokens. None: request r is row r alone.
            capacity: what the items may need at most; partial results of tails are not counted.

        Returns `tail_starts` int32 `[R]`, the position from which on a request reads by itself, and the items that
        hold all positions before it once for each of its query rows, those that take longest first, and those of
        the same tokens side by side. No items where a plan without them is as cheap.
        """
        tail_starts = np.zeros(len(req_pool_indices), np.int32)
        live = (lens > 0).nonzero()[0]
        slots = req_to_token.reshape(-1)
        offsets = req_pool_indices[live].astype(np.int64) * req_to_token.shape[1]
        if not offsets.size:
            return tail_starts, NOTHING_SHARED
        order, common = depth_first(slots, offsets, lens[live].astype(np.int64), self._tuning.max_stops)
        if not common.any():
            return tail_starts, NOTHING_SHARED
        tree = SlotTree.of(common)
        requests = live[order]
        first_query, separate = self._query_rows(query_rows and query_rows[1][requests], len(requests))
        ends = tree.firsts + tree.sizes
        sizes = first_query[ends] - first_query[tree.firsts]
        read_separately = separate[ends] - separate[tree.firsts]
        kept = self._worthwhile(tree, sizes, read_separately)
        kept = self._within(tree, kept, sizes, read_separately, capacity)
        each = separate[1:] - separate[:-1]
        if self._superblock is not None:
            found = self._in_superblocks(tree, kept, first_query, each, capacity)
        else:
            found = self._in_pieces(tree, kept, first_query, each, capacity, float(lens.sum()))
        if found is None:
            return tail_starts, NOTHING_SHARED
        tails, segments = found
        tail_starts[requests] = tails
        queries = requests if query_rows is None else pairs(*(of[requests] for of in query_rows))[1]
        return tail_starts, self._items(segments, requests, req_pool_indices, first_query, queries)

    def _in_pieces(
        self,
        tree: SlotTree,
        kept: BoolArray,
        first_query: Int64Array,
        read_separately: Float64Array,
        capacity: Capacity,
        num_tokens: float,
    ) -> tuple[Int64Array, _Segments] | None:
        """Where each of the R requests of `tree`, which have `num_tokens` in all, reads by itself from, `[R]`, and
        the segments that the `kept` nodes `[N]` share; None where it is not worth it.

        `first_query` `[R + 1]` and `read_separately` `[R]` are those of each request.
        """
        chosen = kept.nonzero()[0]
        if not chosen.size:
            return None
        first, end = tree.firsts[chosen], tree.firsts[chosen] + tree.sizes[chosen]
        rows = first_query[end] - first_query[first]
        start = np.append(tree.stops, 0)[tree.nearest_kept_ancestor(kept)[chosen]]
        length = tree.stops[chosen] - start
        tails = _read_before(first, end, length, len(first_query))
        own = self._token * (num_tokens - float(tails.sum()))
        piece_len, seconds = self._cut(length, rows, capacity, own)
        partials = int((first_query[1:] - first_query[:-1])[tails > 0].sum())
        if self._tuning.costs.launches + seconds + self._partial * partials >= float(tails @ read_separately):
            return None
        return tails, _Segments(first, rows, start, length, piece_len)

    def _in_superblocks(
        self,
        tree: SlotTree,
        kept: BoolArray,
        first_query: Int64Array,
        read_separately: Float64Array,
        capacity: Capacity,
    ) -> tuple[Int64Array, _Segments] | None:
        """The same, cut at all borders of superblocks.

        What a node has of its last superblock leaves a state, from which nodes below and tails go on. If all is
        more than there is room for, the first superblocks are shared.
        """
        size = self._superblock
        assert size is not None
        limit = int(tree.stops.max()) + 1
        while True:
            stops = np.minimum(tree.stops // 16 * 16, limit)
            kept = self._reachable(tree, kept, stops, size)
            chosen = kept.nonzero()[0]
            if not chosen.size:
                return None
            above = np.append(stops, 0)[tree.nearest_kept_ancestor(kept)[chosen]]
            first, end, stop = tree.firsts[chosen], tree.firsts[chosen] + tree.sizes[chosen], stops[chosen]
            of, nth = pairs(0, -(-stop // size) - above // size)
            start = np.where(nth == 0, above[of], (above[of] // size + nth) * size)
            length = np.minimum((above[of] // size + nth + 1) * size, stop[of]) - start
            rows = (first_query[end] - first_query[first])[of]
            tiles, share = self._tiles(rows)
            excess = max(int(tiles.sum()) / capacity.num_items, int(rows.sum()) / capacity.num_partials)
            if excess <= 1.0:
                break
            longest = int(stop.max())
            limit = min(int(longest / excess), longest - 1) // size * size
        tails = _read_before(first, end, stop - above, len(first_query))
        items, partials = int(tiles.sum()), int(rows.sum())
        work = float(length @ (share * tiles)) + items * self._item
        seconds = ceil(items / self._wave) * self._wave * work / items + self._partial * partials
        if self._tuning.costs.launches + seconds >= float(tails @ read_separately):
            return None
        return tails, _Segments(first[of], rows, start, length, length)

    def _reachable(self, tree: SlotTree, kept: BoolArray, stops: Int64Array, size: int) -> BoolArray:
        """Those of the `kept` nodes that end at `stops` after what is kept above them, without those that would go
        on from a state after `MAX_CHAIN` items that go on from each other.
        """
        kept = kept.copy()
        # Of the nearest kept node at or above each, with one for none: where it ends, and the items before its
        # state that go on from each other, and itself.
        ends, chain = np.zeros(len(kept) + 1, np.int64), np.zeros(len(kept) + 1, np.int64)
        for here in tree.levels:
            above, before = ends[tree.parents[here]], chain[tree.parents[here]]
            kept[here] &= (stops[here] > above) & (before < MAX_CHAIN)
            after = np.where(stops[here] // size > above // size, 0, before) + 1
            after[stops[here] % size == 0] = 0
            ends[:-1][here] = np.where(kept[here], stops[here], above)
            chain[:-1][here] = np.where(kept[here], after, before)
        return kept

    def _items(
        self,
        segments: _Segments,
        requests: Int64Array,
        req_pool_indices: Int32Array,
        first_query: Int64Array,
        queries: NDArray[np.integer[Any]],
    ) -> SharedItems:
        """Cut segments of `requests` in depth-first order into items, those that take longest first; the tiles of
        a piece are neighbours.
        """
        first, size, start, length, piece_len = segments
        tiles, share = self._tiles(size)
        height = -(-size // tiles)
        sort = (-(piece_len * share)).argsort(kind="stable")
        nth_segment, nth = pairs(0, (-(-length // piece_len) * tiles)[sort])
        segment = sort[nth_segment]
        nth_piece, nth_tile = np.divmod(nth, tiles[segment])
        piece_start, first_row = nth_piece * piece_len[segment], nth_tile * height[segment]
        return SharedItems(
            req_pool_indices=req_pool_indices[requests[first]][segment].astype(np.int32),
            starts=(start[segment] + piece_start).astype(np.int32),
            lens=np.minimum(piece_len[segment], length[segment] - piece_start).astype(np.int32),
            query_starts=(first_query[first][segment] + first_row).astype(np.int32),
            query_lens=np.minimum(height[segment], size[segment] - first_row).astype(np.int32),
            queries=queries.astype(np.int32),
        )

    def with_heads(
        self, req_pool_indices: Int32Array, tail_starts: Int32Array, head_lens: Int32Array, shared: SharedItems
    ) -> tuple[Int32Array, SharedItems]:
        """Read the first `head_lens` `[R]` tokens of long tails in items of one row each, beside the shared ones.

        The longest come first, as far as there is room, and short ones are left. Returns what `find` does.
        """
        capacity, piece_len = self.capacity(len(tail_starts)), self._tuning.head_piece
        longest = np.argsort(-head_lens, kind="stable")[: np.count_nonzero(head_lens >= self._tuning.min_head)]
        pieces = -(-head_lens[longest] // piece_len)
        left = min(capacity.num_items - len(shared.lens), capacity.num_partials - int(shared.query_lens.sum()))
        fit = np.count_nonzero(np.cumsum(pieces) <= left)
        if not fit:
            return tail_starts, shared
        longest = longest[:fit]
        nth_row, nth_piece = pairs(0, pieces[:fit])
        row, offset = longest[nth_row], nth_piece * piece_len
        queries = np.concatenate([shared.queries, np.setdiff1d(longest, shared.queries)])
        place = np.zeros_like(tail_starts)  # of each row among the queries
        place[queries] = np.arange(len(queries))
        heads = SharedItems(
            req_pool_indices=req_pool_indices[row],
            starts=tail_starts[row] + offset,
            lens=np.minimum(head_lens[row] - offset, piece_len),
            query_starts=place[row],
            query_lens=np.ones_like(nth_row),
            queries=queries[len(shared.queries) :].astype(np.int32),
        )
        tail_starts = tail_starts.copy()
        tail_starts[longest] += head_lens[longest]
        columns = zip(vars(shared).values(), vars(heads).values(), strict=True)
        return tail_starts, SharedItems(*(np.concatenate(both) for both in columns))

    def _query_rows(self, counts: Int32Array | None, num_requests: int) -> tuple[Int64Array, Float64Array]:
        """The number of query rows before each request and in all `[R + 1]`, and the sum of the seconds that they
        take for a token that each request reads by itself.
        """
        if counts is None:
            before: Int64Array = np.arange(num_requests + 1)
            return before, np.multiply(before, self._reread, dtype=np.float64)
        tiles = -(-counts.astype(np.int64) // self.rows_at_once)
        seconds: Float64Array = np.maximum(self._reread, tiles * self._tile)
        return np.append(0, counts.cumsum(dtype=np.int64)), np.append(0.0, seconds.cumsum())

    def _tiles(self, sizes: Int64Array) -> tuple[Int64Array, Float64Array]:
        """The items that share segments of so many rows, and the card's seconds that each item takes for a token:
        the L2 cache has what the first has read for the others.
        """
        tiles = -(-sizes // self.rows_at_once)
        return tiles, np.maximum(self._token, tiles * self._tile) / tiles

    def _worthwhile(self, tree: SlotTree, sizes: Int64Array, read_separately: Float64Array) -> BoolArray:
        """Choose the nodes `[N]` whose tokens are read once: the cheapest choice there is, waves aside.

        A node has `sizes` query rows, and its requests take `read_separately` seconds for a token that each reads
        by itself. This is a dynamic programme over the tree. If the nearest chosen node above node n ends at
        position a, the cheapest way to read what n and the nodes below it hold from a on costs

            cost(n, a) = min(skipped(n, a), chosen(n, a))
            skipped(n, a) = own(n) * (stop(n) - a) + sum over children c of cost(c, a)
            chosen(n, a) = shared(n) * (stop(n) - a) + partials(n) + items(n) + sum of cost(c, stop(n))

        where own(n) is what a token costs the requests of n that no child has, and shared(n) what it costs to read
        it once: the tokens of a node that is not chosen are read with those of its children. The first node that
        is chosen on a path adds the partial results of tails. Only stops of nodes above n, or 0, can be a: they
        make the columns of the tables, one a level, the first for 0. Both costs leave out own(n) * stop(n).
        """
        tiles, share = self._tiles(sizes)
        per_token = tiles * share
        own = read_separately - np.bincount(tree.parents + 1, read_separately, len(sizes) + 1)[1:]
        partials = self._partial * sizes
        fixed = partials + tiles * self._item + (per_token - own) * tree.stops
        starts = np.zeros((len(sizes), len(tree.levels) + 1))
        for level, here in enumerate(tree.levels[1:], 1):
            starts[here] = starts[tree.parents[here]]
            starts[here, level] = tree.stops[tree.parents[here]]
        skipped = -own[:, None] * starts
        chosen = fixed[:, None] - per_token[:, None] * starts
        chosen[:, 0] += partials
        is_chosen = np.zeros(starts.shape, bool)
        is_first = np.ones(len(sizes), bool)
        np.not_equal(tree.parents[1:], tree.parents[:-1], out=is_first[1:])
        for level in reversed(range(len(tree.levels))):
            here = tree.levels[level]
            np.less(chosen[here], skipped[here], out=is_chosen[here])
            if level:
                runs = is_first[here].nonzero()[0]
                above = tree.parents[here][runs]
                sums = np.add.reduceat(np.minimum(chosen[here], skipped[here]), runs)
                skipped[above] += sums
                chosen[above] += sums[:, level, None]
        column = np.zeros(len(sizes), np.int64)
        kept = is_chosen[:, 0].copy()
        for level, here in enumerate(tree.levels[1:], 1):
            above = tree.parents[here]
            column[here] = np.where(kept[above], level, column[above])
            kept[here] = is_chosen[here][np.arange(here.stop - here.start), column[here]]
        return kept

    def _within(
        self, tree: SlotTree, kept: BoolArray, sizes: Int64Array, read_separately: Float64Array, capacity: Capacity
    ) -> BoolArray:
        """Those of the `kept` nodes `[N]` that save most within the capacity; arguments as in `_worthwhile`."""
        tiles, share = self._tiles(sizes)
        if tiles[kept].sum() <= capacity.num_items and sizes[kept].sum() <= capacity.num_partials:
            return kept
        chosen = kept.nonzero()[0]
        size, tile, per_token = sizes[chosen], tiles[chosen], (tiles * share)[chosen]
        above = tree.nearest_kept_ancestor(kept)[chosen]
        # A token's cost if rows of a node's chosen children read it together, the others by themselves.
        otherwise = np.append(read_separately, 0.0)
        np.add.at(otherwise, above, per_token - read_separately[chosen])
        tokens = tree.stops[chosen] - np.append(tree.stops, 0)[above]
        saving = tokens * (otherwise[chosen] - per_token) - size * self._partial - tile * self._item
        ranks = np.argsort(-saving, kind="stable")
        fits = np.cumsum(tile[ranks]) <= capacity.num_items
        fits &= np.cumsum(size[ranks]) <= capacity.num_partials
        within = np.zeros_like(kept)
        within[chosen[ranks[fits]]] = True
        return within

    def _cut(
        self, lens: Int64Array, sizes: Int64Array, capacity: Capacity, own: float
    ) -> tuple[Int64Array, float]:
        """Choose the tokens of a piece for each segment `[S]`; also return the seconds that all items take.

        The candidates cut the segment of the highest cost into one piece, two, ..., and the others into pieces of
        about the same cost. The one whose waves end first wins, of those within the capacity, as uncut segments
        are. What requests read by themselves, in `own` seconds, is read at the same time: where that takes longer,
        it gets some of the programs.
        """
        tuning, wave = self._tuning, self._wave
        tiles, share = self._tiles(sizes)
        cost = lens * share
        total, max_cost = float(cost @ tiles), float(cost.max())
        max_pieces = min(tuning.max_pieces, max(1, int(tuning.max_waves * wave * max_cost / total)))
        piece_len = np.ceil(lens / np.ceil(cost * (np.arange(1.0, max_pieces + 1)[:, None] / max_cost) - 1e-9))
        piece_len = np.maximum(np.ceil(piece_len / tuning.piece_tokens) * tuning.piece_tokens, tuning.min_piece)
        parts = np.ceil(lens / piece_len)
        items, partials = parts @ tiles, parts @ sizes
        work = items * self._item + total
        longest = self._item + (np.minimum(piece_len, lens) * share).max(1)

        def seconds(wave: float) -> Float64Array:
            waves = np.ceil(items / wave) * wave
            taken: Float64Array = np.maximum(waves * work / items, wave * longest) + self._partial * partials
            return taken

        chosen_by = seconds(max(1, (1 - tuning.spare_programs) * wave // 1) if own > total else wave)
        chosen_by[(items > capacity.num_items) | (partials > capacity.num_partials)] = np.inf
        best = int(chosen_by.argmin())
        return piece_len[best].astype(np.int64), float(seconds(wave)[best])


def _read_before(first: Int64Array, end: Int64Array, length: Int64Array, count: int) -> Int64Array:
    """How many tokens requests have in segments of those from `first` to `end`, exclusively: `[count - 1]`."""
    begun = np.bincount(first, length, count)
    before: Int64Array = (begun - np.bincount(end, length, count))[:-1].cumsum().astype(np.int64)
    return before
