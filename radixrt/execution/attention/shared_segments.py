"""SharedSegments: finds the KV that requests share in their slots, and chooses which of it is read once."""

from __future__ import annotations

from math import ceil

import numpy as np

from radixrt.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.pass_plans import Capacity
from radixrt.execution.attention.slot_tree import SlotTree, depth_first
from radixrt.execution.attention.tuning import PlanTuning
from triton_ops.attention.ordered import STATE_NUMBERS
from triton_ops.attention.plan import NOTHING_SHARED, SharedItems, pairs


class SharedSegments:
    """Chooses the segments of KV, in elements of `kv_bytes`, that are read once for several requests: so that the
    whole pass is cheapest.

    With a `superblock` they are for deterministic attention: each has tokens of one superblock, from its beginning
    on, and ends with it or at a multiple of 16.
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
        if self._superblock is not None:
            each = separate[1:] - separate[:-1]
            return self._in_superblocks(tree, kept, requests, req_pool_indices, each, capacity)
        chosen = kept.nonzero()[0]
        if not chosen.size:
            return tail_starts, NOTHING_SHARED
        first, size = tree.firsts[chosen], sizes[chosen]
        start = np.append(tree.stops, 0)[tree.nearest_kept_ancestor(kept)[chosen]]
        length = tree.stops[chosen] - start
        begun = np.bincount(first, length, len(requests) + 1)
        tails = (begun - np.bincount(ends[chosen], length, len(requests) + 1))[:-1].cumsum()
        own = self._token * float(lens.sum() - tails.sum())
        piece_len, seconds = self._cut(length, size, capacity, own)
        saved = float(tails @ (separate[1:] - separate[:-1]))
        partials = int((first_query[1:] - first_query[:-1])[tails > 0].sum())
        if self._tuning.costs.launches + seconds + self._partial * partials >= saved:
            return tail_starts, NOTHING_SHARED
        tail_starts[requests] = tails

        tiles, share = self._tiles(size)
        height = -(-size // tiles)
        sort = (-(piece_len * share)).argsort(kind="stable")
        nth_segment, nth = pairs(0, (-(-length // piece_len) * tiles)[sort])
        segment = sort[nth_segment]
        nth_piece, nth_tile = np.divmod(nth, tiles[segment])
        piece_start, first_row = nth_piece * piece_len[segment], nth_tile * height[segment]
        queries = requests if query_rows is None else pairs(*(each[requests] for each in query_rows))[1]
        return tail_starts, SharedItems(
            req_pool_indices=req_pool_indices[requests[first]][segment].astype(np.int32),
            starts=(start[segment] + piece_start).astype(np.int32),
            lens=np.minimum(piece_len[segment], length[segment] - piece_start).astype(np.int32),
            query_starts=(first_query[first][segment] + first_row).astype(np.int32),
            query_lens=np.minimum(height[segment], size[segment] - first_row).astype(np.int32),
            queries=queries.astype(np.int32),
        )

    def _in_superblocks(
        self,
        tree: SlotTree,
        kept: BoolArray,
        requests: Int64Array,
        req_pool_indices: Int32Array,
        saved: Float64Array,
        capacity: Capacity,
        limit: int | None = None,
    ) -> tuple[Int32Array, SharedItems]:
        """What `find` returns, of the `kept` nodes `[N]` of `requests` in depth-first order, of one row each, that
        save so many seconds a token each. A node's rows share the superblocks that end within it. What it has of
        the next one is shared by those rows that no node below shares more with. Nothing is shared from position
        `limit` on: if all is more than there is room for, the first superblocks are.
        """
        size, tail_starts = self._superblock, np.zeros(len(req_pool_indices), np.int32)
        assert size is not None
        stops = tree.stops // 16 * 16 if limit is None else np.minimum(tree.stops // 16 * 16, limit)
        kept = kept & (stops > np.append(stops, 0)[tree.nearest_kept_ancestor(kept)])
        chosen = kept.nonzero()[0]
        above = np.append(stops, 0)[tree.nearest_kept_ancestor(kept)[chosen]]
        first, count, stop = tree.firsts[chosen], tree.sizes[chosen], stops[chosen]
        # The last of the nodes that have a row is the lowest one: they come level by level.
        node, row = pairs(first.astype(np.int32), count)
        lowest = np.full(len(requests), -1)
        lowest[row] = node
        # In this order, a node before those below it, its rows are neighbours, and those that it is the lowest of
        # come first.
        rank = np.empty(len(chosen) + 1, np.int64)
        rank[np.lexsort((-count, first))] = np.arange(len(chosen))
        rank[-1] = len(chosen)
        by_node = rank[lowest].argsort(kind="stable")
        begins = np.searchsorted(rank[lowest][by_node], np.arange(len(chosen) + 1))
        first, own = begins[rank[:-1]], np.diff(begins)[rank[:-1]]
        open_rows = np.where(stop % size > 0, own, 0)

        closed = stop // size - above // size
        of, nth = pairs(0, closed)
        opens = open_rows.nonzero()[0]
        start = np.concatenate([(above[of] // size + nth) * size, stop[opens] // size * size])
        length = np.concatenate([np.full(len(of), size), stop[opens] % size])
        rows = np.concatenate([count[of], open_rows[opens]])
        place = np.concatenate([first[of], first[opens]])
        tiles, share = self._tiles(rows)
        items, partials = int(tiles.sum()), int(rows.sum())
        tails = np.where(lowest >= 0, np.append(stop, 0)[lowest], 0)
        if not items:
            return tail_starts, NOTHING_SHARED
        excess = max(items / capacity.num_items, partials / capacity.num_partials)
        if excess > 1.0:
            longest = int(stop.max())
            limit = min(int(longest / excess), longest - 1) // size * size
            return self._in_superblocks(tree, kept, requests, req_pool_indices, saved, capacity, limit)
        work = float(length @ (share * tiles)) + items * self._item
        seconds = ceil(items / self._wave) * self._wave * work / items + self._partial * partials
        if self._tuning.costs.launches + seconds >= float(tails @ saved):
            return tail_starts, NOTHING_SHARED
        tail_starts[requests] = tails
        height = -(-rows // tiles)
        sort = (-(length * share)).argsort(kind="stable")
        nth_segment, nth_tile = pairs(0, tiles[sort])
        segment = sort[nth_segment]
        first_row = nth_tile * height[segment]
        queries = requests[by_node].astype(np.int32)
        return tail_starts, SharedItems(
            req_pool_indices=req_pool_indices[queries[place]][segment].astype(np.int32),
            starts=start[segment].astype(np.int32),
            lens=length[segment].astype(np.int32),
            query_starts=(place[segment] + first_row).astype(np.int32),
            query_lens=np.minimum(height[segment], rows[segment] - first_row).astype(np.int32),
            queries=queries,
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
