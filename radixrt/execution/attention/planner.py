"""AttentionPlans of a pass, built on the host: what attention reads, cut to what the GPU can do side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from layers.placement import Placement
from radixrt.execution.attention.flat import (
    decode_item_len,
    fair_item_len,
    most_decode_items,
    most_extra_extend_items,
    plan_extends,
    programs_of,
)
from radixrt.execution.attention.shared_segments import SharedSegments, TreeCosts
from radixrt.execution.staging import padded
from radixrt.models.config import AttentionKind
from triton_ops.attention.extend import extend_tile_tokens
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

# Padded extends of more tokens are not cut, and none of more tokens share: merging all their rows would cost more.
MOST_CUT_TOKENS = 2048
LONG_ITEM = 4096  # tokens that a program may read by itself, though a fair share were less
# Tokens of a tail that is not cut, though a fair share were less: what is before is read as if it were shared.
LONG_TAIL = 512
FRONT_PIECE, SHORTEST_FRONT = 512, 128  # tokens of an item of that, and of what is not worth one
MERGES_BELOW = 64  # decodes: smaller batches always merge partial results, for their contexts are mostly cut
SHARED_PROGRAMS_PER_SM = 2  # of shared items, that run side by side
# Tiles of shared items: an extend of more rows fills most of its own, and gains little by sharing them.
SHORT_EXTEND = 4


class PlanKind(IntFlag):
    """What the plans of a pass's decodes are made of: in padded passes that decides their shapes.

    WHOLE: an item for each decode. CUT: long contexts, or tails of them, are several, whose results a kernel of
    its own merges. TREE: what decodes share is read once for all of them. Plans may be both.
    """

    WHOLE = 0
    CUT = 1
    TREE = 2


@dataclass(frozen=True)
class PassPlans:
    """The plans of a pass: `arrays` to be copied to the device, and what becomes of the copies.

    `tile_tokens` is that of the extends' plans; None: there are none.
    """

    arrays: dict[str, Int32Array]
    windows: tuple[int | None, ...]
    tile_tokens: int | None

    @property
    def kind(self) -> PlanKind:
        """That of the decodes' plans."""

        def some(field: str) -> bool:
            return any(len(self.arrays[f"decode {window} {field}"]) for window in self.windows)

        cut = PlanKind.CUT if some("row_partial_starts") else PlanKind.WHOLE
        return cut | PlanKind.TREE if some("shared_lines") else cut

    def decode(self, arrays: Mapping[str, Tensor]) -> dict[int | None, AttentionPlan]:
        """The decodes' plans, of the copies."""
        return {window: AttentionPlan.from_arrays(arrays, f"decode {window} ") for window in self.windows}

    def extend(self, arrays: Mapping[str, Tensor]) -> dict[int | None, ExtendPlan]:
        """The extends' plans, of the copies; empty where there are none."""
        if self.tile_tokens is None:
            return {}
        return {
            window: ExtendPlan.from_arrays(arrays, f"extend {window} ", tile_tokens=self.tile_tokens)
            for window in self.windows
        }


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


class AttentionPlanner:
    """Plans each pass of a model, one plan for each window among its layers.

    Where the kernels run, long contexts are cut so that all multiprocessors have work; the references need no
    cuts, and no plan of the extends.

    Args:
        config, placement: the model's.
        req_to_token: the host's table, which tells who reads the same.
        kv_dtype: of the pool.
        tree: where the kernels run, layers without a window read what decodes share once for all of them,
            wherever that is cheaper; so do extends of what is in their prefixes.
    """

    def __init__(
        self,
        config: ModelHeads,
        placement: Placement,
        req_to_token: Int32Array | None = None,
        kv_dtype: torch.dtype | None = None,
        *,
        tree: bool = False,
    ) -> None:
        self._config = config
        self._req_to_token = req_to_token
        self._dtype = placement.dtype
        self._gpu = gpu_of(placement.device) if runs_triton(placement.impl, placement.device) else None
        self._windows = tuple({kind.window for kind in config.attention})
        self._shared: SharedSegments | None = None
        if tree and self._gpu is not None and None in self._windows:
            rows_at_once = shared_rows(
                self._gpu, config.head_dim, config.num_heads // config.num_kv_heads, placement.dtype
            )
            self._rows_at_once = rows_at_once
            self._shared = SharedSegments(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                kv_bytes=(kv_dtype or placement.dtype).itemsize,
                num_programs=SHARED_PROGRAMS_PER_SM * self._gpu.num_sms,
                rows_at_once=rows_at_once,
                costs=TreeCosts(),
            )

    def most_partial_bytes(self, num_decodes: int, num_tokens: int) -> int:
        """What the partial results of decodes, and of `num_tokens` of extends, take at most while a layer attends;
        0 where nothing is cut.
        """
        if self._gpu is None:
            return 0
        config, most = self._config, min(num_tokens, MOST_CUT_TOKENS)
        group = config.num_heads // config.num_kv_heads
        tile_tokens = extend_tile_tokens(self._gpu, config.head_dim, group, self._dtype, short=False)
        partials = self._most_items(num_decodes)
        partials += most + most_extra_extend_items(self._gpu, config.num_kv_heads) * tile_tokens
        if self._shared is not None:
            partials += self._shared.room(num_decodes)[1] + self._room_of_extends(most)[1]
        return partials * config.num_heads * 4 * (config.head_dim + 1)  # float32, and the log-sum-exps

    @property
    def kinds(self) -> tuple[PlanKind, ...]:
        """Those that plans may be of."""
        flat = (PlanKind.WHOLE, PlanKind.CUT)
        return flat if self._shared is None else (*flat, *(kind | PlanKind.TREE for kind in flat))

    def kinds_of_extends(self, num_tokens: int, num_decodes: int) -> tuple[PlanKind, ...]:
        """Those that plans of padded passes with so many tokens of extends, and room for so many decodes, may be
        of. In long ones it does not show that what reads shared items is launched though there are none.
        """
        if self._shared is None:
            return (PlanKind.CUT,)
        tree = self._tree_kind(num_decodes)
        return (PlanKind.CUT, tree) if num_tokens <= MOST_CUT_TOKENS else (tree,)

    @staticmethod
    def _tree_kind(num_decodes: int) -> PlanKind:
        """Of passes with extends, where something is shared."""
        return PlanKind.TREE if num_decodes >= MERGES_BELOW else PlanKind.CUT | PlanKind.TREE

    def plan(self, host: Mapping[str, Int32Array], num_extends: int) -> PassPlans:
        """The plans for a pass of `InputMetadata.host_arrays` whose first `num_extends` requests are extends."""
        arrays = self._decodes(host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:])
        tile_tokens = None
        if self._gpu is not None and num_extends:
            num_tokens = int(host["extend_seq_lens"][:num_extends].sum())
            for window in self._windows:
                extend, tile_tokens = self._extends(self._gpu, host, num_extends, num_tokens, window)
                arrays |= {f"extend {window} {name}": array for name, array in extend.items()}
        return PassPlans(arrays, self._windows, tile_tokens)

    def plan_padded(
        self, rows: Int32Array, seq_lens: Int32Array, *, least: PlanKind = PlanKind.WHOLE
    ) -> PassPlans:
        """The plans for decodes `[R]`, of shapes that depend on R and on their kind alone: what they need, and
        what `least` has. Padded decodes are the last ones, with a `seq_len` of 0. Of both kinds they are only if
        `least` is CUT; if it is TREE, they are of no other.
        """
        assert self._gpu is not None  # the references take any shape
        count = len(rows)
        decodes = self._decodes(rows, seq_lens, cut_tails=PlanKind.CUT in least, may_cut=least != PlanKind.TREE)
        plans = PassPlans(decodes, self._windows, None)
        kind = least | plans.kind
        flat = {"item": count}
        if PlanKind.CUT in kind:
            items = self._most_items(count)
            flat = {"item": items, "row_partials": items, "row_partial_starts": count + 1}
        tree = flat
        if PlanKind.TREE in kind:
            assert self._shared is not None  # such plans are its
            most_items, most_partials = self._shared.room(count)
            tree = flat | {
                "row_partials": flat.get("row_partials", 0) + most_partials,
                "tail_partial_starts": count + 1,
                "shared": most_items,
                "shared_queries": count,
            }

        def in_place(name: str, array: Int32Array) -> Int32Array:
            _, window, field = name.split(" ")
            lens = tree if window == "None" else flat
            place = field if field in lens else field.partition("_")[0]
            return padded(array, lens[place]) if place in lens else array

        arrays = {name: in_place(name, array) for name, array in plans.arrays.items()}
        return PassPlans(arrays, self._windows, None)

    def plan_padded_extends(
        self,
        host: Mapping[str, Int32Array],
        num_extends: int,
        num_live: int,
        decode_lens: Int32Array,
        *,
        least: PlanKind,
    ) -> PassPlans | None:
        """The plans for a pass of `InputMetadata.host_arrays` with `num_extends` extends: `num_live` real ones,
        then such without tokens, and a last one whose tokens pad the pass and get results of zero; and of decodes
        `[R]` with `decode_lens`, 0 for padded ones. Shapes depend on the numbers of extends, of their tokens and
        of decodes, and on the kind of the plans, alone: what they need, and what `least` has. None: one extend
        would read so much by itself that a plan of its own, which cuts it, is better.
        """
        gpu, num_kv_heads = self._gpu, self._config.num_kv_heads
        assert gpu is not None  # the references need no plan of extends
        num_new = host["extend_seq_lens"][:num_extends]
        num_tokens = int(num_new.sum())
        cut = num_tokens <= MOST_CUT_TOKENS
        plans = {
            window: self._extends(gpu, host, num_live, num_tokens, window, short=False, cut=cut)
            for window in self._windows
        }
        if any(len(plan["shared_lines"]) for plan, _ in plans.values()):
            least = self._tree_kind(len(decode_lens))
        rows = host["req_pool_indices"][num_extends:]
        trees_are_whole = least == PlanKind.CUT and self._tree_kind(len(rows)) == PlanKind.TREE
        decodes = self.plan_padded(rows, decode_lens, least=PlanKind.WHOLE if trees_are_whole else least)
        if trees_are_whole and PlanKind.TREE not in decodes.kind:
            decodes = self.plan_padded(rows, decode_lens, least=least)
        arrays, tile_tokens = decodes.arrays, 0
        for window, (plan, tile_tokens) in plans.items():
            fair = int(plan["item_lens"].sum()) * num_kv_heads // programs_of(gpu)
            if int(plan["item_lens"].max(initial=0)) > max(fair, LONG_ITEM) and not cut:
                return None
            # Tiles of zeros for the padding; behind them items of no tokens, whose tiles begin beyond its end.
            most_items = num_tokens // tile_tokens + num_extends
            most_partials = 0
            if cut:
                extra = most_extra_extend_items(gpu, num_kv_heads)
                most_items, most_partials = most_items + extra, num_tokens + extra * tile_tokens
            begins = np.arange(0, num_new[-1], tile_tokens, dtype=np.int32)
            num_items = len(plan["item_lens"]) + len(begins)
            begins = np.append(begins, np.full(most_items - num_items, num_tokens, np.int32))
            padding: dict[str, ArrayLike] = {
                "item_requests": num_extends - 1,
                "item_query_starts": begins,
                "item_partials": -1,
            }
            for name in ("item_requests", "item_query_starts", "item_starts", "item_lens", "item_partials"):
                plan[name] = padded(plan[name], most_items, padding.get(name, 0))
            if cut and PlanKind.TREE in decodes.kind and window is None:
                most_shared, most_partials_of_shared = self._room_of_extends(num_tokens)
                most_partials += most_partials_of_shared
                for field in fields(SharedItems):
                    name = f"shared_{field.name}"
                    plan[name] = padded(plan[name], num_tokens if field.name == "queries" else most_shared)
                plan["shared_partials"] = padded(plan["shared_partials"], most_shared)
                plan["seq_lens"] = padded(plan["seq_lens"], num_tokens)
            if cut:
                starts = plan["row_partial_starts"]
                plan["row_partials"] = padded(plan["row_partials"], most_partials)
                plan["row_partial_starts"] = padded(starts, num_tokens + 1, starts[-1] if len(starts) else 0)
            arrays = arrays | {f"extend {window} {name}": array for name, array in plan.items()}
        return PassPlans(arrays, self._windows, tile_tokens)

    def _extends(
        self,
        gpu: GPU,
        host: Mapping[str, Int32Array],
        count: int,
        num_tokens: int,
        window: int | None,
        *,
        short: bool | None = None,
        cut: bool = True,
    ) -> tuple[dict[str, Int32Array], int]:
        """`plan_extends` of the first `count` requests, in a pass with room for `num_tokens` of extends."""
        config = self._config
        names = ("req_pool_indices", "prefix_lens", "extend_start_loc", "extend_seq_lens")
        rows, prefix, first_rows, counts = (host[name][:count] for name in names)
        tail_starts, shared = None, NOTHING_SHARED
        may_share = window is None and num_tokens <= MOST_CUT_TOKENS
        if may_share and self._shared is not None and self._req_to_token is not None:
            most_items, most_partials = self._room_of_extends(num_tokens)
            tail_starts, shared = self._shared.find(
                self._req_to_token,
                rows,
                np.where(counts <= SHORT_EXTEND * self._rows_at_once, prefix, 0),
                first_rows=first_rows,
                counts=counts,
                most_items=most_items,
                most_partials=most_partials,
            )
        return plan_extends(
            prefix,
            first_rows,
            counts,
            gpu=gpu,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
            sliding_window=window,
            tail_starts=tail_starts,
            shared=shared,
            short=short,
            cut=cut,
        )

    def _room_of_extends(self, num_tokens: int) -> tuple[int, int]:
        """The shared items, and the results of tokens in all, that plans of so many tokens have room for."""
        assert self._shared is not None
        most_items, most_partials = self._shared.room(num_tokens)
        return most_items + most_partials // self._rows_at_once, most_partials  # all may be of whole tiles

    def _decodes(
        self, rows: Int32Array, seq_lens: Int32Array, *, cut_tails: bool = True, may_cut: bool = True
    ) -> dict[str, Int32Array]:
        tree = self._tree(rows, seq_lens, cut_tails, must=not may_cut)
        arrays: dict[str, Int32Array] = {}
        for window in self._windows:
            if tree is not None and window is None:
                decode = tree
            else:
                decode = self._flat(rows, seq_lens, window, cut=cut_tails or (tree is None and may_cut))
            arrays |= {f"decode {window} {name}": array for name, array in decode.items()}
        return arrays

    def _flat(
        self, rows: Int32Array, seq_lens: Int32Array, window: int | None, cut: bool
    ) -> dict[str, Int32Array]:
        read = seq_lens if window is None else seq_lens.clip(max=window)
        return AttentionPlan.flat_arrays(
            rows,
            seq_lens,
            max_item_len=self._item_len(read) if cut else None,
            sliding_window=window,
            req_to_token=self._req_to_token,
        )

    def _tree(self, rows: Int32Array, seq_lens: Int32Array, cut: bool, must: bool) -> dict[str, Int32Array] | None:
        """None, unless there must be one: a flat plan is as cheap."""
        if self._shared is None or self._req_to_token is None:
            return None
        most_items, most_partials = self._shared.room(len(rows))
        shareable = np.maximum(seq_lens - 1, 0)
        tail_starts, shared = self._shared.find(
            self._req_to_token, rows, shareable, most_items=most_items, most_partials=most_partials
        )
        if not len(shared.lines) and not must:
            return None
        tails = np.maximum(seq_lens - tail_starts, 0)
        item_len = self._item_len(tails) if cut else None
        if not cut:
            assert self._gpu is not None
            longest = max(LONG_TAIL, fair_item_len(self._gpu, self._config.num_kv_heads, tails))
            tail_starts, shared = _with_fronts(
                rows, tail_starts, tails, longest, shared, most_items, most_partials
            )
        return AttentionPlan.tree_arrays(rows, seq_lens, tail_starts, shared, max_item_len=item_len)

    def _most_items(self, num_decodes: int) -> int:
        """Of decodes that are cut, the padded ones' included."""
        assert self._gpu is not None
        most = most_decode_items(self._gpu, self._config.num_kv_heads, num_decodes)
        return most + -(-num_decodes // EMPTY_ROWS)

    def _item_len(self, lens: Int32Array) -> int | None:
        return None if self._gpu is None else decode_item_len(self._gpu, self._config.num_kv_heads, lens)


def _with_fronts(
    rows: Int32Array,
    tail_starts: Int32Array,
    tails: Int32Array,
    most: int,
    shared: SharedItems,
    most_items: int,
    most_partials: int,
) -> tuple[Int32Array, SharedItems]:
    """Tails that are not cut, but shortened to `most` tokens, so that others need not wait for them: what is
    before becomes shared items of one row each, for the longest tails first, as far as there is room.
    """
    fronts = tails - most
    longest = np.argsort(-fronts, kind="stable")[: np.count_nonzero(fronts >= SHORTEST_FRONT)]
    pieces = -(-fronts[longest] // FRONT_PIECE)
    room = min(most_items - len(shared.lines), most_partials - int(shared.query_lens.sum()))
    fit = np.count_nonzero(np.cumsum(pieces) <= room)
    if not fit:
        return tail_starts, shared
    longest, pieces = longest[:fit], pieces[:fit]
    queries = np.concatenate([shared.queries, np.setdiff1d(longest, shared.queries).astype(np.int32)])
    place = np.zeros_like(rows)  # of each row among the queries
    place[queries] = np.arange(len(queries))
    row = np.repeat(longest, pieces)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    own = SharedItems(
        lines=rows[row],
        starts=(tail_starts[row] + nth * FRONT_PIECE).astype(np.int32),
        lens=np.minimum(fronts[row] - nth * FRONT_PIECE, FRONT_PIECE).astype(np.int32),
        query_starts=place[row],
        query_lens=np.ones(len(row), np.int32),
        queries=queries,
    )
    tail_starts = tail_starts.copy()
    tail_starts[longest] += fronts[longest]
    names = ("lines", "starts", "lens", "query_starts", "query_lens")
    joined = {name: np.concatenate([getattr(shared, name), getattr(own, name)]) for name in names}
    return tail_starts, SharedItems(**joined, queries=queries)
