"""AttentionPlan and ExtendPlan: which segments of KV the query rows of a pass read, and how the results merge.

Plans are built on the host, in numpy (`AttentionPlan[Int32Array]`), and copied to the device (`AttentionPlan`, of
tensors): `arrays` lists what to copy, `with_arrays` is the plan of the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Array = TypeVar("Array", default=Tensor)
    Other = TypeVar("Other", default=Tensor)
else:
    from typing import TypeVar

    Array, Other = TypeVar("Array"), TypeVar("Other")

EMPTY_ROWS = 8  # that one program fills with zeros: more would take it longer than others read
LENGTH_CLASSES = 8  # of items that may be neighbours for the KV that they share

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class SharedItems:
    """Segments of KV that several query rows read, in numpy, int32. Of S items with Q rows in all:

    - `req_pool_indices` [S]: the line of `req_to_token` that names the segment's slots (any member's),
    - `starts`, `lens` [S]: KV positions and tokens,
    - `query_starts`, `query_lens` [S]: item i is read by the query rows
      `queries[query_starts[i] : query_starts[i] + query_lens[i]]`,
    - `queries` [Q]: query rows, in any order.
    """

    req_pool_indices: Int32Array
    starts: Int32Array
    lens: Int32Array
    query_starts: Int32Array
    query_lens: Int32Array
    queries: Int32Array


_NONE = np.zeros(0, np.int32)
NOTHING_SHARED = SharedItems(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True)
class SharingPlan(Generic[Array]):
    """Segments of KV that several query rows read, and how results merge: common to all plans.

    A plan has items of its own, too, of KV that a request reads by itself. The result of a query row is the merge,
    by log-sum-exp, of the partial results of all items that cover it, in any order.

    Plans for ordered attention have a `superblock` (0 in others). An item that begins within one *goes on* from
    the state in which the item before it left each of its rows; that state is no result of the row then.

    All other fields are int32, tensors on the device of the pass or numpy arrays. Of S shared items with Q rows in
    all, R query rows, P partial results:

    - `shared_req_pool_indices`, `shared_starts`, `shared_lens`, `shared_query_starts`, `shared_query_lens` [S] and
      `shared_queries` [Q]: as in `SharedItems`; an item without rows costs next to nothing,
    - `shared_partials` [S]: the number of its first row's partial result, the others' follow,
    - `shared_sources` [S] and `item_sources`, of the plan's own items, or without a `superblock` both [0]: the
      number of the state from which an item's first row goes on, the others' follow; -1: it begins from nothing,
    - `shared_levels` [S] or [0]: how many items in a row go on from each other before a shared one,
    - `row_partial_starts` [R + 1] or, where nothing merges so, [0]; `row_partials` [P]: row r is merged from the
      partial results `row_partials[row_partial_starts[r] : row_partial_starts[r + 1]]`,
    - `seq_lens` [R]: the tokens up to each row's own position, with it.
    """

    superblock: int
    shared_req_pool_indices: Array
    shared_starts: Array
    shared_lens: Array
    shared_query_starts: Array
    shared_query_lens: Array
    shared_queries: Array
    shared_partials: Array
    shared_sources: Array
    shared_levels: Array
    item_sources: Array
    row_partial_starts: Array
    row_partials: Array
    seq_lens: Array

    def arrays(self) -> tuple[Array, ...]:
        """All arrays, in the order of the fields."""
        return tuple(value for value in vars(self).values() if not isinstance(value, int))

    def _with_arrays(self, arrays: Iterator[Any]) -> dict[str, Any]:
        """All fields by name, with these arrays in place of `arrays()`."""
        return {name: value if isinstance(value, int) else next(arrays) for name, value in vars(self).items()}


@dataclass(frozen=True)
class AttentionPlan(SharingPlan[Array]):
    """The work items of a pass's decode attention.

    A query row is a decode request of the pass, in batch order (row 0 is the first decode). There are two groups
    of items, for a kernel each: narrow ones, each of a contiguous range of rows (usually one: its own context, or
    the tail of it), and shared ones, each of a list of rows; a flat plan has none of these.

    The fields of `SharingPlan`, and of N narrow items, int32 too:

    - `item_req_pool_indices` [N]: a row of `req_to_token` that names the segment's slots,
    - `item_starts` [N]: the first KV position of the segment,
    - `item_lens` [N]: its number of tokens (0: the item adds nothing),
    - `item_query_starts`, `item_query_lens` [N]: the query rows that read it,
    - `item_partials` [N]: the number of its first row's partial result, the others' follow; -1 where no other
      narrow item covers its rows, and no shared one either or it has one row: it writes their results,
    - `tail_partial_starts` [R + 1] or, where nothing is taken in, [0]: such an item of row r takes in the partial
      results `row_partials[tail_partial_starts[r] : tail_partial_starts[r + 1]]` of shared items.
    """

    item_req_pool_indices: Array
    item_starts: Array
    item_lens: Array
    item_query_starts: Array
    item_query_lens: Array
    item_partials: Array
    tail_partial_starts: Array

    def with_arrays(self, arrays: Iterator[Other]) -> AttentionPlan[Other]:
        """This plan with the next of these in place of its own `arrays()`."""
        return AttentionPlan(**self._with_arrays(arrays))

    def to(self, device: torch.device) -> AttentionPlan:
        """A copy of a host plan, array by array: handy, not fast."""
        return self.with_arrays(torch.tensor(array, device=device) for array in self.arrays())

    @staticmethod
    def of_items(
        req_pool_indices: ArrayLike,
        starts: ArrayLike,
        lens: ArrayLike,
        query_starts: ArrayLike,
        query_lens: ArrayLike,
        seq_lens: ArrayLike,
        shared: SharedItems = NOTHING_SHARED,
        *,
        superblock: int | None = None,
    ) -> AttentionPlan[Int32Array]:
        """The host plan of these narrow items and the shared ones. Rows that no item covers get empty narrow ones,
        of up to EMPTY_ROWS in a run each. A row's lists of partial results ascend by where the items start.

        Raises ValueError where the items' arrays differ in length, or an item's rows are not of the batch; with a
        `superblock`, where an item begins within one and its rows have no neighbouring states to go on from.
        """
        seq = np.asarray(seq_lens, np.int32)
        items = np.array([req_pool_indices, starts, lens, query_starts, query_lens], np.int32)
        first, count = items[3], items[4]
        if items.size and (first.min() < 0 or count.min() < 0 or (first + count).max() > seq.size):
            raise ValueError(f"an item's query rows must be among the {seq.size} of the batch")
        covered = _covered(first, count, shared, seq.size)
        bare = np.flatnonzero(covered == 0)
        if bare.size:
            places = np.arange(bare.size)
            runs = np.maximum.accumulate(np.where(np.diff(bare, prepend=-2) > 1, places, 0))
            begins = np.flatnonzero((places - runs) % EMPTY_ROWS == 0)
            empty = np.zeros((5, begins.size), np.int32)
            empty[3], empty[4] = bare[begins], np.diff(begins, append=bare.size)
            items = np.concatenate([items, empty], 1)
        names = ("item_req_pool_indices", "item_starts", "item_lens", "item_query_starts", "item_query_lens")
        columns: dict[str, Any] = dict(zip(names, items, strict=True))
        return AttentionPlan(
            **columns,
            **_merging(items[3], items[4], items[1], shared, covered, with_tails=True, superblock=superblock),
            seq_lens=seq,
        )

    @staticmethod
    def flat(
        req_pool_indices: ArrayLike,
        seq_lens: ArrayLike,
        *,
        max_item_len: int | None = None,
        sliding_window: int | None = None,
        req_to_token: Int32Array | None = None,
        superblock: int | None = None,
    ) -> AttentionPlan[Int32Array]:
        """The host plan without sharing: each request's own context, the longest items first.

        Contexts longer than `max_item_len` are cut into items of about the same length (None: one item a request);
        with `sliding_window` they begin where the window does. A `seq_len` of 0 marks a padded row. With the
        host's `req_to_token`, items of about the same length that begin at the same slot are neighbours: the L2
        cache has their KV for all but the first.

        With a `superblock` the plan is for `ordered_decode`: contexts longer than `max_item_len` are cut at all
        its multiples, and windows are read from a multiple of 16 on.
        """
        rows, seq = np.asarray(req_pool_indices, np.int32), np.asarray(seq_lens, np.int32)
        begin = np.zeros_like(seq) if sliding_window is None else _clipped(seq, sliding_window)
        query, start, length = _longest_first(begin, seq, max_item_len, superblock)
        if req_to_token is not None and length.size:
            alike = length // max(int(length.max()) // LENGTH_CLASSES, 1)
            first = req_to_token[rows[query], np.minimum(start, req_to_token.shape[1] - 1)]
            order = _neighbours((alike.astype(np.int64) << 32) + first)
            query, start, length = query[order], start[order], length[order]
        return AttentionPlan.of_items(
            rows[query], start, length, query, np.ones_like(query), seq, superblock=superblock
        )

    @staticmethod
    def tree(
        req_pool_indices: ArrayLike,
        seq_lens: ArrayLike,
        tail_starts: ArrayLike,
        shared: SharedItems,
        *,
        max_item_len: int | None = None,
        superblock: int | None = None,
    ) -> AttentionPlan[Int32Array]:
        """The host plan in which each request reads its positions from `tail_starts` `[R]` on by itself, and those
        before in the `shared` items that have its rows: the caller sees to it that they hold each of them once.

        Tails are cut as contexts in `flat`, the longest items first. A `seq_len` of 0 marks a padded row.
        """
        rows, seq = np.asarray(req_pool_indices, np.int32), np.asarray(seq_lens, np.int32)
        query, start, length = _longest_first(np.asarray(tail_starts, np.int32), seq, max_item_len, superblock)
        return AttentionPlan.of_items(
            rows[query], start, length, query, np.ones_like(query), seq, shared, superblock=superblock
        )


@dataclass(frozen=True)
class ExtendPlan(SharingPlan[Array]):
    """The work items of a pass's extend attention.

    An item is a tile of at most `tile_tokens` (a number that the host knows) successive new tokens of one request,
    and a segment of the KV positions that they read. A query row is a new token, numbered as in the pass. The
    fields of `SharingPlan`, of which `seq_lens` is [0] where nothing is shared, and of N items, int32 too:

    - `item_requests` [N]: the request, numbered as in the batch,
    - `item_query_starts` [N]: the tile's first token, counted from the first new token of the request,
    - `item_starts`, `item_lens` [N]: the KV positions, of which a token reads those up to its own,
    - `item_partials` [N]: the number of the tile's first token's partial result, or -1.
    """

    tile_tokens: int
    item_requests: Array
    item_query_starts: Array
    item_starts: Array
    item_lens: Array
    item_partials: Array

    def with_arrays(self, arrays: Iterator[Other]) -> ExtendPlan[Other]:
        """This plan with the next of these in place of its own `arrays()`."""
        return ExtendPlan(**self._with_arrays(arrays))

    def to(self, device: torch.device) -> ExtendPlan:
        """A copy of a host plan, array by array: handy, not fast."""
        return self.with_arrays(torch.tensor(array, device=device) for array in self.arrays())

    @staticmethod
    def of_extends(
        prefix_lens: ArrayLike,
        extend_start_loc: ArrayLike,
        extend_seq_lens: ArrayLike,
        *,
        tile_tokens: int,
        max_item_len: int | None = None,
        sliding_window: int | None = None,
        tail_starts: ArrayLike | None = None,
        shared: SharedItems = NOTHING_SHARED,
        superblock: int | None = None,
    ) -> ExtendPlan[Int32Array]:
        """The host plan, the items that read most first.

        KV longer than `max_item_len` is cut into items of about the same length (None: one item a tile); with
        `sliding_window` it begins where the window of the tile's first token does. `tail_starts` `[B]`, at most
        the `prefix_lens`, and `shared` are as in `AttentionPlan.tree`, `superblock` as in `AttentionPlan.flat`.

        Raises ValueError where the rows of a shared item are not of the pass.
        """
        prefix, extend = np.asarray(prefix_lens, np.int32), np.asarray(extend_seq_lens, np.int32)
        loc = np.asarray(extend_start_loc, np.int32)
        num_rows = int((loc + extend).max(initial=0))
        request, nth = pairs(0, -(-extend // tile_tokens))
        first = nth * tile_tokens
        tokens = np.minimum(extend[request] - first, tile_tokens)
        position = prefix[request] + first
        begin = np.zeros_like(first) if tail_starts is None else np.asarray(tail_starts, np.int32)[request]
        if sliding_window is not None:
            begin = np.maximum(begin, _clipped(position + 1, sliding_window))
        most: int | Int32Array | None = max_item_len
        if superblock is not None and shared.req_pool_indices.size:
            # What merges with shared items is cut, too: a state has keys of one superblock.
            most = np.where(begin > 0, 0, np.iinfo(np.int32).max if max_item_len is None else max_item_len)
        tile, start, length = _longest_first(begin, position + tokens, most, superblock)

        first_row, count = (loc[request] + first)[tile], tokens[tile]
        covered = _covered(first_row, count, shared, num_rows)
        seq_lens = _NONE
        if shared.req_pool_indices.size:
            of, row = pairs(loc, extend)
            seq_lens = np.zeros(num_rows, np.int32)
            seq_lens[row] = row + (prefix - loc + 1)[of]
        return ExtendPlan(
            tile_tokens=tile_tokens,
            item_requests=request[tile],
            item_query_starts=first[tile],
            item_starts=start,
            item_lens=length,
            **_merging(first_row, count, start, shared, covered, with_tails=False, superblock=superblock),
            seq_lens=seq_lens,
        )


def _covered(first: Int32Array, count: Int32Array, shared: SharedItems, num_rows: int) -> NDArray[np.int64]:
    """How many items cover each query row `[num_rows]`: shared ones, and those of `count` rows from `first` on.

    Raises ValueError where a shared item's rows are not of the batch.
    """
    begins, ends = (np.bincount(rows, minlength=num_rows + 1) for rows in (first, first + count))
    covered: NDArray[np.int64] = np.cumsum(begins - ends)[:num_rows]
    if shared.req_pool_indices.size:
        rows = _rows_of(shared)
        if rows.size and not 0 <= rows.min() <= rows.max() < num_rows:
            raise ValueError(f"a shared item's query rows must be among the {num_rows} of the batch")
        covered += np.bincount(rows, minlength=num_rows)
    return covered


def _rows_of(shared: SharedItems) -> Int32Array:
    """Those of all items."""
    return shared.queries[pairs(shared.query_starts, shared.query_lens)[1]]


def _merging(
    first: Int32Array,
    count: Int32Array,
    begin: Int32Array,
    shared: SharedItems,
    covered: NDArray[np.int64],
    *,
    with_tails: bool,
    superblock: int | None,
) -> dict[str, Any]:
    """The fields that say how results merge: `item_partials` of items with `count` query rows from `first` on,
    whose keys start at `begin`, and those of a `SharingPlan` but `seq_lens`. `with_tails`: an item of one row that
    no other item covers, but for shared ones, takes in what these computed; there is `tail_partial_starts`, too.

    Partial results are numbered in the order of the items, those of the shared ones after the others.
    """
    num_rows = covered.size
    several = np.append(0, np.cumsum(covered > 1))  # rows, of those before each, that merge
    alone = several[first + count] == several[first]
    shared_rows = _rows_of(shared)
    taken = np.zeros(num_rows, np.int32)
    takers = _NONE
    if with_tails and shared_rows.size:
        by_others = covered - np.bincount(shared_rows, minlength=num_rows)
        takes = (count == 1) & (by_others[np.minimum(first, num_rows - 1)] == 1)
        takers = np.flatnonzero(takes).astype(np.int32)
        taken[first[takers]] = 1
        alone |= takes
    partial_counts = np.where(alone, 0, count)
    partials = np.cumsum(partial_counts, dtype=np.int32) - partial_counts
    item, own_rows = pairs(first, partial_counts)
    rows = np.concatenate([own_rows, shared_rows])
    num_own, num_partials = own_rows.size, own_rows.size + shared_rows.size
    begins = np.concatenate([begin[item], np.repeat(shared.starts, shared.query_lens)])
    rows += num_rows * taken[rows]  # lists of rows that are taken in come after the others
    shared_partials = num_own + np.cumsum(shared.query_lens, dtype=np.int32) - shared.query_lens
    results: NDArray[np.integer[Any]]
    item_sources = shared_sources = shared_levels = _NONE
    if superblock is None:
        results = np.lexsort((begins, rows))
    else:
        # Items that take results in have none of their own, but go on from a state like others.
        chains = _Chains.of(
            np.append(rows, first[takers] + num_rows), np.append(begins, begin[takers]), superblock
        )
        numbers = np.where(alone, num_partials, partials)
        numbers[takers] += np.arange(takers.size, dtype=np.int32)
        item_sources = chains.sources_of(
            numbers, np.where(alone, 0, count) + np.isin(np.arange(count.size), takers)
        )
        shared_sources = chains.sources_of(shared_partials, shared.query_lens)
        shared_levels = chains.levels[np.where(shared.query_lens > 0, shared_partials, 0)]
        results = chains.results[chains.results < num_partials]
    starts = np.zeros(2 * num_rows + 1, np.int32)
    np.cumsum(np.bincount(rows[results], minlength=2 * num_rows), out=starts[1:])
    # As long as there are partial results, as is the memory for them.
    row_partials = np.zeros(num_partials, np.int32)
    row_partials[: results.size] = results
    merging: dict[str, Any] = {
        "superblock": superblock or 0,
        "item_partials": np.where(alone, -1, partials).astype(np.int32),
        "item_sources": item_sources,
        **{f"shared_{name}": array for name, array in vars(shared).items()},
        "shared_partials": shared_partials,
        "shared_sources": shared_sources,
        "shared_levels": shared_levels,
        "row_partial_starts": starts[: num_rows + 1] if starts[num_rows] else _NONE,
        "row_partials": row_partials,
    }
    if with_tails:
        merging["tail_partial_starts"] = starts[num_rows:] if starts[num_rows] < starts[-1] else _NONE
    return merging


@dataclass(frozen=True)
class _Chains:
    """Which of n states go on from which others, int32: the one before of the same row, within a superblock.

    - `sources` [n]: the state that each goes on from, or -1,
    - `levels` [n]: how many come before it in its chain,
    - `results`: the last ones of all chains, by row, ascending.
    """

    sources: Int32Array
    levels: Int32Array
    results: Int32Array

    @classmethod
    def of(cls, rows: Int32Array, begins: Int32Array, superblock: int) -> _Chains:
        """Of states of these `rows` [n], whose keys begin at `begins` [n]."""
        order = np.lexsort((begins, rows)).astype(np.int32)
        places = np.arange(order.size, dtype=np.int32)
        goes_on = begins[order] % superblock > 0
        goes_on &= np.diff(rows[order], prepend=-1) == 0
        next_ones = np.flatnonzero(goes_on)
        sources, levels = np.full(order.size, -1, np.int32), np.empty(order.size, np.int32)
        sources[order[next_ones]] = order[next_ones - 1]
        levels[order] = places - np.maximum.accumulate(np.where(goes_on, 0, places))
        is_result = np.ones(order.size, bool)
        is_result[next_ones - 1] = False
        return cls(sources, levels, order[is_result])

    def sources_of(self, numbers: Int32Array, counts: Int32Array) -> Int32Array:
        """The source of the first of `counts` [S] states that are numbered from `numbers` [S] on; -1 of none.

        Raises ValueError where those of the others do not follow it.
        """
        found = np.where(counts > 0, np.append(self.sources, -1)[np.where(counts > 0, numbers, -1)], -1)
        item, number = pairs(numbers, counts)
        expected = np.where(found[item] < 0, -1, found[item] + number - numbers[item])
        if not np.array_equal(self.sources[number], expected):
            raise ValueError("the rows of an item go on from states that are not neighbours")
        return found.astype(np.int32)


def pairs(first: Int32Array | int, count: NDArray[np.integer[Any]]) -> tuple[Int32Array, Int32Array]:
    """All pairs (i, first[i] + j) with j below count[i], in order: two arrays."""
    index = np.repeat(np.arange(count.size, dtype=np.int32), count)
    offset = np.cumsum(count, dtype=np.int32) - count
    return index, np.arange(index.size, dtype=np.int32) + (first - offset)[index]


def _neighbours(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order in which equal keys are neighbours, each group where its first one is."""
    ranked = np.sort(keys)
    is_new = np.ones(keys.size, bool)
    np.not_equal(ranked[1:], ranked[:-1], out=is_new[1:])
    if is_new.all():
        return np.arange(keys.size)
    order = keys.argsort(kind="stable")  # takes longer
    firsts: NDArray[np.int64] = order[is_new][is_new.cumsum() - 1]
    grouped: NDArray[np.int64] = order[firsts.argsort(kind="stable")]
    return grouped


def _clipped(ends: Int32Array, window: int) -> Int32Array:
    """Where windows that end there begin: 0 where they are longer than what there is."""
    return np.maximum(ends - min(window, np.iinfo(np.int32).max), 0)


def _longest_first(
    begin: Int32Array, end: Int32Array, max_len: int | Int32Array | None, superblock: int | None
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The pieces that `_cut` or `_cut_at_superblocks` makes, but for those of no tokens."""
    if superblock is None:
        assert not isinstance(max_len, np.ndarray)
        index, start, length = _cut(begin, end, max_len)
    else:
        index, start, length = _cut_at_superblocks(begin // 16 * 16, end, max_len, superblock)
    order = np.argsort(-length, kind="stable")[: np.count_nonzero(length)]
    return index[order], start[order], length[order]


def _cut(begin: Int32Array, end: Int32Array, max_len: int | None) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Each range [begin, end) in the fewest pieces of at most `max_len`: index, start and length of each piece.

    A range's pieces are of the same length, a multiple of 64 where `max_len` is, but for the last.
    """
    length = end - begin
    if max_len is None or length.max(initial=0) <= max_len:
        return np.arange(length.size, dtype=np.int32), begin, length
    pieces = np.maximum(-(-length // max_len), 1)
    step = -(-length // pieces)
    if max_len % 64 == 0:
        step = -(-step // 64) * 64
    index, nth = pairs(0, pieces)
    start = begin[index] + nth * step[index]
    return index, start, np.clip(end[index] - start, 0, step[index])


def _cut_at_superblocks(
    begin: Int32Array, end: Int32Array, max_len: int | Int32Array | None, superblock: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Each range [begin, end), cut at all multiples of `superblock` if it is longer than `max_len`: as `_cut`."""
    first = begin // superblock
    pieces = np.ones_like(begin)
    if max_len is not None:
        pieces = np.where(end - begin > max_len, np.maximum(-(-end // superblock) - first, 1), 1)
    index, nth = pairs(0, pieces)
    start = np.where(nth == 0, begin[index], (first[index] + nth) * superblock)
    stop = np.where(nth + 1 == pieces[index], end[index], (first[index] + nth + 1) * superblock)
    return index, start.astype(np.int32), np.maximum(stop - start, 0).astype(np.int32)
