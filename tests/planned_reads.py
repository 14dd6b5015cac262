"""PlannedWorld: a simulated world whose decodes read what the plans of tree attention say.

The plans are the real ones, as captured and other passes are sent them, of a card on which sharing costs nothing
and pieces may be as short as a token. They are taken at their word: see `PlannedReads.lines`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from simulation import World, require
from test_attention_planner import planner

from radixrt.execution import shared_segments
from radixrt.execution.attention_planner import PlanKind
from radixrt.execution.decode_numbers import DecodeNumbers
from radixrt.execution.sampling_table import Features
from radixrt.execution.shared_segments import SharedSegments, TreeCosts
from radixrt.schedule.batch import ScheduleBatch
from triton_ops.attention_plan import Int32Array
from triton_ops.implementation import GPU

FREE = TreeCosts(operations=np.inf, item=0.0, partial_crossings=0.0, launches=0.0)
TINY = GPU(capability=90, num_sms=1)  # padded plans have four shared items
ROWS_AT_ONCE = 2
PADDED_TO = 3  # decodes: sizes of padded passes are multiples of it

MOVES = ("split", "remap", "eviction", "store", "eviction of what the host has")  # while a plan is in use

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
        self._sizes: set[int] = set()
        self._passes = 0
        self._made: tuple[Int32Array, Counter[str]] | None = None  # rows of the plan in use, and events till then

    def lines(self, batch: ScheduleBatch) -> list[Int32Array]:
        """For each request of a pass the lines of `req_to_token` by which its positions are read, `[seq_len]`.

        Raises Violation where a position is not read once, by a line that names another slot than the row, or a
        result is not merged.
        """
        out = [
            np.full(end, row, np.int32)
            for row, end in zip(batch.req_pool_indices, batch.seq_lens[: batch.num_extends], strict=False)
        ]
        rows, seq_lens = batch.req_pool_indices[batch.num_extends :], batch.seq_lens[batch.num_extends :]
        if not len(rows):
            return out
        arrays = self._arrays(batch, rows, seq_lens)
        size = len(arrays["seq_lens"])
        expected = np.append(seq_lens, np.zeros(size - len(rows), np.int32))
        require("17: a plan is of the contexts as they are", np.array_equal(arrays["seq_lens"], expected))
        reads = reads_of(arrays)
        for i, own in enumerate(reads):
            lines = np.full(expected[i], -1, np.int32)
            for line, start, end, _ in own:
                name = "17: each position is read once"
                require(name, end <= len(lines) and (lines[start:end] < 0).all(), (i, own, len(lines)))
                lines[start:end] = line
            require("17: each position is read once", (lines >= 0).all(), (i, own, len(lines)))
            if i < len(rows):
                slots = self._table[lines, np.arange(len(lines))]
                name = "17: what is read for several is what each has"
                require(name, np.array_equal(slots, self._table[rows[i], : len(lines)]), (i, own))
                out.append(lines)
        self._count(batch, arrays, reads)
        return out

    def _arrays(self, batch: ScheduleBatch, rows: Int32Array, seq_lens: Int32Array) -> dict[str, Int32Array]:
        """The plan's, by field name. With extends, every other pass is padded, as captured ones are."""
        self._passes += 1
        size = -(-len(rows) // PADDED_TO) * PADDED_TO
        arrays: Mapping[str, Int32Array]
        if not batch.num_extends:
            if size not in self._sizes:
                self._sizes.add(size)
                for kind in self._numbers.kinds(size):
                    self._numbers.idle(size, kind)
            arrays = self._numbers.of(batch, size, Features(), {}).arrays
        elif self._passes % 2:
            arrays = self._planner.plan({"req_pool_indices": rows, "seq_lens": seq_lens}, 0).arrays
        else:
            padding = (0, size - len(rows))
            arrays = self._planner.plan_padded(
                np.pad(rows, padding), np.pad(seq_lens, padding), least=PlanKind.CUT
            ).arrays
        prefix = "decode None "
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    def _count(self, batch: ScheduleBatch, arrays: Mapping[str, Int32Array], reads: Sequence[Reads]) -> None:
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


def reads_of(arrays: Mapping[str, Int32Array]) -> list[Reads]:
    """What each row of a plan reads. Raises Violation unless its result is one item's, or merged from all."""
    reads: list[Reads] = [[] for _ in arrays["seq_lens"]]
    for line, start, length, first, count, partial in _items(arrays, "item", "rows"):
        for j in range(count):
            reads[first + j].append((line, start, start + length, -1 if partial < 0 else partial + j))
    queries = arrays["shared_queries"].tolist()
    for line, start, length, first, count, partial in _items(arrays, "shared", "lines"):
        require("17: shared items without rows read nothing", count > 0 or length == 0)
        require("17: shared items have no more rows than a tile", count <= ROWS_AT_ONCE, count)
        for j, query in enumerate(queries[first : first + count]):
            reads[query].append((line, start, start + length, partial + j))
    merged, taken_in = (lists_of(arrays, f"{name}_partial_starts") for name in ("row", "tail"))
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
    return reads


def lists_of(arrays: Mapping[str, Int32Array], name: str) -> list[list[int]]:
    """The partial results of each row that begin at `name`, sorted."""
    partials, starts = arrays["row_partials"].tolist(), arrays[name].tolist()
    if not starts:
        return [[]] * len(arrays["seq_lens"])
    return [sorted(partials[start:end]) for start, end in pairwise(starts)]


def _items(arrays: Mapping[str, Int32Array], group: str, lines: str) -> Iterator[tuple[int, ...]]:
    """Line, first position, tokens, first query, queries and first partial result of each item of a group."""
    names = (lines, "starts", "lens", "query_starts", "query_lens", "partials")
    return zip(*(arrays[f"{group}_{name}"].tolist() for name in names), strict=True)


class PlannedWorld(World):
    """A world whose passes are planned when they are launched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner.lines_of = PlannedReads(self).lines
