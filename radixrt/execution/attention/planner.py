"""Plans attention for each pass, on the host: which KV is read, cut to what the GPU can do side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from layers.placement import Placement
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.pass_plans import (
    CUT,
    CUT_TREE,
    TREE,
    WHOLE,
    PassPlans,
    PlanCapacity,
    PlanShape,
    Window,
    padded_decodes,
    padded_extends,
)
from radixrt.execution.attention.shared_segments import NoSharing, SharedCapacity, SharedSegments
from radixrt.execution.attention.tuning import PlanTuning, plan_tuning
from radixrt.models.config import ModelConfig
from triton_ops.attention.plan import (
    EMPTY_ROWS,
    NOTHING_SHARED,
    AttentionPlan,
    ExtendPlan,
    Int32Array,
    SharedItems,
)
from triton_ops.implementation import gpu_of, runs_triton

HostArrays = Mapping[str, Int32Array]  # those of `InputMetadata.host_arrays`
DecodePlans = dict[Window, AttentionPlan[Int32Array]]


class ReferencePlanner:
    """Plans passes of the references, which need no cuts, and no plans of extends: one for each window."""

    def __init__(self, windows: Sequence[Window], req_to_token: Int32Array) -> None:
        self._windows = windows
        self._req_to_token = req_to_token

    def max_partial_bytes(self, num_decodes: int, num_tokens: int) -> int:
        """There are no partial results."""
        return 0

    def plan(self, host: HostArrays, num_extends: int) -> PassPlans[Int32Array]:
        """The plans of a pass whose first `num_extends` requests are extends."""
        rows, seq_lens = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
        return PassPlans({window: self._flat(rows, seq_lens, window, None) for window in self._windows})

    def _flat(
        self, rows: Int32Array, seq_lens: Int32Array, window: Window, max_item_len: int | None
    ) -> AttentionPlan[Int32Array]:
        table = self._req_to_token
        return AttentionPlan.flat(
            rows, seq_lens, max_item_len=max_item_len, sliding_window=window, req_to_token=table
        )


class AttentionPlanner(ReferencePlanner):
    """Plans passes of the kernels: long contexts are cut so that all multiprocessors have work, and layers without
    a window read what requests share, as `sharing` finds it, once, wherever that is cheaper.
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
        self._shape, self._tuning, self._sharing = shape, tuning, sharing
        self._shares = isinstance(sharing, SharedSegments)

    def max_partial_bytes(self, num_decodes: int, num_tokens: int) -> int:
        """The most memory that partial results of decodes, and of `num_tokens` of extends, take in a layer."""
        shape, num_cut = self._shape, min(num_tokens, self._tuning.max_cut_tokens)
        partials = self._decode_capacity(num_decodes, CUT_TREE, None).num_partials
        partials += self._extend_capacity(num_cut, 0, shape.tile_tokens(short=False), shares=True).num_partials
        return partials * shape.num_heads * 4 * (shape.head_dim + 1)  # float32, and the log-sum-exps

    def decode_shapes(self, num_decodes: int) -> tuple[PlanShape, ...]:
        """The shapes that padded plans may have in passes of so many decodes alone, the sharing one last."""
        flat, tree = ((CUT,), CUT_TREE) if num_decodes < self._tuning.cuts_below else ((WHOLE, CUT), TREE)
        return (*flat, tree) if self._shares else flat

    def extend_shapes(self, num_tokens: int, num_decodes: int) -> tuple[PlanShape, ...]:
        """The same for passes with so many tokens of extends, too. In long ones nobody notices that the kernel for
        shared items is launched though there are none.
        """
        if not self._shares:
            return (CUT,)
        tree = self.decode_shapes(num_decodes)[-1]
        return (CUT, tree) if num_tokens <= self._tuning.max_cut_tokens else (tree,)

    def plan(self, host: HostArrays, num_extends: int) -> PassPlans[Int32Array]:
        """The plans of a pass whose first `num_extends` requests are extends, in no more room than they need."""
        rows, seq_lens = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
        decode, _ = self._decodes(rows, seq_lens, (CUT, CUT_TREE) if self._shares else (CUT,))
        if not num_extends:
            return PassPlans(decode)
        num_tokens = int(host["extend_seq_lens"][:num_extends].sum())
        extend = {window: self._extends(host, num_extends, num_tokens, window) for window in self._windows}
        return PassPlans(decode, extend)

    def plan_padded_decodes(
        self, rows: Int32Array, seq_lens: Int32Array, shapes: Sequence[PlanShape] = ()
    ) -> PassPlans[Int32Array]:
        """The plans of decodes `[R]`, padded: how long their arrays are depends on R and on `shape` alone.

        The shape is one of `shapes`, `decode_shapes` where none are given: the one that shares, if something is
        shared or there is no other, or else the first that has room. Padded decodes come last and have a `seq_len`
        of 0.
        """
        plans, shape = self._decodes(rows, seq_lens, shapes or self.decode_shapes(len(rows)))
        for window, plan in plans.items():
            plans[window] = padded_decodes(plan, self._decode_capacity(len(rows), shape, window))
        return PassPlans(plans)

    def plan_padded_extends(
        self,
        host: HostArrays,
        num_extends: int,
        num_live: int,
        decode_lens: Int32Array,
        shapes: Sequence[PlanShape] = (),
    ) -> PassPlans[Int32Array] | None:
        """The plans of a pass with extends, padded: how long their arrays are depends on the numbers of extends,
        of their tokens and of decodes, and on `shape` alone, which is chosen as for decodes (from `extend_shapes`
        where none are given). If extends share, it is the one that does.

        Of the extends, `num_live` are real; then come some without tokens, and a last one whose tokens pad the
        pass and get results of zero. `decode_lens` `[R]` are 0 for padded decodes.

        None: one extend would read so much by itself that a plan of its own, which cuts it, is better.
        """
        num_new = host["extend_seq_lens"][:num_extends]
        num_tokens, tile_tokens = int(num_new.sum()), self._shape.tile_tokens(short=False)
        extend = {w: self._extends(host, num_live, num_tokens, w, tile_tokens) for w in self._windows}
        for plan in extend.values():
            fair = self._shape.fair_extend_len(int(plan.item_lens.sum()))
            is_cut = num_tokens <= self._tuning.max_cut_tokens
            if not is_cut and plan.item_lens.max(initial=0) > max(fair, self._tuning.long_item):
                return None
        shapes = shapes or self.extend_shapes(num_tokens, len(decode_lens))
        if any(len(plan.shared_lens) for plan in extend.values()):
            shapes = shapes[-1:]
        plans = self.plan_padded_decodes(host["req_pool_indices"][num_extends:], decode_lens, shapes)
        for window, plan in extend.items():
            shares = plans.shape.shares and window is None
            capacity = self._extend_capacity(num_tokens, num_extends, tile_tokens, shares=shares)
            extend[window] = padded_extends(plan, capacity, num_tokens, num_extends, int(num_new[-1]))
        return replace(plans, extend=extend)

    def _decodes(
        self, rows: Int32Array, seq_lens: Int32Array, shapes: Sequence[PlanShape]
    ) -> tuple[DecodePlans, PlanShape]:
        """The plans by window, not padded, and the one of the shapes that they are for."""
        flat = [shape for shape in shapes if not shape.shares]
        trees = [shape for shape in shapes if shape.shares]
        tail_starts, shared = np.zeros_like(rows), NOTHING_SHARED
        if trees:
            shareable, capacity = np.maximum(seq_lens - 1, 0), self._sharing.capacity(len(rows))
            tail_starts, shared = self._sharing.find(self._req_to_token, rows, shareable, capacity=capacity)
        any_shared = len(shared.lens) > 0
        candidates = trees if any_shared or not flat else flat
        cuts = any(shape.cuts for shape in candidates)
        plans: DecodePlans = {}
        for window in self._windows:
            if window is None and (any_shared or not (flat or cuts)):
                plans[window] = self._tree(rows, seq_lens, tail_starts, shared, cuts=cuts)
            else:
                read = seq_lens if window is None else seq_lens.clip(max=window)
                item_len = self._shape.decode_item_len(read) if cuts else None
                plans[window] = self._flat(rows, seq_lens, window, item_len)
        return plans, candidates[-1] if PassPlans(plans).shape.cuts else candidates[0]

    def _tree(
        self, rows: Int32Array, seq_lens: Int32Array, tail_starts: Int32Array, shared: SharedItems, *, cuts: bool
    ) -> AttentionPlan[Int32Array]:
        tails, max_item_len = np.maximum(seq_lens - tail_starts, 0), None
        if cuts:
            max_item_len = self._shape.decode_item_len(tails)
        else:
            fair = int(tails.sum(dtype=np.int64)) // self._shape.decode_wave
            head_lens = tails - max(self._tuning.long_tail, fair)
            tail_starts, shared = self._split_heads_of_context(rows, tail_starts, head_lens, shared)
        return AttentionPlan.tree(rows, seq_lens, tail_starts, shared, max_item_len=max_item_len)

    def _extends(
        self, host: HostArrays, count: int, num_tokens: int, window: Window, tile_tokens: int | None = None
    ) -> ExtendPlan[Int32Array]:
        """The plan of the first `count` requests, to be padded to `num_tokens` if `tile_tokens` are given."""
        names = ("req_pool_indices", "prefix_lens", "extend_start_loc", "extend_seq_lens")
        rows, prefix, first_rows, counts = (host[name][:count] for name in names)
        is_short_pass = num_tokens <= self._tuning.max_cut_tokens
        tail_starts, shared = None, NOTHING_SHARED
        if window is None and is_short_pass:
            is_short = counts <= self._tuning.short_extend * self._sharing.rows_at_once
            tail_starts, shared = self._sharing.find(
                self._req_to_token,
                rows,
                np.where(is_short, prefix, 0),
                first_rows=first_rows,
                counts=counts,
                capacity=self._extend_sharing(num_tokens),
            )
        return self._shape.plan_extends(
            prefix,
            first_rows,
            counts,
            tile_tokens=tile_tokens,
            cut=is_short_pass or tile_tokens is None,
            sliding_window=window,
            tail_starts=tail_starts,
            shared=shared,
        )

    def _decode_capacity(self, count: int, shape: PlanShape, window: Window) -> PlanCapacity:
        num_items, num_partials = count, 0
        if shape.cuts:  # rows without tokens are items, too
            num_items = num_partials = self._shape.max_decode_items(count) + -(-count // EMPTY_ROWS)
        if not shape.shares or window is not None:
            return PlanCapacity(num_items, num_partials, shape.cuts)
        shared = self._sharing.capacity(count)
        return PlanCapacity(num_items, num_partials + shared.num_partials, shape.cuts, shared.num_items)

    def _extend_capacity(
        self, num_tokens: int, num_extends: int, tile_tokens: int, *, shares: bool
    ) -> PlanCapacity:
        num_items = num_tokens // tile_tokens + num_extends
        if num_tokens > self._tuning.max_cut_tokens:
            return PlanCapacity(num_items, 0, merges=False)
        extra = self._shape.max_extra_extend_items
        num_items, num_partials = num_items + extra, num_tokens + extra * tile_tokens
        if not shares:
            return PlanCapacity(num_items, num_partials, merges=True)
        shared = self._extend_sharing(num_tokens)
        return PlanCapacity(num_items, num_partials + shared.num_partials, True, shared.num_items)

    def _extend_sharing(self, num_tokens: int) -> SharedCapacity:
        """What plans of so many tokens of extends have room for; all their items may be of whole tiles."""
        num_items, num_partials = self._sharing.capacity(num_tokens)
        return SharedCapacity(num_items + num_partials // self._sharing.rows_at_once, num_partials)

    def _split_heads_of_context(
        self, rows: Int32Array, tail_starts: Int32Array, head_lens: Int32Array, shared: SharedItems
    ) -> tuple[Int32Array, SharedItems]:
        """Shorten tails that are not cut by their first `head_lens` `[R]` tokens, so that others need not wait for
        them: these become shared items of one row each, the longest first, as far as there is room.
        """
        capacity, piece_len = self._sharing.capacity(len(rows)), self._tuning.head_piece
        longest = np.argsort(-head_lens, kind="stable")[: np.count_nonzero(head_lens >= self._tuning.min_head)]
        pieces = -(-head_lens[longest] // piece_len)
        left = min(capacity.num_items - len(shared.lens), capacity.num_partials - int(shared.query_lens.sum()))
        fit = np.count_nonzero(np.cumsum(pieces) <= left)
        if not fit:
            return tail_starts, shared
        longest, pieces = longest[:fit], pieces[:fit]
        queries = np.concatenate([shared.queries, np.setdiff1d(longest, shared.queries).astype(np.int32)])
        place = np.zeros_like(rows)  # of each row among the queries
        place[queries] = np.arange(len(queries))
        row = np.repeat(longest, pieces)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * piece_len
        own = SharedItems(
            req_pool_indices=rows[row],
            starts=tail_starts[row] + offset,
            lens=np.minimum(head_lens[row] - offset, piece_len),
            query_starts=place[row],
            query_lens=np.ones_like(row),
            queries=queries[:0],
        )
        tail_starts = tail_starts.copy()
        tail_starts[longest] += head_lens[longest]
        columns = zip(vars(shared).values(), vars(own).values(), strict=True)
        joined = SharedItems(*(np.concatenate([column, more.astype(np.int32)]) for column, more in columns))
        return tail_starts, replace(joined, queries=queries)


def planner_of(
    config: ModelConfig,
    placement: Placement,
    req_to_token: Int32Array,
    kv_dtype: torch.dtype | None = None,
    *,
    tree: bool = False,
) -> ReferencePlanner:
    """The planner of a model's passes: an AttentionPlanner where the kernels run.

    `kv_dtype` is the pool's (None: the model's). With `tree`, requests read what they share once for all of them,
    where that is cheaper.
    """
    windows = tuple({kind.window for kind in config.attention})
    if not runs_triton(placement.impl, placement.device):
        return ReferencePlanner(windows, req_to_token)
    gpu, dtype = gpu_of(placement.device), placement.dtype
    shape = KernelShape(gpu, config.num_heads, config.num_kv_heads, config.head_dim, dtype)
    return kernel_planner(shape, windows, req_to_token, kv_dtype or dtype, tree=tree)


def kernel_planner(
    shape: KernelShape,
    windows: Sequence[Window],
    req_to_token: Int32Array,
    kv_dtype: torch.dtype,
    *,
    tree: bool,
    tuning: PlanTuning | None = None,
) -> AttentionPlanner:
    """The planner of such kernels over a pool of that dtype, with the tuning of the GPU; see `planner_of`."""
    tuning = tuning or plan_tuning(shape.gpu)
    sharing: SharedSegments | NoSharing = NoSharing()
    if tree and None in windows:
        sharing = SharedSegments(shape, kv_dtype.itemsize, shape.shared_rows, tuning)
    return AttentionPlanner(shape, windows, req_to_token, tuning, sharing)
