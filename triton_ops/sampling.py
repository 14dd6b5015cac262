"""Choosing the next token from logits: greedy, or one draw after temperature, top-k, top-p and min-p.

The vocabulary is cut into blocks of 4096 tokens. A draw chooses a block by the blocks' weights, then a token by
the masses within the block, both in vocabulary order and at one uniform number: it inverts the cumulative
distribution of the row. A block's masses are relative to its own greatest logit, so that a kernel needs to look at
it only once.

The data flow of the kernels, for R rows of B blocks:

    without filters                          with filters
                                             chunk_maxima [R x B]: logits -> maxima of 256 tokens each
                                             logit_thresholds [R]: maxima, some logits -> least logit kept
    _mass [R x B]: logits -> greatest        _mass [R x B]: logits of blocks that reach it -> mass kept
                   logit and mass of a block
    _draw [R]: greatest and masses -> block; its logits -> token

So logits are read once without filters. With filters they are read once, and of most rows little of them again:
see `logit_threshold`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from triton_ops.elementwise import as_rows
from triton_ops.implementation import Impl, runs_triton, tl, triton
from triton_ops.logit_threshold import logit_thresholds, reference_thresholds
from triton_ops.philox import load_uniform, philox_uniform
from triton_ops.row_maxima import CHUNK, chunk_maxima, finite_of, greatest
from triton_ops.token_mass import (
    BLOCK,
    exp2_alike,
    exponent_scale,
    join_halves,
    load_scale,
    mass_halves,
    relative_exp2,
    token_mass,
)

MAX_VOCAB_SIZE = 2**20  # whose chunk maxima one program can hold; their masses could be added up to 2^25
MASS_WARPS = 4
DRAW_WARPS = 8


def greedy(logits: Tensor, *, finite: Tensor | None = None, impl: Impl = "auto") -> Tensor:
    """The first of the greatest logits of each row of `logits [R, vocab_size]`: int32 `[R]`.

    `finite`, bool `[R]`, gets what `finite_rows(logits)` returns, which costs nothing here.
    """
    if runs_triton(impl, logits.device):
        rows = _checked_rows(logits)
        return _draw(rows, chunk_maxima(rows), finite)
    if finite is not None:
        finite.copy_(finite_rows(logits, impl="torch"))
    return logits.argmax(dim=-1).int()


def sample(
    logits: Tensor,
    *,
    temperatures: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    finite: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """One token a row of `logits [R, vocab_size]`, any float dtype: int32 `[R]`.

    Filters apply in this order, each to what the one before left:

    - `temperatures` float32 `[R]` divides the logits; 0 is greedy, the first of the greatest logits,
    - `top_ks` int32 `[R]` keeps the k likeliest tokens and ties at the k-th; off where <= 0 or >=
      vocab_size,
    - `top_ps` float32 `[R]` keeps the fewest likeliest tokens whose share of the rest reaches p, and
      ties at the last of them; off where 1,
    - `min_ps` float32 `[R]` keeps tokens at least min_p times as likely as the likeliest; off where 0.

    A filter that is None is off for all rows, and costs nothing.

    The draw inverts the cumulative distribution in vocabulary order at one uniform number, of Philox under
    `(seeds int64, sample_indices int32, positions int32)`, all `[R]`. It depends on its own row only. A
    token less likely than 2^-39 of the likeliest of its block, and so one whose logit is -inf, is never
    drawn. A row that `finite_rows` rejects gives some token id. `finite`, bool `[R]`, gets what
    `finite_rows(logits)` returns, which costs nothing here. Raises ValueError where the vocabulary is too large.
    """
    rows = _checked_rows(logits)
    least_log2 = None if min_ps is None else min_ps.log2()
    if runs_triton(impl, logits.device):
        draws = (temperatures, seeds, sample_indices, positions)
        filtered = not (top_ks is None and top_ps is None and min_ps is None)
        if not filtered:
            return _draw(rows, None, finite, draws)
        maxima = chunk_maxima(rows)
        thresholds, maximum = logit_thresholds(rows, maxima, temperatures, top_ks, top_ps)
        return _draw(rows, maxima, finite, draws, (thresholds, maximum, least_log2))

    if finite is not None:
        finite.copy_(finite_rows(logits, impl="torch"))
    wide, scale = logits.float(), exponent_scale(temperatures).unsqueeze(1)
    kept = torch.ones_like(wide, dtype=torch.bool)
    if top_ks is not None or top_ps is not None:
        kept = wide >= reference_thresholds(wide, temperatures, top_ks, top_ps).unsqueeze(1)
    likeliest = wide.amax(dim=-1, keepdim=True)
    if least_log2 is not None:
        kept &= (wide - likeliest) * scale >= least_log2.unsqueeze(1)

    blocks, blocks_kept = _in_blocks(wide, -torch.inf), _in_blocks(kept, False)
    anchor = blocks.amax(dim=-1)
    masses = token_mass(blocks, anchor.unsqueeze(2), scale.unsqueeze(2)) * blocks_kept
    sums = masses.sum(dim=-1)  # [R, blocks], as are the weights
    weights = (sums.double() * relative_exp2(anchor, likeliest, scale).double()).nan_to_num_(nan=0.0).long()

    cumulative = weights.cumsum(dim=-1)
    before, total = cumulative - weights, cumulative[:, -1]
    uniform = philox_uniform(seeds, sample_indices, positions)
    # Below the total, though float64 rounds it: the greatest uniform number is 1 - 2^-53. The block that holds the
    # target has weight of its own.
    target = (uniform * total).long().unsqueeze(1)
    block = ((before <= target).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    target, weight, mass = (target - before.gather(1, block)), weights.gather(1, block), sums.gather(1, block)
    target = torch.minimum((target.double() / weight.double() * mass.double()).long(), mass - 1)
    inner = masses.gather(1, block.unsqueeze(2).expand(-1, -1, masses.shape[2])).squeeze(1).cumsum(dim=-1)
    token = block.squeeze(1) * BLOCK + (inner <= target).sum(dim=-1)
    token = token.clamp(max=logits.shape[1] - 1)  # a row of NaN has no mass at all
    return torch.where(temperatures > 0.0, token.int(), logits.argmax(dim=-1).int())


def finite_rows(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Bool `[R]`: whether a row of `x [R, N]` holds no NaN, no +inf, and something besides -inf."""
    if runs_triton(impl, x.device):
        return finite_of(chunk_maxima(as_rows(x)))
    return x.amax(dim=-1).isfinite()


def _checked_rows(logits: Tensor) -> Tensor:
    vocab_size = logits.shape[1]
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} exceeds the limit of {MAX_VOCAB_SIZE}")
    return as_rows(logits)


def _in_blocks(x: Tensor, filler: float) -> Tensor:
    """`x [R, vocab_size]` as `[R, blocks, BLOCK]`; a vocabulary that is no larger is a block as it is."""
    size = min(BLOCK, x.shape[1])
    num_blocks = -(-x.shape[1] // size)
    return pad(x, (0, -x.shape[1] % size), value=filler).view(-1, num_blocks, size)


def _draw(
    rows: Tensor,
    maxima: Tensor | None,
    finite: Tensor | None,
    draws: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    filters: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Tensor:
    """A token a row, by the kernels.

    Args:
        maxima: `chunk_maxima` of the rows, where there are filters or no draws.
        draws: temperatures, seeds, sample indices, positions; None where all rows are greedy.
        filters: least logits kept, greatest logits, and binary logarithms of least relative probabilities.
    """
    num_rows, vocab_size = rows.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    chosen = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
    if not num_rows:
        return chosen
    temperatures, seeds, sample_indices, positions = draws or (None, None, None, None)
    thresholds, maximum, least_log2 = filters or (None, None, None)
    anchors = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=rows.device)
    sums = None
    if draws is None:
        assert maxima is not None
        anchors = maxima.view(num_rows, num_blocks, -1).amax(-1)
    else:
        sums = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=rows.device)
        _mass_kernel[(num_rows * num_blocks,)](
            rows,
            maxima,
            temperatures,
            thresholds,
            maximum,
            least_log2,
            anchors,
            sums,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            BLOCK=BLOCK,
            CHUNKS=BLOCK // CHUNK,
            num_warps=MASS_WARPS,
        )
    _draw_kernel[(num_rows,)](
        rows,
        anchors,
        sums,
        temperatures,
        thresholds,
        maximum,
        least_log2,
        seeds,
        sample_indices,
        positions,
        chosen,
        finite,
        rows.stride(0),
        VOCAB_SIZE=vocab_size,
        NUM_BLOCKS=num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK=BLOCK,
        num_warps=DRAW_WARPS,
    )
    return chosen


@triton.jit
def _relative_kept(x, anchor, scale, row, thresholds_ptr, maximum_ptr, least_log2_ptr):
    """Probabilities of logits `x` relative to the anchor's; 0 where they are filtered out."""
    relative = exp2_alike((x - anchor) * scale)
    if thresholds_ptr is not None:
        relative = tl.where(x >= tl.load(thresholds_ptr + row), relative, 0.0)
    if least_log2_ptr is not None:
        log2 = (x - tl.load(maximum_ptr + row)) * scale
        relative = tl.where(log2 >= tl.load(least_log2_ptr + row), relative, 0.0)
    return relative


@triton.jit
def _mass_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    thresholds_ptr,
    maximum_ptr,
    least_log2_ptr,
    anchors_ptr,
    sums_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    num_blocks: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row, block = (program // num_blocks).to(tl.int64), program % num_blocks
    out = row * num_blocks + block
    scale, _ = load_scale(temperatures_ptr, row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    if maxima_ptr is not None:
        highest = greatest(tl.load(maxima_ptr + out * CHUNKS + tl.arange(0, CHUNKS)), 0)
        tl.store(anchors_ptr + out, highest)
        # All of the block is below the threshold: it is not even read.
        if highest < tl.load(thresholds_ptr + row):
            tl.store(sums_ptr + out, tl.zeros((), tl.int64))
            return
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < VOCAB_SIZE, other=-float("inf"))
    x = x.to(tl.float32)
    if maxima_ptr is None:
        highest = greatest(x, 0)
        tl.store(anchors_ptr + out, highest)
    mass = tl.zeros((), tl.int64)
    if tl.abs(highest) < float("inf"):  # else there is nothing to draw, or the row is rejected
        relative = _relative_kept(x, highest, scale, row, thresholds_ptr, maximum_ptr, least_log2_ptr)
        upper, lower = mass_halves(relative)
        mass = join_halves(tl.sum(upper, axis=0), tl.sum(lower, axis=0))
    tl.store(sums_ptr + out, mass)


@triton.jit
def _draw_kernel(
    logits_ptr,
    anchors_ptr,
    sums_ptr,
    temperatures_ptr,
    thresholds_ptr,
    maximum_ptr,
    least_log2_ptr,
    seeds_ptr,
    sample_indices_ptr,
    positions_ptr,
    chosen_ptr,
    finite_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    is_block = index < NUM_BLOCKS
    anchors = tl.load(anchors_ptr + row * NUM_BLOCKS + index, mask=is_block, other=-float("inf"))
    likeliest = greatest(anchors, 0)
    if finite_ptr is not None:
        tl.store(finite_ptr + row, tl.abs(likeliest) < float("inf"))
    # Greedy: the first block that holds the greatest logit.
    block = tl.min(tl.where(anchors == likeliest, index, NUM_BLOCKS - 1), axis=0)
    inner_target = tl.full((), -1, tl.int64)
    anchor = likeliest
    scale = tl.full((), 1.0, tl.float32)
    if sums_ptr is not None:
        scale, temperature = load_scale(temperatures_ptr, row)
        if (temperature > 0.0) & (tl.abs(likeliest) < float("inf")):
            sums = tl.load(sums_ptr + row * NUM_BLOCKS + index, mask=is_block, other=0)
            shares = exp2_alike((anchors - likeliest) * scale)
            weights = (sums.to(tl.float64) * shares.to(tl.float64)).to(tl.int64)
            before = tl.cumsum(weights, axis=0) - weights
            uniform = load_uniform(seeds_ptr, sample_indices_ptr, positions_ptr, row)
            target = (uniform * tl.sum(weights, axis=0).to(tl.float64)).to(tl.int64)
            block = tl.sum((is_block & (before <= target)).to(tl.int32), axis=0) - 1
            is_chosen = index == block
            target -= tl.sum(tl.where(is_chosen, before, 0), axis=0)
            weight = tl.sum(tl.where(is_chosen, weights, 0), axis=0)
            mass = tl.sum(tl.where(is_chosen, sums, 0), axis=0)
            anchor = tl.max(tl.where(is_chosen, anchors, -float("inf")), axis=0)
            inner_target = (target.to(tl.float64) / weight.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
            inner_target = tl.minimum(inner_target, mass - 1)

    inner = tl.arange(0, BLOCK)
    token = block * BLOCK + inner
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < VOCAB_SIZE, other=-float("inf"))
    x = x.to(tl.float32)
    if inner_target < 0:
        chosen = block * BLOCK + tl.min(tl.where(x == anchor, inner, BLOCK), axis=0)
    else:
        relative = _relative_kept(x, anchor, scale, row, thresholds_ptr, maximum_ptr, least_log2_ptr)
        upper, lower = mass_halves(relative)
        cumulative = tl.cumsum(join_halves(upper, lower), axis=0)
        chosen = block * BLOCK + tl.sum((cumulative <= inner_target).to(tl.int32), axis=0)
    tl.store(chosen_ptr + row, tl.minimum(chosen, VOCAB_SIZE - 1))
