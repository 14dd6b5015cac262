"""The smallest logits that top-k and top-p keep, found without a sort.

The kernel, one program a row, bisects the logits' bits, ordered as integers, in at most 16 or 32 steps. Each step
is a count (top-k) or an exact sum of masses (top-p) of the row's logits from the middle on. It serves the rows
that have too many candidates for `candidate_draw`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import next_power_of_2, tl, triton
from triton_ops.sampling.logit_bits import float_of, key_of
from triton_ops.sampling.row_maxima import greatest
from triton_ops.sampling.token_mass import (
    exp2_alike,
    exponent_scale,
    join_halves,
    load_scale,
    mass_halves,
    share_of_mass,
    token_mass,
)
from triton_ops.tuning import SUM_REGISTERS, THRESHOLD_TILE


def reference_thresholds(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None
) -> Tensor:
    """The smallest logit that top-k, then top-p, keep of each row of float32 `logits [R, vocab_size]`: `[R]`."""
    descending = logits.sort(dim=-1, descending=True).values
    scale = exponent_scale(temperatures).unsqueeze(1)
    return min_kept(descending, token_mass(descending, descending[:, :1], scale), top_ks, top_ps)


def min_kept(values: Tensor, mass: Tensor, top_ks: Tensor | None, top_ps: Tensor | None) -> Tensor:
    """The smallest of the descending `values [R, vocab_size]`, of int64 `mass`, that top-k, then top-p, keep."""
    vocab_size = values.shape[1]
    if top_ks is not None:
        last = torch.where((top_ks > 0) & (top_ks < vocab_size), top_ks, vocab_size).long() - 1
        mass = mass * (values >= values.gather(1, last.unsqueeze(1)))
    else:
        last = torch.full((values.shape[0],), vocab_size - 1, device=values.device)
    if top_ps is not None:
        cumulative = mass.cumsum(dim=-1)
        # A token is kept if those before it fall short of p. Where p is 1 all are, which float64 might round off.
        wanted = (top_ps.double().unsqueeze(1) * cumulative[:, -1:]).ceil().long()
        short = (cumulative - mass < wanted).sum(dim=-1) - 1
        last = torch.where(top_ps < 1.0, torch.minimum(short.clamp_(min=0), last), last)
    return values.gather(1, last.unsqueeze(1)).squeeze(1)


def logit_thresholds(
    rows: Tensor,
    maxima: Tensor,
    temperatures: Tensor,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    done: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """By the kernel, `reference_thresholds` of `rows [R, vocab_size]` in any float dtype with their
    `chunk_maxima`, and the greatest logits, float32 `[R]` both. The threshold is -inf where neither filter is on.
    Rows that are `done`, bool `[R]` or None, get any numbers.
    """
    num_rows, vocab_size = rows.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    maximum = torch.empty_like(thresholds)
    if num_rows:
        _thresholds_kernel[(num_rows,)](
            rows,
            maxima,
            temperatures,
            top_ks,
            top_ps,
            done,
            thresholds,
            maximum,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            NUM_CHUNKS=maxima.shape[1],
            MAXIMA=next_power_of_2(maxima.shape[1]),
            TILE=THRESHOLD_TILE.size,
            num_warps=THRESHOLD_TILE.num_warps,
            maxnreg=SUM_REGISTERS,
        )
    return thresholds, maximum


@triton.jit
def _count(row_ptr, length, bound, TILE: tl.constexpr):
    """The number of `length` floats whose keys are at least `bound`."""
    index = tl.arange(0, TILE)
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, length, TILE):
        mask = start + index < length
        x = tl.load(row_ptr + start + index, mask=mask, other=-float("inf"))
        count += (mask & (key_of(x) >= bound)).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass_from(row_ptr, length, bound, maximum, scale, TILE: tl.constexpr):
    """The mass, relative to `maximum`, of the `length` floats whose keys are at least `bound`."""
    index = tl.arange(0, TILE)
    upper = tl.zeros((TILE,), tl.uint32)
    lower = tl.zeros((TILE,), tl.int32)
    for start in range(0, length, TILE):
        x = tl.load(row_ptr + start + index, mask=start + index < length, other=-float("inf"))
        relative = exp2_alike((x.to(tl.float32) - maximum) * scale)
        high, low = mass_halves(tl.where(key_of(x) >= bound, relative, 0.0))
        upper += high
        lower += low
    return tl.sum(join_halves(upper, lower), axis=0)


@triton.jit
def _thresholds_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    done_ptr,
    thresholds_ptr,
    maximum_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    MAXIMA: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if done_ptr is not None:
        is_done = tl.load(done_ptr + row)
        if is_done:
            return
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    row_ptr = logits_ptr + row * logits_stride
    index = tl.arange(0, MAXIMA)
    maxima = tl.load(maxima_ptr + row * NUM_CHUNKS + index, mask=index < NUM_CHUNKS, other=-float("inf"))
    maximum = greatest(maxima, 0)
    tl.store(maximum_ptr + row, maximum)

    k = tl.full((), VOCAB_SIZE, tl.int32)
    if top_ks_ptr is not None:
        asked = tl.load(top_ks_ptr + row)
        k = tl.where((asked > 0) & (asked < VOCAB_SIZE), asked, VOCAB_SIZE)
    p = tl.full((), 1.0, tl.float32)
    if top_ps_ptr is not None:
        p = tl.load(top_ps_ptr + row)
    scale, temperature = load_scale(temperatures_ptr, row)
    threshold = tl.full((), -float("inf"), tl.float32)
    # A greedy row needs no filters; one with NaN or without a finite logit is rejected anyway.
    if ((k < VOCAB_SIZE) | (p < 1.0)) & (temperature > 0.0) & (tl.abs(maximum) < float("inf")):
        # All logits reach `least`, none reaches `above`.
        least = key_of(tl.full((1,), -float("inf"), tl.float32).to(dtype)).to(tl.int64).sum()
        above = key_of(maxima.to(dtype)).max(0).to(tl.int64) + 1
        if k < VOCAB_SIZE:
            high = above
            while high - least > 1:
                middle = least + (high - least) // 2
                enough = _count(row_ptr, VOCAB_SIZE, middle.to(tl.int32), TILE) >= k
                least = tl.where(enough, middle, least)
                high = tl.where(enough, high, middle)
        if p < 1.0:
            total = _mass_from(row_ptr, VOCAB_SIZE, least.to(tl.int32), maximum, scale, TILE)
            wanted = share_of_mass(p, total)
            high = above
            while high - least > 1:
                middle = least + (high - least) // 2
                enough = _mass_from(row_ptr, VOCAB_SIZE, middle.to(tl.int32), maximum, scale, TILE) >= wanted
                least = tl.where(enough, middle, least)
                high = tl.where(enough, high, middle)
        threshold = float_of(least, dtype)
    tl.store(thresholds_ptr + row, threshold)
