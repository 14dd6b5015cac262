"""PlannedWorld: a simulated world whose passes read what the plans of tree attention say.

The plans are the real ones, as captured and other passes are sent them, of a card on which sharing costs nothing
and pieces may be as short as a token. They are taken at their word: see `PlannedReads.lines`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from layers.input_metadata import InputMetadata
from radixrt.execution.attention import shared_segments
from radixrt.execution.attention.planner import PlanKind
from radixrt.execution.attention.shared_segments import SharedSegments, TreeCosts
from radixrt.execution.graphs.decode_numbers import DecodeNumbers
from radixrt.execution.graphs.extend_graphs import ExtendGraphs, PassShape
from radixrt.schedule.passes import Features, Pass
from tests.execution.attention.test_planner import planner
from tests.support.world.invariants import require
from tests.support.world.world import World
from triton_ops.attention.plan import Int32Array
from triton_ops.implementation import GPU

FREE = TreeCosts(operations=np.inf, item=0.0, partial_crossings=0.0, launches=0.0)
TINY = GPU(capability=90, num_sms=1)  # padded plans have four shared items
ROWS_AT_ONCE = 2
PADDED_TO = 3  # decodes, and tokens of extends: sizes of padded passes are multiples of it

MOVES = ("split", "remap", "eviction", "store", "eviction of what the host has")  # while a plan is in use

TILE_TOKENS = "tile_tokens"

Arrays = Mapping[str, Int32Array]
Reads = list[tuple[int, int, int, int]]  # of a row: line, first position, end, number of the partial result or -1


class PlannedReads:
    """Plans of a world's passes."""

    def __init__(self, world: World) -> None:
        shared_segments.PIECE_TOKENS = shared_segments.MIN_PIECE = 1
        self.events = world.events
        self._table = world.rows.req_to_token
        self._planner = planner(TINY, None, req_to_token=self._table, tree=True)
        # With two programs segments are cut, unless they are of a token; with one, each is an item.
        self._planner._shared = SharedSegments(
            num_heads=1,
            num_kv_heads=1,
            head_dim=16,
            kv_bytes=2,
            num_programs=1 + world.sizes.chunk % 2,
            rows_at_once=ROWS_AT_ONCE,
            costs=FREE,
        )
        self._numbers = DecodeNumbers(self._planner, world.rows.max_requests)
        self._graphs = object.__new__(ExtendGraphs)  # of which nothing is asked but to pad passes
        self._graphs._planner, self._graphs._padding_row = self._planner, world.rows.max_requests
        self._sizes: set[int] = set()
        self._passes = 0
        self._made: tuple[Int32Array, Counter[str]] | None = None  # rows of the plan in use, and events till then

    def lines(self, batch: Pass) -> list[Int32Array]:
        """For each request of a pass the lines of `req_to_token` by which its positions are read, `[seq_len]`.

        Raises Violation where a position is not read once, by a line that names another slot than the row, or a
        result is not merged.
        """
        out: list[Int32Array] = []
        arrays = self._arrays(batch)
        if batch.num_extends:
            out = self._extends(batch, arrays)
        rows, seq_lens = batch.req_pool_indices[batch.num_extends :], batch.seq_lens[batch.num_extends :]
        if not len(rows):
            return out
        decodes = of_plan(arrays, "decode")
        expected = np.append(seq_lens, np.zeros(len(decodes["seq_lens"]) - len(rows), np.int32))
        require("17: a plan is of the contexts as they are", np.array_equal(decodes["seq_lens"], expected))
        reads = reads_of(decodes)
        whose = [*rows.tolist(), *[None] * (len(expected) - len(rows))]
        lines = [self._lines(*read) for read in zip(reads, expected.tolist(), whose, strict=True)]
        self._count(batch, decodes, reads)
        return out + lines[: len(rows)]

    def _lines(self, own: Reads, end: int, row: int | None) -> Int32Array:
        """The line by which each of the positions before `end` is read, of what is in the slots of `row`."""
        lines = np.full(end, -1, np.int32)
        for line, start, stop, _ in own:
            require("17: each position is read once", stop <= end and (lines[start:stop] < 0).all(), (own, end))
            lines[start:stop] = line
        require("17: each position is read once", (lines >= 0).all(), (own, end))
        if row is not None:
            slots = self._table[lines, np.arange(end)]
            name = "17: what is read for several is what each has"
            require(name, np.array_equal(slots, self._table[row, :end]), own)
        return lines

    def _extends(self, batch: Pass, arrays: Arrays) -> list[Int32Array]:
        """The lines of the extends, as their last tokens read; the others are looked at, too."""
        extends, out = of_plan(arrays, "extend"), []
        reads = reads_of_extends(extends, arrays)
        self.events["shared read by extends"] += bool(extends["shared_query_lens"].any())
        starts = arrays["extend_start_loc"].tolist()
        for i in range(batch.num_extends):
            row, first = int(batch.req_pool_indices[i]), int(batch.prefix_lens[i])
            for n in range(int(batch.seq_lens[i]) - first):
                lines = self._lines(reads[starts[i] + n], first + n + 1, row)
            out.append(lines)
        for own in reads[starts[batch.num_extends - 1] + n + 1 :]:
            require("17: padding reads nothing", not any(start < stop for _, start, stop, _ in own), own)
        return out

    def _arrays(self, batch: Pass) -> Arrays:
        """The plans' arrays, and of passes with extends, all that they are told. Every other one is padded, as
        captured ones are.
        """
        count = batch.num_rows - batch.num_extends
        if not batch.num_extends:
            size = -(-count // PADDED_TO) * PADDED_TO
            if size not in self._sizes:
                self._sizes.add(size)
                for kind in self._numbers.kinds(size):
                    self._numbers.idle(size, kind)
            return self._numbers.of(batch, size, Features(), {}).arrays
        self._passes += 1
        if self._passes % 2:
            host = InputMetadata.host_arrays(
                batch.req_pool_indices, batch.seq_lens, batch.prefix_lens, batch.out_cache_loc
            )
            plans = self._planner.plan(host, batch.num_extends)
            return {**host, **plans.arrays, TILE_TOKENS: np.array([plans.tile_tokens])}
        shape = PassShape(
            num_tokens=(len(batch.input_ids) - count) // PADDED_TO * PADDED_TO + PADDED_TO,
            num_rows=batch.num_rows // PADDED_TO * PADDED_TO + PADDED_TO,  # each may sample
            num_extends=batch.num_extends + 2,
        )
        padded = self._graphs._padded(batch, shape, PlanKind.CUT)
        assert padded is not None
        return {**padded.host, **padded.plans.arrays, TILE_TOKENS: np.array([padded.plans.tile_tokens])}

    def _count(self, batch: Pass, arrays: Arrays, reads: Sequence[Reads]) -> None:
        if not arrays["shared_query_lens"].any():
            return
        self.events["shared read"] += 1
        self.events["shared read of several segments"] += any(len(own) > 2 for own in reads)
        if batch.num_extends:
            return
        if self._made is None or self._made[0] is not batch.req_pool_indices:
            self._made = batch.req_pool_indices, self.events.copy()
            return
        self.events["shared read by an older plan"] += 1
        for what in MOVES:
            self.events[f"{what} under a plan"] += self.events[what] > self._made[1][what]


def of_plan(arrays: Arrays, of: str) -> dict[str, Int32Array]:
    """The arrays of the decodes' plan, or the extends', by field name."""
    prefix = f"{of} None "
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def reads_of(arrays: Arrays) -> list[Reads]:
    """What each row of a plan of decodes reads. Raises Violation unless its result is one item's, or merged from
    all.
    """
    reads: list[Reads] = [[] for _ in arrays["seq_lens"]]
    for line, start, length, first, count, partial in _items(arrays, "item", "rows"):
        for j in range(count):
            reads[first + j].append((line, start, start + length, -1 if partial < 0 else partial + j))
    _add_shared(arrays, reads)
    return reads


def reads_of_extends(arrays: Arrays, host: Arrays) -> list[Reads]:
    """The same of a plan of extends, whose rows are tokens: they read nothing behind their own positions."""
    names = ("extend_start_loc", "extend_seq_lens", "prefix_lens", "req_pool_indices")
    requests = list(zip(*(host[name].tolist() for name in names), strict=True))
    tile_tokens = int(host[TILE_TOKENS][0])
    reads: list[Reads] = [[] for _ in range(sum(new for _, new, _, _ in requests))]
    names = ("item_requests", "item_query_starts", "item_starts", "item_lens", "item_partials")
    last = 0
    for request, query_start, start, length, partial in zip(*(arrays[n].tolist() for n in names), strict=True):
        first, new, prefix, line = requests[request]
        last = max(last, first + new)
        for j in range(min(tile_tokens, new - query_start)):
            own = prefix + query_start + j + 1
            stop = max(start, min(start + length, own))
            reads[first + query_start + j].append((line, start, stop, -1 if partial < 0 else partial + j))
    reads = reads[:last]
    _add_shared(arrays, reads)
    return reads


def _add_shared(arrays: Arrays, reads: list[Reads]) -> None:
    """Adds what shared items read. Raises Violation unless each result is one item's, or merged from all."""
    queries = arrays["shared_queries"].tolist()
    for line, start, length, first, count, partial in _items(arrays, "shared", "lines"):
        require("17: shared items without rows read nothing", count > 0 or length == 0)
        require("17: shared items have no more rows than a tile", count <= ROWS_AT_ONCE, count)
        for j, query in enumerate(queries[first : first + count]):
            reads[query].append((line, start, start + length, partial + j))
    merged, taken_in = (lists_of(arrays, f"{name}_partial_starts", len(reads)) for name in ("row", "tail"))
    for i, own in enumerate(reads):
        partials = sorted(partial for *_, partial in own)
        direct = partials == [-1, *taken_in[i]] and not merged[i]
        name = "17: a result is one item's, which takes in what shared items computed, or merged from all"
        require(name, direct or (bool(partials) and partials == merged[i] and not taken_in[i]), (i, own))
    written = [partial for own in reads for *_, partial in own if partial >= 0]
    require("17: a partial result is written once", len(set(written)) == len(written), written)
    require(
        "17: partial results have room", max(written, default=-1) < max(1, len(arrays["row_partials"])), written
    )


def lists_of(arrays: Arrays, name: str, num_rows: int) -> list[list[int]]:
    """The partial results of each row that begin at `name`, sorted."""
    if not len(arrays.get(name, ())):
        return [[]] * num_rows
    partials, starts = arrays["row_partials"].tolist(), arrays[name].tolist()
    return [sorted(partials[start:end]) for start, end in pairwise(starts)]


def _items(arrays: Arrays, group: str, lines: str) -> Iterator[tuple[int, ...]]:
    """Line, first position, tokens, first query, queries and first partial result of each item of a group."""
    names = (lines, "starts", "lens", "query_starts", "query_lens", "partials")
    return zip(*(arrays[f"{group}_{name}"].tolist() for name in names), strict=True)


class PlannedWorld(World):
    """A world whose passes are planned when they are launched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner.lines_of = PlannedReads(self).lines
