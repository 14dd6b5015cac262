"""Merging partial results of attention by their log-sum-exp (FlashDecoding, Dao et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.attention.plan import SharingPlan
from triton_ops.attention.softmax import LOG2_E, finish_rows
from triton_ops.implementation import gdc_launch_dependents, gdc_wait, next_power_of_2, overlapped, tl, triton
from triton_ops.tuning import MERGE_PARTIALS, MERGE_WARPS


@dataclass(frozen=True)
class Partials:
    """Partial results on the device.

    Attributes:
        out: float32 `[P, num_heads, head_dim]`, each normalised by itself.
        lse: float32 `[P, num_heads]`, log-sum-exps in base 2; -inf of a part that saw nothing.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, plan: SharingPlan, q: Tensor) -> Partials:
        """Memory for the partial results of a plan, uninitialised."""
        shape = (plan.row_partials.shape[0], *q.shape[1:])
        return cls(
            torch.empty(shape, dtype=torch.float32, device=q.device),
            torch.empty(shape[:2], dtype=torch.float32, device=q.device),
        )


def merge_rows(
    rows: Sequence[Tensor],
    parts: Sequence[Tensor],
    part_lses: Sequence[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    """Merge partial results in torch, as `merge_partials` does. Returns `out`.

    Args:
        rows: int64 `[n]` each, the row of each partial result; `num_rows` is none.
        parts, part_lses: float32 `[n, num_heads, head_dim]` and `[n, num_heads]` each, in natural logarithms.

    A row without partial results becomes zero.
    """
    num_rows, num_heads, head_dim = out.shape
    if sinks is not None:
        rows = [*rows, torch.arange(num_rows, device=out.device)]
        parts = [*parts, torch.zeros(out.shape, device=out.device)]
        part_lses = [*part_lses, sinks.expand(num_rows, num_heads)]
    if not rows:
        if lse is not None:
            lse.fill_(-torch.inf)
        return out.zero_()
    row, part, part_lse = torch.cat(list(rows)), torch.cat(list(parts)), torch.cat(list(part_lses))

    # Finite even where a window hides all of a row's items, as -inf less -inf would be NaN.
    max_lse = torch.full((num_rows + 1, num_heads), -torch.inf, device=out.device)
    max_lse.scatter_reduce_(0, row.unsqueeze(1).expand_as(part_lse), part_lse, "amax")
    finite = max_lse.clamp(min=torch.finfo(torch.float32).min)
    weight = torch.exp(part_lse - finite[row])
    total = torch.zeros_like(max_lse).index_add_(0, row, weight)
    merged = torch.zeros(num_rows + 1, num_heads, head_dim, device=out.device)
    merged.index_add_(0, row, part * weight.unsqueeze(-1))
    if lse is not None:
        lse.copy_((finite + total.log())[:-1])
    return out.copy_((merged / total.masked_fill_(total == 0.0, 1.0).unsqueeze(-1))[:-1])


def merge_partials(
    partials: Partials, plan: SharingPlan, sinks: Tensor | None, out: Tensor, lse: Tensor | None
) -> None:
    """Write the merged rows to `out` and `lse`; a row without partial results is left as it is. Runs on a GPU.

    Args:
        plan: says which partial results each row merges.
        sinks: as in `Scoring`.
        out: `[num_rows, num_heads, head_dim]`, any float dtype, contiguous.
        lse: float32 `[num_rows, num_heads]`, contiguous, or None; natural logarithms.
    """
    num_rows, num_heads, head_dim = out.shape
    _merge_kernel[(num_rows, num_heads)](
        partials.out,
        partials.lse,
        plan.row_partial_starts,
        plan.row_partials,
        sinks,
        out,
        lse,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_P=MERGE_PARTIALS,
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        num_warps=MERGE_WARPS,
        **overlapped(out.device, num_rows),
    )


@triton.jit
def _merge_kernel(
    partial_out, partial_lse, row_partial_starts, row_partials, sinks, out, lse,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(row_partial_starts + row), tl.load(row_partial_starts + row + 1)
    if start == end:
        return
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for first in range(start, end, BLOCK_P):
        index = first + tl.arange(0, BLOCK_P)
        live = index < end
        part = tl.load(row_partials + index, mask=live, other=0).to(tl.int64) * NUM_HEADS + head
        lses = tl.load(partial_lse + part, mask=live, other=float("-inf"))
        values = tl.load(
            partial_out + part[:, None] * HEAD_DIM + d[None, :],
            mask=live[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        greatest = tl.maximum(row_max, tl.max(lses, 0))
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        weights = tl.exp2(lses - base)
        keep = tl.exp2(row_max - base)
        acc = acc * keep[:, None] + tl.sum(values * weights[:, None], 0)[None, :]
        row_sum = row_sum * keep + tl.sum(weights, 0)
        row_max = greatest
    sink = tl.load(sinks + head + tl.zeros([1], tl.int32)) if HAS_SINKS else row_max
    merged, merged_lse = finish_rows(acc, row_max, row_sum, sink, HAS_SINKS)
    at = row.to(tl.int64) * NUM_HEADS + head
    tl.store(out + at * HEAD_DIM + d[None, :], merged.to(out.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])
    if HAS_LSE:
        tl.store(lse + at + tl.zeros([1], tl.int64), merged_lse / LOG2_E)


@triton.jit
def merge_partials_into(
    acc, row_max, row_sum, m, kv_head, partials, count, partial_out, partial_lse,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge the partial results `partials[:count]` of a query row into the softmax of the group's heads: row m of
    `acc [BLOCK_M, BLOCK_D]` is head m of the group; further rows stay as they are.

    Partial results of several items and heads are read at a time and added by one product of this PRECISION, with
    weights that are zero where the heads differ.
    """
    BLOCK_K: tl.constexpr = 16  # the fewest that tl.dot takes
    d = tl.arange(0, BLOCK_D)[None, :]
    for first in range(0, count * GROUP, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        live = k < count * GROUP
        part = tl.load(partials + k // GROUP, mask=live, other=0).to(tl.int64)
        at = part * NUM_HEADS + kv_head * GROUP + k % GROUP
        lses = tl.load(partial_lse + at, mask=live, other=float("-inf"))
        in_head = live[:, None] & (d < HEAD_DIM)
        values = tl.load(partial_out + at[:, None] * HEAD_DIM + d, mask=in_head, other=0.0)
        lses = tl.where((k % GROUP)[None, :] == m[:, None], lses[None, :], float("-inf"))
        greatest = tl.maximum(row_max, tl.max(lses, 1))
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        weights = tl.exp2(lses - base[:, None])
        keep = tl.exp2(row_max - base)
        row_sum = row_sum * keep + tl.sum(weights, 1)
        row_max = greatest
        acc = acc * keep[:, None]
        acc = tl.dot(weights, values, acc, input_precision=PRECISION)
    return acc, row_max, row_sum
