"""PlannedWorld: a simulated world whose passes read what the plans of tree attention say.

The plans are the real ones, as captured and other passes are sent them, of a card on which sharing costs nothing
and pieces may be as short as a token. They are taken at their word: see `PlannedReads.lines`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.pass_plans import PassPlans
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from radixrt.execution.graphs import PassShape
from radixrt.execution.pass_builder import PassBuilder
from radixrt.schedule.passes import Pass
from tests.support.world.invariants import require
from tests.support.world.world import World
from triton_ops.attention.plan import AttentionPlan, ExtendPlan, Int32Array, SharingPlan
from triton_ops.implementation import GPU

FREE = TreeCosts(operations=np.inf, item=0.0, partial_crossings=0.0, launches=0.0)
TUNING = PlanTuning(costs=FREE, piece_tokens=1, min_piece=1, short_extend=16)
TINY = GPU(capability=90, num_sms=1)  # padded plans have four shared items
ROWS_AT_ONCE = 2
PADDED_TO = 3  # decodes, and tokens of extends: sizes of padded passes are multiples of it

MOVES = ("split", "remap", "eviction", "store", "eviction of what the host has")  # while a plan is in use

Arrays = Mapping[str, Int32Array]
Reads = list[tuple[int, int, int, int]]  # of a row: line, first position, end, number of the partial result or -1


@dataclass(frozen=True)
class TiledShape(KernelShape):
    """With shared items of as few rows as a test wants."""

    rows_at_once: int = ROWS_AT_ONCE

    @property
    def shared_rows(self) -> int:
        return self.rows_at_once


def tiny_planner(table: Int32Array, tuning: PlanTuning = TUNING, at_a_time: int = 1) -> AttentionPlanner:
    """With two items at a time segments are cut, unless they are of a token; with one, each is an item."""
    shape = TiledShape(TINY, num_heads=8, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    tuning = replace(tuning, shared_programs_per_sm=shape.num_kv_heads * at_a_time)
    return AttentionPlanner(shape, (None,), table, shape.dtype, tree=True, tuning=tuning)


class PlannedReads:
    """Plans of a world's passes."""

    def __init__(self, world: World, tuning: PlanTuning = TUNING) -> None:
        self.events = world.events
        self._table = world.rows.req_to_token
        self._planner = tiny_planner(self._table, tuning, 1 + world.sizes.chunk % 2)
        self._padding_row = world.rows.max_requests
        self._builders: dict[PassShape | None, PassBuilder] = {}
        self._passes = 0
        self._made: tuple[Int32Array, Counter[str]] | None = None  # rows of the plan in use, and events till then

    def lines(self, batch: Pass) -> list[Int32Array]:
        """For each request of a pass the lines of `req_to_token` by which its positions are read, `[seq_len]`.

        Raises Violation where a position is not read once, by a line that names another slot than the row, or a
        result is not merged.
        """
        out: list[Int32Array] = []
        host, plans = self._planned(batch)
        if batch.num_extends:
            out = self._extends(batch, plans.extend[None], host)
        rows, seq_lens = batch.req_pool_indices[batch.num_extends :], batch.seq_lens[batch.num_extends :]
        if not len(rows):
            return out
        decodes = plans.decode[None]
        expected = np.append(seq_lens, np.zeros(len(decodes.seq_lens) - len(rows), np.int32))
        require("17: a plan is of the contexts as they are", np.array_equal(decodes.seq_lens, expected))
        reads = reads_of(decodes)
        whose = [*rows.tolist(), *[None] * (len(expected) - len(rows))]
        lines = [self._lines(*read) for read in zip(reads, expected.tolist(), whose, strict=True)]
        self._count(batch, decodes, reads)
        return out + lines[: len(rows)]

    def _lines(self, own: Reads, end: int, row: int | None) -> Int32Array:
        """The line by which each of the positions before `end` is read, of what is in the slots of `row`."""
        lines = np.full(end, -1, np.int32)
        for line, start, stop, _ in own:
            is_first = stop <= end and bool((lines[start:stop] < 0).all())
            require("17: each position is read once", is_first, (own, end))
            lines[start:stop] = line
        require("17: each position is read once", bool((lines >= 0).all()), (own, end))
        if row is not None:
            slots = self._table[lines, np.arange(end)]
            name = "17: what is read for several is what each has"
            require(name, np.array_equal(slots, self._table[row, :end]), own)
        return lines

    def _extends(self, batch: Pass, extends: ExtendPlan[Int32Array], host: Arrays) -> list[Int32Array]:
        """The lines of the extends, as their last tokens read; the others are looked at, too."""
        reads, out = reads_of_extends(extends, host), []
        self.events["shared read by extends"] += bool(extends.shared_query_lens.any())
        starts = host["extend_start_loc"].tolist()
        for i in range(batch.num_extends):
            row, first = int(batch.req_pool_indices[i]), int(batch.prefix_lens[i])
            for n in range(int(batch.seq_lens[i]) - first):
                lines = self._lines(reads[starts[i] + n], first + n + 1, row)
            out.append(lines)
        for own in reads[starts[batch.num_extends - 1] + n + 1 :]:
            require("17: padding reads nothing", not any(start < stop for _, start, stop, _ in own), own)
        return out

    def _planned(self, batch: Pass) -> tuple[Arrays, PassPlans[Int32Array]]:
        """The host arrays of a pass, and the plans. All decodes are padded, and every other pass with extends."""
        shape: PassShape | None = None
        if not batch.num_extends:
            shape = PassShape(0, -(-batch.num_rows // PADDED_TO) * PADDED_TO, 0)
        else:
            self._passes += 1
            if self._passes % 2 == 0:
                num_tokens = len(batch.input_ids) - (batch.num_rows - batch.num_extends)
                shape = PassShape(
                    num_tokens=num_tokens // PADDED_TO * PADDED_TO + PADDED_TO,
                    num_rows=batch.num_rows // PADDED_TO * PADDED_TO + PADDED_TO,  # each may sample
                    num_extends=batch.num_extends + 2,
                )
        packed = self._builder(shape).build(batch)
        return packed.host_arrays(), packed.plans

    def _builder(self, shape: PassShape | None) -> PassBuilder:
        """What pads passes to a shape, if they fit it."""
        if shape not in self._builders:
            shapes = [] if shape is None else [shape]
            self._builders[shape] = PassBuilder(self._planner, shapes, self._padding_row)
        return self._builders[shape]

    def _count(self, batch: Pass, decodes: AttentionPlan[Int32Array], reads: Sequence[Reads]) -> None:
        if not decodes.shared_query_lens.any():
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


def reads_of(plan: AttentionPlan[Int32Array]) -> list[Reads]:
    """What each row of a plan of decodes reads. Raises Violation unless its result is one item's, or merged from
    all.
    """
    reads: list[Reads] = [[] for _ in plan.seq_lens]
    for line, start, length, first, count, partial in _items(plan, "item"):
        for j in range(count):
            reads[first + j].append((line, start, start + length, -1 if partial < 0 else partial + j))
    _add_shared(plan, reads)
    return reads


def reads_of_extends(plan: ExtendPlan[Int32Array], host: Arrays) -> list[Reads]:
    """The same of a plan of extends, whose rows are tokens: they read nothing after their own positions."""
    names = ("extend_start_loc", "extend_seq_lens", "prefix_lens", "req_pool_indices")
    requests = list(zip(*(host[name].tolist() for name in names), strict=True))
    reads: list[Reads] = [[] for _ in range(sum(new for _, new, _, _ in requests))]
    of_items = ("item_requests", "item_query_starts", "item_starts", "item_lens", "item_partials")
    last = 0
    for request, query_start, start, length, partial in zip(
        *(getattr(plan, name).tolist() for name in of_items), strict=True
    ):
        first, new, prefix, line = requests[request]
        last = max(last, first + new)
        for j in range(min(plan.tile_tokens, new - query_start)):
            own = prefix + query_start + j + 1
            stop = max(start, min(start + length, own))
            reads[first + query_start + j].append((line, start, stop, -1 if partial < 0 else partial + j))
    reads = reads[:last]
    _add_shared(plan, reads)
    return reads


def _add_shared(plan: SharingPlan[Int32Array], reads: list[Reads]) -> None:
    """Adds what shared items read. Raises Violation unless each result is one item's, or merged from all."""
    queries = plan.shared_queries.tolist()
    for line, start, length, first, count, partial in _items(plan, "shared"):
        require("17: shared items without rows read nothing", count > 0 or length == 0)
        require("17: shared items have no more rows than a tile", count <= ROWS_AT_ONCE, count)
        for j, query in enumerate(queries[first : first + count]):
            reads[query].append((line, start, start + length, partial + j))
    merged, taken_in = (lists_of(plan, f"{name}_partial_starts", len(reads)) for name in ("row", "tail"))
    for i, own in enumerate(reads):
        partials = sorted(partial for *_, partial in own)
        direct = partials == [-1, *taken_in[i]] and not merged[i]
        name = "17: a result is one item's, which takes in what shared items computed, or merged from all"
        require(name, direct or (bool(partials) and partials == merged[i] and not taken_in[i]), (i, own))
    written = [partial for own in reads for *_, partial in own if partial >= 0]
    require("17: a partial result is written once", len(set(written)) == len(written), written)
    require("17: partial results have room", max(written, default=-1) < max(1, len(plan.row_partials)), written)


def lists_of(plan: SharingPlan[Int32Array], name: str, num_rows: int) -> list[list[int]]:
    """The partial results of each row that begin at `name`, sorted."""
    starts = getattr(plan, name, None)
    if starts is None or not len(starts):
        return [[]] * num_rows
    partials = plan.row_partials.tolist()
    return [sorted(partials[start:end]) for start, end in pairwise(starts.tolist())]


def _items(plan: SharingPlan[Int32Array], group: str) -> Iterator[tuple[int, ...]]:
    """Line, first position, tokens, first query, queries and first partial result of each item of a group."""
    names = ("req_pool_indices", "starts", "lens", "query_starts", "query_lens", "partials")
    return zip(*(getattr(plan, f"{group}_{name}").tolist() for name in names), strict=True)


class PlannedWorld(World):
    """A world whose passes are planned when they are launched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner.lines_of = PlannedReads(self).lines
