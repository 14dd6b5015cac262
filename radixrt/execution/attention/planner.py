"""Plans attention for each pass, on the host: which KV is read, cut to what the GPU can do side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from layers.placement import Placement
from radixrt.execution.attention.flat import (
    KernelShape,
    decode_item_len,
    extend_programs,
    fair_item_len,
    max_decode_items,
    max_extra_extend_items,
    plan_extends,
)
from radixrt.execution.attention.padding import PlanCapacity, padded_decodes, padded_extends
from radixrt.execution.attention.pass_plans import CUT, CUT_TREE, TREE, WHOLE, PassPlans, PlanShape, Window
from radixrt.execution.attention.shared_segments import NoSharing, SharedCapacity, SharedSegments
from radixrt.execution.attention.tuning import PlanTuning, plan_tuning
from radixrt.models.config import AttentionKind
from triton_ops.attention.plan import (
    EMPTY_ROWS,
    NOTHING_SHARED,
    AttentionPlan,
    ExtendPlan,
    Int32Array,
    SharedItems,
)
from triton_ops.attention.shared import shared_rows
from triton_ops.implementation import GPU, gpu_of, runs_triton

HostArrays = Mapping[str, Int32Array]  # those of `InputMetadata.host_arrays`


class ModelHeads(Protocol):
    """What a planner has to know of a model; a ModelConfig has it."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def attention(self) -> Sequence[AttentionKind]: ...


class ReferencePlanner:
    """Plans passes of the references, which need no cuts, and no plans of extends.

    Args:
        windows: of the model's layers; each gets a plan.
        req_to_token: the host's table.
    """

    def __init__(self, windows: Sequence[Window], req_to_token: Int32Array) -> None:
        self._windows = windows
        self._req_to_token = req_to_token

    def max_partial_bytes(self, num_decodes: int, num_tokens: int) -> int:
        """There are no partial results."""
        return 0

    def plan(self, host: HostArrays, num_extends: int) -> PassPlans:
        """The plans of a pass whose first `num_extends` requests are extends."""
        rows, seq_lens = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
        return PassPlans({window: self._flat(rows, seq_lens, window, None) for window in self._windows})

    def _flat(
        self, rows: Int32Array, seq_lens: Int32Array, window: Window, max_item_len: int | None
    ) -> AttentionPlan[Int32Array]:
        return AttentionPlan.flat(
            rows,
            seq_lens,
            max_item_len=max_item_len,
            sliding_window=window,
            req_to_token=self._req_to_token,
        )


class AttentionPlanner(ReferencePlanner):
    """Plans passes of the kernels: long contexts are cut so that all multiprocessors have work, and layers without
    a window read what requests share once, wherever that is cheaper.

    Args:
        shape: of the kernels' tiles.
        windows, req_to_token: as for ReferencePlanner.
        tuning: of the GPU.
        sharing: finds what requests share.
    """

    def __init__(
        self,
        shape: KernelShape,
        windows: Sequence[Window],
        req_to_token: Int32Array,
        tuning: PlanTuning,
        sharing: SharedSegments | NoSharing,
    ) -> None:
        super().__init__(windows, req_to_token)
        self._shape = shape
        self._tuning = tuning
        self._sharing = sharing
        self._shares = not isinstance(sharing, NoSharing)

    @classmethod
    def of(
        cls,
        config: ModelHeads,
        gpu: GPU,
        dtype: torch.dtype,
        req_to_token: Int32Array,
        kv_dtype: torch.dtype | None = None,
        *,
        tree: bool = False,
        tuning: PlanTuning | None = None,
    ) -> AttentionPlanner:
        """The planner of a model on a GPU.

        Args:
            config, dtype: the model's.
            req_to_token: the host's table, which tells who reads the same.
            kv_dtype: of the pool; None: the model's.
            tree: requests read what they share once for all of them, where that is cheaper.
            tuning: None: the GPU's.
        """
        tuning, windows = tuning or plan_tuning(gpu), _windows(config)
        shape = KernelShape(gpu, config.num_heads, config.num_kv_heads, config.head_dim, dtype)
        sharing: SharedSegments | NoSharing = NoSharing()
        if tree and None in windows:
            sharing = SharedSegments(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                kv_bytes=(kv_dtype or dtype).itemsize,
                num_programs=tuning.shared_programs_per_sm * gpu.num_sms,
                rows_at_once=shared_rows(gpu, config.head_dim, shape.group, dtype),
                tuning=tuning,
            )
        return cls(shape, windows, req_to_token, tuning, sharing)

    def max_partial_bytes(self, num_decodes: int, num_tokens: int) -> int:
        """The most memory that partial results of decodes, and of `num_tokens` of extends, take in a layer."""
        shape, num_cut = self._shape, min(num_tokens, self._tuning.max_cut_tokens)
        extra = max_extra_extend_items(shape.gpu, shape.num_kv_heads)
        partials = self._max_items(num_decodes) + num_cut + extra * shape.tile_tokens(short=False)
        partials += self._sharing.capacity(num_decodes).num_partials
        partials += self._extend_sharing(num_cut).num_partials
        return partials * shape.num_heads * 4 * (shape.head_dim + 1)  # float32, and the log-sum-exps

    def decode_shapes(self, num_decodes: int) -> tuple[PlanShape, ...]:
        """The shapes that padded plans of so many decodes may have in passes of nothing else, the least first."""
        flat, tree = ((CUT,), CUT_TREE) if num_decodes < self._tuning.cuts_below else ((WHOLE, CUT), TREE)
        return (*flat, tree) if self._shares else flat

    def extend_shapes(self, num_tokens: int, num_decodes: int) -> tuple[PlanShape, ...]:
        """The same of the decodes in padded passes with so many tokens of extends. In long passes nobody notices
        that the kernel for shared items is launched though there are none.
        """
        if not self._shares:
            return (CUT,)
        tree = self.decode_shapes(num_decodes)[-1]
        return (CUT, tree) if num_tokens <= self._tuning.max_cut_tokens else (tree,)

    def plan(self, host: HostArrays, num_extends: int) -> PassPlans:
        """The plans of a pass whose first `num_extends` requests are extends, in no more room than they need."""
        rows, seq_lens = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
        shapes = (CUT, CUT_TREE) if self._shares else (CUT,)
        decode, _ = self._decodes(rows, seq_lens, shapes)
        if not num_extends:
            return PassPlans(decode)
        num_tokens = int(host["extend_seq_lens"][:num_extends].sum())
        extend = {window: self._extends(host, num_extends, num_tokens, window) for window in self._windows}
        return PassPlans(decode, extend)

    def plan_padded_decodes(
        self, rows: Int32Array, seq_lens: Int32Array, shapes: Sequence[PlanShape] | None = None
    ) -> PassPlans:
        """The plans of decodes `[R]` in the room of one of `shapes` (None: `decode_shapes`), which sizes depend on
        besides R. It is the one that shares if there is something to share, or if it is the only one; else the
        first with room. Padded decodes are the last ones, with a `seq_len` of 0.
        """
        count = len(rows)
        plans, shape = self._decodes(rows, seq_lens, shapes or self.decode_shapes(count))
        capacity = {window: self._decode_capacity(count, shape, window) for window in plans}
        return PassPlans({window: padded_decodes(plan, capacity[window]) for window, plan in plans.items()})

    def plan_padded_extends(
        self,
        host: HostArrays,
        num_extends: int,
        num_live: int,
        decode_lens: Int32Array,
        shapes: Sequence[PlanShape] | None = None,
    ) -> PassPlans | None:
        """The plans of a pass in the room of one of `shapes` (None: `extend_shapes`), chosen as for decodes, but
        the one that shares if extends do. Sizes depend on it and on the numbers of extends, of their tokens and of
        decodes alone.

        Of the extends, `num_live` are real; then come some without tokens, and a last one whose tokens pad the
        pass and get results of zero. `decode_lens` `[R]` are 0 of padded decodes.

        None: one extend would read so much by itself that a plan of its own, which cuts it, is better.
        """
        gpu, num_kv_heads = self._shape.gpu, self._shape.num_kv_heads
        num_new = host["extend_seq_lens"][:num_extends]
        num_tokens = int(num_new.sum())
        cut = num_tokens <= self._tuning.max_cut_tokens
        tile_tokens = self._shape.tile_tokens(short=False)
        plans = {
            window: self._extends(host, num_live, num_tokens, window, tile_tokens=tile_tokens, cut=cut)
            for window in self._windows
        }
        for plan in () if cut else plans.values():
            fair = int(plan.item_lens.sum()) * num_kv_heads // extend_programs(gpu)
            if int(plan.item_lens.max(initial=0)) > max(fair, self._tuning.long_item):
                return None
        shapes = shapes or self.extend_shapes(num_tokens, len(decode_lens))
        if any(len(plan.shared_lens) for plan in plans.values()):
            shapes = shapes[-1:]
        decodes = self.plan_padded_decodes(host["req_pool_indices"][num_extends:], decode_lens, shapes)
        extend = {}
        for window, plan in plans.items():
            capacity = PlanCapacity(num_tokens // tile_tokens + num_extends, 0, merges=False)
            if cut:
                shares = decodes.shape.shares and window is None
                extra = max_extra_extend_items(gpu, num_kv_heads)
                shared = self._extend_sharing(num_tokens) if shares else SharedCapacity(0, 0)
                capacity = PlanCapacity(
                    capacity.num_items + extra,
                    num_tokens + extra * tile_tokens + shared.num_partials,
                    merges=True,
                    num_shared_items=shared.num_items if shares else None,
                )
            extend[window] = padded_extends(plan, capacity, num_tokens, num_extends, int(num_new[-1]))
        return replace(decodes, extend=extend)

    def _decodes(
        self, rows: Int32Array, seq_lens: Int32Array, shapes: Sequence[PlanShape]
    ) -> tuple[dict[Window, AttentionPlan[Int32Array]], PlanShape]:
        """The plans by window, not padded, and which of the shapes they have room in."""
        flat = [shape for shape in shapes if not shape.shares]
        trees = [shape for shape in shapes if shape.shares]
        tail_starts, shared = np.zeros_like(rows), NOTHING_SHARED
        if trees:
            shareable, capacity = np.maximum(seq_lens - 1, 0), self._sharing.capacity(len(rows))
            tail_starts, shared = self._sharing.find(self._req_to_token, rows, shareable, capacity=capacity)
        any_shared = len(shared.lens) > 0
        candidates = trees if any_shared or not flat else flat
        cuts = any(shape.cuts for shape in candidates)
        plans: dict[Window, AttentionPlan[Int32Array]] = {}
        for window in self._windows:
            if window is None and (any_shared or not (flat or cuts)):
                plans[window] = self._tree(rows, seq_lens, tail_starts, shared, cuts=cuts)
            else:
                read = seq_lens if window is None else seq_lens.clip(max=window)
                plans[window] = self._flat(rows, seq_lens, window, self._item_len(read) if cuts else None)
        return plans, candidates[-1] if PassPlans(plans).shape.cuts else candidates[0]

    def _tree(
        self, rows: Int32Array, seq_lens: Int32Array, tail_starts: Int32Array, shared: SharedItems, *, cuts: bool
    ) -> AttentionPlan[Int32Array]:
        tails = np.maximum(seq_lens - tail_starts, 0)
        if cuts:
            return AttentionPlan.tree(rows, seq_lens, tail_starts, shared, max_item_len=self._item_len(tails))
        fair = fair_item_len(self._shape.gpu, self._shape.num_kv_heads, tails)
        max_tail = max(self._tuning.long_tail, fair)
        capacity = self._sharing.capacity(len(rows))
        tail_starts, shared = _split_heads_of_context(
            rows, tail_starts, tails - max_tail, shared, capacity, self._tuning
        )
        return AttentionPlan.tree(rows, seq_lens, tail_starts, shared)

    def _extends(
        self,
        host: HostArrays,
        count: int,
        num_tokens: int,
        window: Window,
        *,
        tile_tokens: int | None = None,
        cut: bool = True,
    ) -> ExtendPlan[Int32Array]:
        """`plan_extends` of the first `count` requests, in a pass with room for `num_tokens` of extends."""
        names = ("req_pool_indices", "prefix_lens", "extend_start_loc", "extend_seq_lens")
        rows, prefix, first_rows, counts = (host[name][:count] for name in names)
        tail_starts, shared = None, NOTHING_SHARED
        if window is None and num_tokens <= self._tuning.max_cut_tokens:
            is_short = counts <= self._tuning.short_extend * self._sharing.rows_at_once
            tail_starts, shared = self._sharing.find(
                self._req_to_token,
                rows,
                np.where(is_short, prefix, 0),
                first_rows=first_rows,
                counts=counts,
                capacity=self._extend_sharing(num_tokens),
            )
        return plan_extends(
            self._shape,
            prefix,
            first_rows,
            counts,
            tile_tokens=tile_tokens,
            cut=cut,
            sliding_window=window,
            tail_starts=tail_starts,
            shared=shared,
        )

    def _decode_capacity(self, count: int, shape: PlanShape, window: Window) -> PlanCapacity:
        num_items = self._max_items(count) if shape.cuts else count
        num_partials = num_items if shape.cuts else 0
        if not shape.shares or window is not None:
            return PlanCapacity(num_items, num_partials, shape.cuts)
        shared = self._sharing.capacity(count)
        return PlanCapacity(num_items, num_partials + shared.num_partials, shape.cuts, shared.num_items)

    def _extend_sharing(self, num_tokens: int) -> SharedCapacity:
        """What plans of so many tokens of extends have room for; all their items may be of whole tiles."""
        num_items, num_partials = self._sharing.capacity(num_tokens)
        return SharedCapacity(num_items + num_partials // self._sharing.rows_at_once, num_partials)

    def _max_items(self, num_decodes: int) -> int:
        """The most items of decodes that are cut, padded ones included."""
        most = max_decode_items(self._shape.gpu, self._shape.num_kv_heads, num_decodes)
        return most + -(-num_decodes // EMPTY_ROWS)

    def _item_len(self, lens: Int32Array) -> int:
        return decode_item_len(self._shape.gpu, self._shape.num_kv_heads, lens)


def planner_of(
    config: ModelHeads,
    placement: Placement,
    req_to_token: Int32Array,
    kv_dtype: torch.dtype | None = None,
    *,
    tree: bool = False,
) -> ReferencePlanner:
    """The planner of a model's passes: an AttentionPlanner where the kernels run. See `AttentionPlanner.of`."""
    if not runs_triton(placement.impl, placement.device):
        return ReferencePlanner(_windows(config), req_to_token)
    gpu = gpu_of(placement.device)
    return AttentionPlanner.of(config, gpu, placement.dtype, req_to_token, kv_dtype, tree=tree)


def _windows(config: ModelHeads) -> tuple[Window, ...]:
    return tuple({kind.window for kind in config.attention})


def _split_heads_of_context(
    rows: Int32Array,
    tail_starts: Int32Array,
    head_lens: Int32Array,
    shared: SharedItems,
    capacity: SharedCapacity,
    tuning: PlanTuning,
) -> tuple[Int32Array, SharedItems]:
    """Shorten tails that are not cut by their first `head_lens` `[R]` tokens, so that others need not wait for
    them: these become shared items of one row each, the longest first, as far as there is room.
    """
    longest = np.argsort(-head_lens, kind="stable")[: np.count_nonzero(head_lens >= tuning.min_head)]
    pieces = -(-head_lens[longest] // tuning.head_piece)
    left = min(capacity.num_items - len(shared.lens), capacity.num_partials - int(shared.query_lens.sum()))
    fit = np.count_nonzero(np.cumsum(pieces) <= left)
    if not fit:
        return tail_starts, shared
    longest, pieces = longest[:fit], pieces[:fit]
    queries = np.concatenate([shared.queries, np.setdiff1d(longest, shared.queries).astype(np.int32)])
    place = np.zeros_like(rows)  # of each row among the queries
    place[queries] = np.arange(len(queries))
    row = np.repeat(longest, pieces)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tuning.head_piece
    tail_starts = tail_starts.copy()
    starts = tail_starts[row] + offset
    tail_starts[longest] += head_lens[longest]

    def joined(of_all: Int32Array, own: Int32Array) -> Int32Array:
        return np.concatenate([of_all, own.astype(np.int32)])

    return tail_starts, SharedItems(
        req_pool_indices=joined(shared.req_pool_indices, rows[row]),
        starts=joined(shared.starts, starts),
        lens=joined(shared.lens, np.minimum(head_lens[row] - offset, tuning.head_piece)),
        query_starts=joined(shared.query_starts, place[row]),
        query_lens=joined(shared.query_lens, np.ones_like(row)),
        queries=queries,
    )
