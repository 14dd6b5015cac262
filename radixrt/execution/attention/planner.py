"""Plans attention for each pass, on the host: which KV is read, cut to what the GPU can do side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.pass_plans import CUT, WHOLE, Capacity, PassPlans, PlanShape, Window, padded_plan
from radixrt.execution.attention.shared_segments import SharedSegments
from radixrt.execution.attention.tuning import H200, PlanTuning
from triton_ops.attention.ordered import STATE_NUMBERS
from triton_ops.attention.plan import EMPTY_ROWS, NOTHING_SHARED, AttentionPlan, ExtendPlan, Int32Array

MAX_SUPERBLOCKS = 1024  # that contexts of deterministic plans are cut into, where they are cut
HostArrays = Mapping[str, Int32Array]  # those of `InputMetadata.host_arrays`


class AttentionPlanner:
    """Plans passes over a pool of `kv_dtype` for layers of these windows.

    Plans for kernels cut long contexts so that all multiprocessors have work. With `tree`, layers without a window
    read what requests share once, wherever that is cheaper. References need none of this, nor plans of extends.

    Plans for deterministic attention have a `superblock`: KV is cut at its multiples.
    """

    def __init__(
        self,
        shape: KernelShape,
        windows: Sequence[Window],
        req_to_token: Int32Array,
        kv_dtype: torch.dtype,
        *,
        tree: bool = False,
        kernels: bool = True,
        tuning: PlanTuning | None = None,
        superblock: int | None = None,
    ) -> None:
        self._shape, self._windows, self._req_to_token = shape, windows, req_to_token
        self._kernels, self._tuning, self._superblock = kernels, tuning or H200, superblock
        self._segments: SharedSegments | None = None  # nothing is shared
        if kernels and tree and None in windows:
            self._segments = SharedSegments(shape, kv_dtype.itemsize, self._tuning, superblock)

    def max_partial_bytes(self, num_decodes: int, num_tokens: int) -> int:
        """The most memory that partial results of decodes, and of `num_tokens` of extends, take in a layer."""
        plans, num_cut = self.shapes(0)[-1], min(num_tokens, self._tuning.max_cut_tokens)
        decodes = self._decode_capacity(num_decodes, plans, None)
        extends = self._extend_capacity(num_cut, 0, plans, None)
        num_partials = sum(capacity.num_partials for capacity in (*decodes, *extends))
        beside = 1 if self._superblock is None else STATE_NUMBERS  # each float32
        return num_partials * self._shape.num_heads * 4 * (self._shape.head_dim + beside)

    def shapes(self, num_decodes: int, num_tokens: int = 0) -> tuple[PlanShape, ...]:
        """The shapes of padded plans in passes of so many decodes and tokens of extends, the sharing one last."""
        few = num_decodes < self._tuning.cuts_below
        flat = (CUT,) if few or num_tokens else (WHOLE, CUT)
        if self._segments is None:
            return flat
        tree = PlanShape(cuts=few, shares=True)
        # In long passes nobody notices that the kernel for shared items is launched though there are none.
        return (*flat, tree) if num_tokens <= self._tuning.max_cut_tokens else (tree,)

    def plan(self, host: HostArrays, num_extends: int) -> PassPlans[Int32Array]:
        """The plans of a pass whose first `num_extends` requests are extends, in no more room than they need.

        Those of decodes alone say how many passes they serve; references' are for one.
        """
        rows, seq_lens = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
        decode, _ = self._decodes(rows, seq_lens, self.shapes(0) if self._kernels else (WHOLE,))
        if not num_extends or not self._kernels:
            return PassPlans(decode, num_passes=self._num_passes(decode) if self._kernels else 1)
        num_tokens = int(host["extend_seq_lens"][:num_extends].sum())
        extend = {w: self._extends(host, num_extends, num_tokens, w, pads=False) for w in self._windows}
        return PassPlans(decode, extend)

    def plan_padded_decodes(
        self, rows: Int32Array, seq_lens: Int32Array, shapes: Sequence[PlanShape] = ()
    ) -> PassPlans[Int32Array]:
        """The plans of decodes `[R]`, padded: how long their arrays are depends on R and on `shape` alone. That is
        one of `shapes`, or of `self.shapes(R)`: the one that shares, if something is shared or there is no other,
        or else the first that has room. Padded decodes come last and have a `seq_len` of 0.
        """
        plans, shape = self._decodes(rows, seq_lens, shapes or self.shapes(len(rows)))
        for window, plan in plans.items():
            plans[window] = padded_plan(plan, len(rows), *self._decode_capacity(len(rows), shape, window))
        return PassPlans(plans, num_passes=self._num_passes(plans))

    def plan_padded_extends(
        self,
        host: HostArrays,
        num_extends: int,
        num_live: int,
        decode_lens: Int32Array,
        shapes: Sequence[PlanShape] = (),
    ) -> PassPlans[Int32Array] | None:
        """The plans of a pass with extends, padded: how long their arrays are depends on the numbers of extends,
        of their tokens and of decodes, and on `shape` alone, which is chosen as for decodes. If extends share, it
        is the one that does.

        Of the extends, `num_live` are real; then come some without tokens, and a last one whose tokens pad the
        pass and get results of zero. `decode_lens` `[R]` are 0 for padded decodes. Returns None where one extend
        would read so much by itself that a plan of its own, which cuts it, is better.
        """
        num_new = host["extend_seq_lens"][:num_extends]
        num_tokens, num_padding = int(num_new.sum()), int(num_new[-1])
        extend = {w: self._extends(host, num_live, num_tokens, w, pads=True) for w in self._windows}
        may_cut = self._superblock is None
        for plan in extend.values() if num_tokens > self._tuning.max_cut_tokens and may_cut else ():
            fair = self._shape.fair_extend_len(int(plan.item_lens.sum()))
            if plan.item_lens.max(initial=0) > max(fair, self._tuning.long_item):
                return None
        shapes = shapes or self.shapes(len(decode_lens), num_tokens)
        if any(len(plan.shared_lens) for plan in extend.values()):
            shapes = shapes[-1:]
        plans = self.plan_padded_decodes(host["req_pool_indices"][num_extends:], decode_lens, shapes)
        plan_shape, last = plans.shape, num_extends - 1
        for window, plan in extend.items():
            own, shared = self._extend_capacity(num_tokens, num_extends, plan_shape, window)
            # Tiles of zeros for the padding; after them items of no tokens, whose tiles begin beyond its end.
            begins = np.arange(own.num_items - len(plan.item_lens)) * plan.tile_tokens
            begins[begins >= num_padding] = num_tokens
            extend[window] = padded_plan(
                plan, num_tokens, own, shared, item_requests=last, item_query_starts=begins, item_partials=-1
            )
        return replace(plans, extend=extend)

    def _decodes(
        self, rows: Int32Array, seq_lens: Int32Array, shapes: Sequence[PlanShape]
    ) -> tuple[dict[Window, AttentionPlan[Int32Array]], PlanShape]:
        """The plans by window, not padded, and the one of the shapes that they are for."""
        tail_starts, shared, segments = np.zeros_like(rows), NOTHING_SHARED, self._segments
        if segments is not None and shapes[-1].shares:
            shareable, capacity = np.maximum(seq_lens - 1, 0), segments.capacity(len(rows))
            tail_starts, shared = segments.find(self._req_to_token, rows, shareable, capacity=capacity)
        any_shared = len(shared.lens) > 0
        flat = [shape for shape in shapes if not shape.shares]
        candidates = shapes[-1:] if any_shared or not flat else flat
        cuts = any(shape.cuts for shape in candidates)
        plans: dict[Window, AttentionPlan[Int32Array]] = {}
        for window in self._windows:
            read = np.maximum(seq_lens - tail_starts, 0) if window is None else seq_lens.clip(max=window)
            if self._superblock is not None and window is not None:  # from a multiple of 16 on
                read = seq_lens - np.maximum(seq_lens - window, 0) // 16 * 16
            item_len = self._shape.decode_item_len(read) if cuts else None
            if self._superblock is not None and item_len is not None:
                item_len = self._cut_len(seq_lens - read, seq_lens, item_len, self._max_items(len(rows)))
            if segments is not None and window is None and (any_shared or not (flat or cuts)):
                if not cuts and self._superblock is None:  # nobody is to wait for a long tail
                    fair = int(read.sum(dtype=np.int64)) // self._shape.decode_wave
                    head_lens = read - max(self._tuning.long_tail, fair)
                    tail_starts, shared = segments.with_heads(rows, tail_starts, head_lens, shared)
                plans[window] = AttentionPlan.tree(
                    rows,
                    seq_lens,
                    tail_starts,
                    shared,
                    max_item_len=item_len,
                    superblock=self._superblock,
                )
            else:
                plans[window] = AttentionPlan.flat(
                    rows,
                    seq_lens,
                    max_item_len=item_len,
                    sliding_window=window,
                    req_to_token=self._req_to_token,
                    superblock=self._superblock,
                )
        return plans, candidates[-1] if PassPlans(plans).shape.cuts else candidates[0]

    def _extends(
        self, host: HostArrays, count: int, num_tokens: int, window: Window, *, pads: bool
    ) -> ExtendPlan[Int32Array]:
        """The plan of the first `count` requests, to be padded to `num_tokens` if it `pads`."""
        names = ("req_pool_indices", "prefix_lens", "extend_start_loc", "extend_seq_lens")
        rows, prefix, first_rows, counts = (host[name][:count] for name in names)
        is_short_pass = num_tokens <= self._tuning.max_cut_tokens
        tail_starts, shared = np.zeros_like(rows), NOTHING_SHARED
        if self._segments is not None and window is None and is_short_pass:
            is_short = counts <= self._tuning.short_extend * self._segments.rows_at_once
            tail_starts, shared = self._segments.find(
                self._req_to_token,
                rows,
                np.where(is_short, prefix, 0),
                query_rows=(first_rows, counts),
                capacity=self._segments.capacity(num_tokens, whole_tiles=True),
            )
        tile_tokens, max_item_len = self._shape.tile_tokens(None if pads else counts), None
        if is_short_pass or not pads:
            max_item_len = self._shape.extend_item_len(prefix - tail_starts, counts, tile_tokens, window)
        plan = partial(
            ExtendPlan.of_extends,
            prefix,
            first_rows,
            counts,
            tile_tokens=tile_tokens,
            sliding_window=window,
            superblock=self._superblock,
        )
        if self._superblock is None or max_item_len is None:
            return plan(max_item_len=max_item_len, tail_starts=tail_starts, shared=shared)
        # Superblocks decide about the number of pieces: there may be no room for so many.
        own = self._extend_capacity(num_tokens, count, CUT, window)[0]
        if len(shared.lens):
            found = plan(max_item_len=max_item_len, tail_starts=tail_starts, shared=shared)
            if _fits(found, own):
                return found
        while not _fits(found := plan(max_item_len=max_item_len), own):
            max_item_len *= 2
        return found

    def _cut_len(self, starts: Int32Array, ends: Int32Array, item_len: int, most: int) -> int:
        """The least length from `item_len` on, doubled, above which contexts from `starts` to `ends` may be cut at
        superblocks: padded plans have room for `most` pieces.
        """
        assert self._superblock is not None
        pieces = -(-ends // self._superblock) - starts // self._superblock
        while int(np.where(ends - starts > item_len, pieces, 1).sum()) > most:
            item_len *= 2
        return item_len

    def _max_items(self, count: int) -> int:
        """The most items of contexts that are cut."""
        most = self._shape.max_decode_items(count)
        return most if self._superblock is None else max(most, MAX_SUPERBLOCKS)

    def _num_passes(self, plans: Mapping[Window, AttentionPlan[Int32Array]]) -> int | None:
        """How many passes the plans of decodes serve at most while contexts grow; None: any number.

        An item that leaves a partial result has keys of one superblock.
        """
        size = self._superblock
        if size is None:
            return None
        left = size
        for plan in plans.values():
            leaves = np.flatnonzero((plan.item_partials >= 0) & (plan.item_lens > 0))
            ends = plan.item_starts[leaves] + plan.item_lens[leaves]
            ends = ends[ends == plan.seq_lens[plan.item_query_starts[leaves]]]
            left = int((-ends % size).min(initial=left))
        return left + 1

    def _decode_capacity(self, count: int, shape: PlanShape, window: Window) -> tuple[Capacity, Capacity]:
        """For requests' own items, and for shared ones."""
        own = Capacity(count)
        if shape.cuts:  # rows without tokens are items, too
            most = self._max_items(count) + -(-count // EMPTY_ROWS)
            own = Capacity(most, most)
        segments = self._segments if shape.shares and window is None else None
        return own, segments.capacity(count) if segments else Capacity()

    def _extend_capacity(
        self, num_tokens: int, num_extends: int, shape: PlanShape, window: Window
    ) -> tuple[Capacity, Capacity]:
        """The same for extends."""
        tile_tokens, extra = self._shape.tile_tokens(), self._shape.max_extra_extend_items
        num_items = num_tokens // tile_tokens + num_extends
        if num_tokens > self._tuning.max_cut_tokens:
            return Capacity(num_items), Capacity()
        own = Capacity(num_items + extra, num_tokens + extra * tile_tokens)
        segments = self._segments if shape.shares and window is None else None
        return own, segments.capacity(num_tokens, whole_tiles=True) if segments else Capacity()


def _fits(plan: ExtendPlan[Int32Array], own: Capacity) -> bool:
    """Whether the plan's own items, and their partial results, are no more than there is room for."""
    num_partials = len(plan.row_partials) - int(plan.shared_query_lens.sum())
    return len(plan.item_lens) <= own.num_items and num_partials <= own.num_partials
