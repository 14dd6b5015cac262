"""Deterministic attention: the bits of a token's result depend on the tokens up to it alone.

Not on what is cached, on chunks, on the other requests of a pass, or on how its plan cuts contexts and shares
them: `ordered_softmax` has the order in which everything is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from triton_ops.attention.arguments import (
    Scoring,
    check_arguments,
    check_window,
    kernel_arguments,
    result_arguments,
)
from triton_ops.attention.extend import Extends, extend_tile_tokens
from triton_ops.attention.merge import Partials
from triton_ops.attention.ordered_kernel import ordered_kernel, ordered_merge_kernel
from triton_ops.attention.plan import AttentionPlan, ExtendPlan, SharingPlan
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.implementation import Impl, gpu_of, next_power_of_2, runs_triton
from triton_ops.kv.view import KVView
from triton_ops.tuning import (
    DECODE_ROWS,
    MERGE_WARPS,
    SHORT_ROWS,
    AttentionConfig,
    ordered_attention_config,
)

SUPERBLOCK = 1024  # keys
# On a CPU, and the query rows of a product there: torch's path depends on the shape, so it is always the same.
CPU_SUPERBLOCK, CPU_ROWS = 128, 16
LOG2_E, LOG_2 = math.log2(math.e), math.log(2.0)
# Shared items that go on from each other, at most: one of each length of a chain in a launch of its own.
MAX_CHAIN = 2
STATE_NUMBERS = 16 + 1  # of a partial result and head, besides the values: sums of weights, and the base


def ordered_decode(
    q: Tensor,
    kv: KVView,
    req_pool_indices: Tensor,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`decode_attention` by the canonical sum. The arguments are the same, but for these:

    Args:
        req_pool_indices: int32 `[num_decodes]`, the rows of `req_to_token`; torch reads whole contexts by them.
        plan: one with a `superblock`, a multiple of 16: its items begin at multiples of it or, where they go on
            from a state or a window begins, at multiples of 16; one that leaves a partial result has keys of one
            superblock.
    """
    check_window(scoring, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not runs_triton(impl, q.device):
        return _in_torch(q, kv, req_pool_indices, plan.seq_lens - 1, scoring, out, lse)
    if q.shape[0] == 0:
        return out
    launch = _Launch(q, kv, plan, scoring, out, lse)
    launch.shared()
    config = ordered_attention_config(gpu_of(q.device), q.shape[2], q.dtype, kind="decode")
    block_m = max(DECODE_ROWS, next_power_of_2(launch.group))
    launch(
        config,
        block_m,
        "item",
        taken_starts=plan.tail_partial_starts,
        taken=plan.row_partials,
        HAS_TAKEN=plan.tail_partial_starts.shape[0] > 0,
    )
    launch.merge()
    return out


def ordered_extend(
    q: Tensor,
    kv: KVView,
    extends: Extends,
    plan: ExtendPlan | None,
    scoring: Scoring,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    superblock: int = SUPERBLOCK,
    impl: Impl = "auto",
) -> Tensor:
    """`extend_attention` by the canonical sum. The arguments are the same, but for these:

    Args:
        kv: the pool, which holds the new tokens, too; they are read there.
        plan: as in `ordered_decode`. None: whole contexts, by superblocks of `superblock` keys.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_kv_heads = kv.k.shape[1]
    group = q.shape[1] // num_kv_heads
    if not runs_triton(impl, q.device):
        lens = extends.extend_seq_lens.long()
        request = torch.repeat_interleave(lens)
        nth = torch.arange(len(request), device=q.device) - extends.extend_start_loc.long()[request]
        positions = extends.prefix_lens.long()[request] + nth
        return _in_torch(q, kv, extends.req_pool_indices[request], positions, scoring, out, lse)
    gpu, head_dim = gpu_of(q.device), q.shape[2]
    if plan is None:
        counts = extends.extend_seq_lens.cpu().numpy()
        short = int(counts.max(initial=0)) * group <= SHORT_ROWS
        plan = ExtendPlan.of_extends(
            extends.prefix_lens.cpu().numpy(),
            extends.extend_start_loc.cpu().numpy(),
            counts,
            tile_tokens=extend_tile_tokens(gpu, head_dim, group, q.dtype, short=short),
            superblock=superblock,
        ).to(q.device)
    kind: Literal["long", "short"] = "short" if plan.tile_tokens * group <= SHORT_ROWS else "long"
    alibi = scoring.alibi_slopes is not None
    config = ordered_attention_config(gpu, head_dim, q.dtype, kind=kind, alibi=alibi)
    if plan.tile_tokens != config.block_rows(group) // group:
        raise ValueError(f"the plan's tiles have {plan.tile_tokens} tokens, the kernel's another number")
    if plan.item_requests.shape[0] == 0:
        return out
    totals = _States.empty(q.shape, 1, q.device)
    launch = _Launch(q, kv, plan, scoring, out, lse)
    launch.shared()
    launch(
        config,
        config.block_rows(group),
        "item",
        req_pool_indices=extends.req_pool_indices,
        prefix_lens=extends.prefix_lens,
        extend_start_loc=extends.extend_start_loc,
        extend_seq_lens=extends.extend_seq_lens,
        item_requests=plan.item_requests,
        total_out=totals.out,
        total_sums=totals.sums,
        total_bases=totals.bases,
        EXTENDS=True,
        TOTAL_IN_MEMORY=True,
    )
    launch.merge()
    return out


# --- in torch ---


def _in_torch(
    q: Tensor,
    kv: KVView,
    req_pool_indices: Tensor,
    positions: Tensor,
    scoring: Scoring,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    """Each row `[T]` attends to its request's tokens up to its position: superblock by superblock, CPU_ROWS rows
    at a time, in float32. All numbers that products read begin at multiples of 64 bytes: on alignment, too,
    depends which path torch takes.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.k.shape[1]
    group, width = num_heads // num_kv_heads, -(-head_dim // 16) * 16
    first = torch.zeros_like(positions) if scoring.window is None else positions - scoring.window + 1
    slopes = None if scoring.alibi_slopes is None else scoring.alibi_slopes.view(num_kv_heads, group, 1) * LOG2_E
    heads = CPU_ROWS, num_kv_heads
    queries = torch.zeros(*heads, group, width, device=q.device)
    k = torch.zeros(*heads, width, CPU_SUPERBLOCK, device=q.device)
    v = torch.ones(*heads, CPU_SUPERBLOCK, width + 16, device=q.device)  # after the values: of sums of weights
    v[..., head_dim:width] = 0.0
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    # Rows of about the same length are computed together.
    order = positions.argsort(stable=True)
    for rows in torch.split(order[int((positions < 0).sum()) :], CPU_ROWS):
        count = len(rows)
        rows = torch.cat([rows, rows[-1:].expand(CPU_ROWS - count)])
        lines, position, begin = req_pool_indices[rows].long(), positions[rows].long(), first[rows]
        queries[..., :head_dim] = q[rows].view(*heads, group, head_dim)
        total = torch.zeros(*heads, group, width + 16, device=q.device)
        total_base = torch.full((*heads, group, 1), -torch.inf, device=q.device)
        low, high = int(begin.min().clamp(min=0)), int(position.max()) + 1
        for block in range(low // CPU_SUPERBLOCK, -(-high // CPU_SUPERBLOCK)):
            keys = torch.arange(block * CPU_SUPERBLOCK, (block + 1) * CPU_SUPERBLOCK, device=q.device)
            visible = (keys <= position[:, None]) & (keys >= begin[:, None])  # [CPU_ROWS, CPU_SUPERBLOCK]
            # Elsewhere the row's own slot is read: others may hold NaN, and 0 * NaN is NaN.
            slots = kv.req_to_token[lines[:, None], torch.where(visible, keys, position[:, None])]
            new_k, new_v = (x.view(CPU_ROWS, CPU_SUPERBLOCK, num_kv_heads, -1) for x in kv.gather(slots.flatten()))
            k[..., :head_dim, :] = new_k.permute(0, 2, 3, 1)
            v[..., :head_dim] = new_v.transpose(1, 2)
            scores = _product(queries, k).mul_(scoring.scale)
            if scoring.softcap is not None:
                scores = soft_cap(scores, scoring.softcap, impl="torch")
            scores = scores.mul_(LOG2_E)
            if slopes is not None:
                scores += slopes * (keys - position[:, None]).view(CPU_ROWS, 1, 1, -1)
            scores.masked_fill_(~visible.view(CPU_ROWS, 1, 1, -1), -torch.inf)
            base = scores.amax(-1, keepdim=True).ceil_()
            # Not exp2, which takes another path at the end of each thread's share.
            weights = scores.sub_(base.clamp(min=torch.finfo(torch.float32).min)).mul_(LOG_2).exp_()
            total, total_base = _add(total, total_base, _product(weights, v), base)
        if scoring.sinks is not None:
            sink = (scoring.sinks * LOG2_E).view(1, num_kv_heads, group, 1).expand_as(total_base)
            alone = torch.zeros_like(total)
            alone[..., width:] = ((sink - sink.ceil()) * LOG_2).exp()
            total, total_base = _add(total, total_base, alone, sink.ceil())
        sums = total[..., width]
        result = (total[..., :head_dim] / sums[..., None])[:count]
        out[rows[:count]] = result.reshape(count, num_heads, head_dim).to(out.dtype)
        if lse is not None:
            natural = (total_base[..., 0] + sums.log2()) / LOG2_E
            lse[rows[:count]] = natural[:count].reshape(count, num_heads)
    return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a [CPU_ROWS, num_kv_heads, M, K]` times `b [CPU_ROWS, num_kv_heads, K, N]`, both contiguous."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:3], b.shape[3])


def _add(total: Tensor, total_base: Tensor, part: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The superblocks before, and the next one; exact where one of them is empty."""
    greatest = torch.maximum(total_base, base)
    finite = greatest.clamp(min=torch.finfo(torch.float32).min)
    return total * (total_base - finite).exp2() + part * (base - finite).exp2(), greatest


# --- the kernel ---


@dataclass(frozen=True)
class _States:
    """Sums of weighted values, float32 `[n, num_heads, head_dim]`; of weights, `[n, num_heads, places]`; and bases
    `[n, num_heads]`.
    """

    out: Tensor
    sums: Tensor
    bases: Tensor

    @classmethod
    def empty(cls, shape: torch.Size | tuple[int, ...], places: int, device: torch.device) -> _States:
        """Memory for them, uninitialised."""
        sizes = shape, (*shape[:2], places), shape[:2]
        return cls(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))


_ITEM_FIELDS = (
    "starts",
    "lens",
    "query_starts",
    "query_lens",
    "queries",
    "partials",
    "sources",
    "levels",
    "req_pool_indices",
    "requests",
)
_OF_EXTENDS = ("req_pool_indices", "prefix_lens", "extend_start_loc", "extend_seq_lens")
_OF_SOME = ("taken_starts", "taken", "total_out", "total_sums", "total_bases")
_FLAGS = {"EXTENDS": False, "LISTED": False, "HAS_TAKEN": False, "TOTAL_IN_MEMORY": False}


class _Launch:
    """Launches the kernel for the items of a plan."""

    def __init__(
        self,
        q: Tensor,
        kv: KVView,
        plan: SharingPlan,
        scoring: Scoring,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        check_arguments(q, kv, scoring, out, lse)
        if plan.superblock % 16 or not plan.superblock:
            raise ValueError(f"the plan's superblock must be a multiple of 16, but is {plan.superblock}")
        self._q, self._kv, self._plan, self._scoring = q, kv, plan, scoring
        self._result = result_arguments(scoring, out, lse)
        self._partials = _States.empty((plan.row_partials.shape[0], *q.shape[1:]), STATE_NUMBERS - 1, q.device)
        self._num_shared = plan.shared_req_pool_indices.shape[0]
        self.group = q.shape[1] // kv.k.shape[1]

    def shared(self) -> None:
        """Launch for the plan's shared items: those that others go on from first."""
        config = ordered_attention_config(gpu_of(self._q.device), self._q.shape[2], self._q.dtype, kind="shared")
        for level in range(MAX_CHAIN if self._num_shared else 0):
            self(config, config.block_rows(self.group), "shared", level=level, LISTED=True)

    def __call__(
        self, config: AttentionConfig, block_m: int, items: str, *, level: int = 0, **others: Any
    ) -> None:
        """Launch for the plan's fields that begin with `items`. `others`: the kernel's arguments that differ."""
        plan, partials = self._plan, self._partials
        of_items: dict[str, Any] = {
            f"item_{name}": getattr(plan, f"{items}_{name}", None) for name in _ITEM_FIELDS
        }
        num_items = len(getattr(plan, f"{items}_lens"))
        common = kernel_arguments(self._q, self._kv, self._scoring, Partials(partials.out, partials.sums), config)
        del common["partial_lse"]
        early = self._num_shared > 0 and gpu_of(self._q.device).overlaps_launches
        ordered_kernel[(num_items * self._kv.k.shape[1],)](
            **{
                **dict.fromkeys((*_OF_EXTENDS, *_OF_SOME)),
                **_FLAGS,
                **common,
                **self._result,
                **of_items,
                "level": level,
                "seq_lens": plan.seq_lens,
                "partial_sum": partials.sums,
                "partial_base": partials.bases,
                "BLOCK_M": block_m,
                "SUPERBLOCK": plan.superblock,
                "HAS_SOURCES": self._num_shared > 0,
                "EARLY": early,
                **others,
            },
            **({"launch_pdl": True} if early else {}),
        )

    def merge(self) -> None:
        """Add the partial results of rows that several items cover, if there are such rows."""
        if not self._plan.row_partial_starts.shape[0]:
            return
        num_heads, head_dim = self._q.shape[1:]
        partials, plan, result = self._partials, self._plan, self._result
        ordered_merge_kernel[(self._q.shape[0], num_heads)](
            partials.out,
            partials.sums,
            partials.bases,
            plan.row_partial_starts,
            plan.row_partials,
            self._kv.v_scale,
            *(result[name] for name in ("sinks", "out", "lse")),
            NUM_HEADS=num_heads,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, next_power_of_2(head_dim)),
            HAS_SINKS=result["HAS_SINKS"],
            HAS_LSE=result["HAS_LSE"],
            num_warps=MERGE_WARPS,
        )
