"""Log-probabilities of given tokens and of the likeliest ones."""

# Tests: tests/triton_ops/sampling/test_logits.py

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, cdiv, next_power_of_2, runs_triton, tl, triton
from triton_ops.sampling.row_maxima import greatest
from triton_ops.tuning import LOGPROBS, MAX_TOP_LOGPROBS


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Natural logarithms of softmax probabilities, computed in float32.

    Args:
        logits: `[R, vocab_size]`, any float dtype.
        token_ids: int32 `[R]`, one token of each row.
        num_top: the number of likeliest tokens to return, 0 to vocab_size.

    Returns:
        The tokens' log-probabilities float32 `[R]`; their ranks int32 `[R]`, one more than the number of likelier
        tokens; ids int32 `[R, num_top]` and log-probabilities float32 `[R, num_top]` of the likeliest tokens, the
        likeliest first. Ties are in any order; tokens at -inf may have any id.
    """
    if runs_triton(impl, logits.device):
        return _launch(as_rows(logits), token_ids, num_top)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    # Logits, as two of them may round to one log-probability.
    ranks = (logits > logits.gather(1, token_ids.long().unsqueeze(1))).sum(dim=1) + 1
    top, top_ids = logprobs.topk(num_top, dim=1)
    return chosen.squeeze(1), ranks.int(), top_ids.int(), top


def _launch(rows: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each block of a row gives its greatest logit, its sum of exponentials, the number of logits above the given
    token's, and its own top; rows are combined from their blocks.
    """
    num_rows, vocab_size = rows.shape
    num_blocks, found = cdiv(vocab_size, LOGPROBS.size), num_top if num_top <= MAX_TOP_LOGPROBS else 0

    def each(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=rows.device)

    maxima, sums, above = each(num_blocks), each(num_blocks), each(num_blocks, dtype=torch.int32)
    top, top_ids = each(num_blocks * found), each(num_blocks * found, dtype=torch.int32)
    chosen, log_sums, ranks = each(), each(1), each(dtype=torch.int32)
    if num_rows:
        _block_kernel[(num_rows * num_blocks,)](
            rows,
            token_ids,
            maxima,
            sums,
            above,
            top,
            top_ids,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            NUM_TOP=found,
            **LOGPROBS.launch_arguments(),
        )
        _row_kernel[(num_rows,)](
            rows,
            token_ids,
            maxima,
            sums,
            above,
            chosen,
            log_sums,
            ranks,
            rows.stride(0),
            NUM_BLOCKS=num_blocks,
            BLOCKS=next_power_of_2(num_blocks),
            num_warps=1,
        )
    if num_top > found:
        top, best = rows.float().topk(num_top, dim=1)
        return chosen, ranks, best.int(), top - log_sums
    top, best = top.topk(num_top, dim=1)
    return chosen, ranks, top_ids.gather(1, best), top - log_sums


@triton.jit
def _block_kernel(
    logits_ptr,
    token_ids_ptr,
    maxima_ptr,
    sums_ptr,
    above_ptr,
    top_ptr,
    top_ids_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TOP: tl.constexpr,
):
    num_blocks: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row, block = (program // num_blocks).to(tl.int64), program % num_blocks
    out = row * num_blocks + block
    token = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * logits_stride
    logits = tl.load(row_ptr + token, mask=token < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    maximum = greatest(logits, 0)
    tl.store(maxima_ptr + out, maximum)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)  # -inf less itself would be NaN
    tl.store(sums_ptr + out, tl.sum(tl.exp(logits - base), axis=0))
    tl.store(above_ptr + out, tl.sum((logits > chosen).to(tl.int32), axis=0))
    # Logits that are left have an index below BLOCK: -inf is a logit like others.
    left = tl.where(token < VOCAB_SIZE, tl.arange(0, BLOCK), BLOCK)
    for nth in range(NUM_TOP):
        best = tl.max(tl.where(left < BLOCK, logits, -float("inf")), axis=0)
        place = tl.min(tl.where(logits == best, left, BLOCK), axis=0)
        left = tl.where(left == place, BLOCK, left)
        tl.store(top_ptr + out * NUM_TOP + nth, tl.where(place < BLOCK, best, -float("inf")))
        # A block with fewer tokens repeats one, at -inf; so does one of NaN.
        tl.store(top_ids_ptr + out * NUM_TOP + nth, tl.minimum(block * BLOCK + place, VOCAB_SIZE - 1))


@triton.jit
def _row_kernel(
    logits_ptr,
    token_ids_ptr,
    maxima_ptr,
    sums_ptr,
    above_ptr,
    chosen_ptr,
    log_sums_ptr,
    ranks_ptr,
    logits_stride,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    is_block = block < NUM_BLOCKS
    at = row * NUM_BLOCKS + block
    maxima = tl.load(maxima_ptr + at, mask=is_block, other=-float("inf"))
    sums = tl.load(sums_ptr + at, mask=is_block, other=0.0)
    maximum = greatest(maxima, 0)
    log_sum = maximum + tl.log(tl.sum(sums * tl.exp(maxima - maximum), axis=0))
    chosen = tl.load(logits_ptr + row * logits_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, chosen - log_sum)
    tl.store(log_sums_ptr + row, log_sum)
    tl.store(ranks_ptr + row, tl.sum(tl.load(above_ptr + at, mask=is_block, other=0), axis=0) + 1)
