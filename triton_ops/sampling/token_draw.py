"""The draw of one token a row by kernels: first the block of 4096 tokens, then the token in it.

For R rows of B blocks:

    _mass [R x B]: logits -> greatest logit and mass of a block
    _draw [R]: greatest logits and masses -> block; its logits -> token

The logits are read once. With filters, blocks without a token that may be drawn are not read at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import cdiv, next_power_of_2, tl, triton
from triton_ops.sampling.logit_bits import widened
from triton_ops.sampling.philox import load_uniform
from triton_ops.sampling.row_maxima import CHUNK, greatest
from triton_ops.sampling.token_mass import BLOCK, exp2_alike, join_halves, load_scale, mass_halves, sum_masses
from triton_ops.tuning import DRAW_WARPS, MASS_PARTS, MASS_WARPS

Draws = tuple[Tensor, Tensor, Tensor, Tensor]
"""Temperatures, seeds, sample indices and positions of the rows, each `[R]`."""


def draw_tokens(
    rows: Tensor,
    chosen: Tensor,
    maxima: Tensor | None,
    finite: Tensor | None,
    draws: Draws | None = None,
    filters: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None,
) -> None:
    """Choose a token of each row of `rows [R, vocab_size]`.

    Args:
        chosen: int32 `[R]`, receives them.
        maxima: `chunk_maxima` of the rows, where there are filters or no draws.
        finite: bool `[R]` or None, receives `finite_rows`.
        draws: None where all rows are greedy.
        filters: the smallest logits kept, the greatest logits, and binary logarithms of the smallest relative
            probabilities or None, float32 `[R]`; and which rows of `chosen` and `finite` are done, bool `[R]`, or
            None.
    """
    num_rows, vocab_size = rows.shape
    if not num_rows:
        return
    num_blocks = cdiv(vocab_size, BLOCK)
    temperatures, seeds, sample_indices, positions = draws or (None, None, None, None)
    thresholds, maximum, min_log2, done = filters or (None, None, None, None)
    anchors = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=rows.device)
    sums = None
    if draws is None:
        assert maxima is not None
        anchors = maxima.view(num_rows, num_blocks, -1).amax(-1)
    else:
        sums = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=rows.device)
        # Where few rows are left, most programs would end at once: fewer are launched.
        parts = num_blocks if done is None else min(num_blocks, MASS_PARTS)
        _mass_kernel[(num_rows * parts,)](
            rows,
            maxima,
            temperatures,
            thresholds,
            maximum,
            min_log2,
            done,
            anchors,
            sums,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            BLOCK=BLOCK,
            CHUNKS=BLOCK // CHUNK,
            PARTS=parts,
            num_warps=MASS_WARPS,
        )
    _draw_kernel[(num_rows,)](
        rows,
        anchors,
        sums,
        temperatures,
        thresholds,
        maximum,
        min_log2,
        done,
        seeds,
        sample_indices,
        positions,
        chosen,
        finite,
        rows.stride(0),
        VOCAB_SIZE=vocab_size,
        NUM_BLOCKS=num_blocks,
        BLOCKS=next_power_of_2(num_blocks),
        BLOCK=BLOCK,
        num_warps=DRAW_WARPS,
    )


@triton.jit
def choose_block(anchors, sums, likeliest, scale, uniform):
    """The block on which a draw falls, as a mask, and the target mass within it.

    `sums`, int64, are the blocks' masses relative to their greatest logits `anchors`, 0 where there is no block.
    """
    shares = exp2_alike((anchors - likeliest) * scale)
    weights = (sums.to(tl.float64) * shares.to(tl.float64)).to(tl.int64)
    before = tl.cumsum(weights, axis=0) - weights
    target = (uniform * tl.sum(weights, axis=0).to(tl.float64)).to(tl.int64)
    # The only block that holds the target; one without weight holds nothing.
    is_chosen = (before <= target) & (target < before + weights)
    target -= tl.sum(tl.where(is_chosen, before, 0), axis=0)
    weight = tl.sum(tl.where(is_chosen, weights, 0), axis=0)
    mass = tl.sum(tl.where(is_chosen, sums, 0), axis=0)
    inner_target = (target.to(tl.float64) / weight.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
    return is_chosen, tl.minimum(inner_target, mass - 1)


@triton.jit
def is_likely(x, likeliest, scale, row, min_log2_ptr):
    """Whether min-p keeps logits `x`."""
    return (x - likeliest) * scale >= tl.load(min_log2_ptr + row)


@triton.jit
def _relative_kept(x, anchor, scale, row, thresholds_ptr, maximum_ptr, min_log2_ptr):
    """Probabilities of logits `x` relative to the anchor's; 0 where they are filtered out."""
    relative = exp2_alike((x - anchor) * scale)
    if thresholds_ptr is not None:
        relative = tl.where(x >= tl.load(thresholds_ptr + row), relative, 0.0)
    if min_log2_ptr is not None:
        relative = tl.where(is_likely(x, tl.load(maximum_ptr + row), scale, row, min_log2_ptr), relative, 0.0)
    return relative


@triton.jit
def _mass_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    thresholds_ptr,
    maximum_ptr,
    min_log2_ptr,
    done_ptr,
    anchors_ptr,
    sums_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Every PARTS-th block of a row."""
    num_blocks: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    if done_ptr is not None:
        is_done = tl.load(done_ptr + row)
        if is_done:
            return
    scale, _ = load_scale(temperatures_ptr, row)
    row_ptr = logits_ptr + row * logits_stride
    for block in range(part, num_blocks, PARTS):
        out = row * num_blocks + block
        highest = tl.full((), -float("inf"), tl.float32)
        mass = tl.zeros((), tl.int64)
        is_read = True
        if maxima_ptr is not None:
            highest = greatest(tl.load(maxima_ptr + out * CHUNKS + tl.arange(0, CHUNKS)), 0)
            is_read = highest >= tl.load(thresholds_ptr + row)
        if is_read:
            # Only the last block takes a mask, whose filler costs instructions.
            token = block * BLOCK + tl.arange(0, BLOCK)
            if block < VOCAB_SIZE // BLOCK:
                x = tl.load(row_ptr + token)
            else:
                x = tl.load(row_ptr + token, mask=token < VOCAB_SIZE, other=-float("inf"))
            x = widened(x)
            if maxima_ptr is None:
                highest = greatest(x, 0)
            if tl.abs(highest) < float("inf"):  # otherwise nothing is to be drawn, or the row is rejected
                relative = _relative_kept(x, highest, scale, row, thresholds_ptr, maximum_ptr, min_log2_ptr)
                mass = sum_masses(relative)
        tl.store(anchors_ptr + out, highest)
        tl.store(sums_ptr + out, mass)


@triton.jit
def _draw_kernel(
    logits_ptr,
    anchors_ptr,
    sums_ptr,
    temperatures_ptr,
    thresholds_ptr,
    maximum_ptr,
    min_log2_ptr,
    done_ptr,
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
    if done_ptr is not None:
        is_done = tl.load(done_ptr + row)
        if is_done:
            return
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
        # Load everything before anything waits for a part of it.
        scale, temperature = load_scale(temperatures_ptr, row)
        sums = tl.load(sums_ptr + row * NUM_BLOCKS + index, mask=is_block, other=0)
        uniform = load_uniform(seeds_ptr, sample_indices_ptr, positions_ptr, row)
        if (temperature > 0.0) & (tl.abs(likeliest) < float("inf")):
            is_chosen, inner_target = choose_block(anchors, sums, likeliest, scale, uniform)
            block = tl.sum(tl.where(is_chosen, index, 0), axis=0)
            anchor = tl.max(tl.where(is_chosen, anchors, -float("inf")), axis=0)

    inner = tl.arange(0, BLOCK)
    token = block * BLOCK + inner
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < VOCAB_SIZE, other=-float("inf"))
    x = widened(x)
    if inner_target < 0:
        chosen = block * BLOCK + tl.min(tl.where(x == anchor, inner, BLOCK), axis=0)
    else:
        relative = _relative_kept(x, anchor, scale, row, thresholds_ptr, maximum_ptr, min_log2_ptr)
        upper, lower = mass_halves(relative)
        cumulative = tl.cumsum(join_halves(upper, lower), axis=0)
        chosen = block * BLOCK + tl.sum((cumulative <= inner_target).to(tl.int32), axis=0)
    tl.store(chosen_ptr + row, tl.minimum(chosen, VOCAB_SIZE - 1))
