"""Repetition, presence and frequency penalties on logits."""

# Tests: tests/triton_ops/sampling/test_logits.py

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, cdiv, runs_triton, tl, triton
from triton_ops.tuning import LOGITS


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    is_output: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    impl: Impl = "auto",
) -> Tensor:
    """Logits `[R, vocab_size]` as float32, with tokens that have occurred before made less likely.

    Args:
        logits: `[R, vocab_size]`, any float dtype.
        rows, token_ids: int32 `[H]`: token `token_ids[h]` occurs in the history of row `rows[h]`, once for each h.
        is_output: bool or int32 `[H]`: whether it was generated; otherwise it is part of the prompt.
        repetition: float32 `[R]`; positive logits of all tokens that occur are divided by it, negative ones
            multiplied (Keskar et al., "CTRL", 2019).
        presence, frequency: float32 `[R]`; subtracted from the logits of generated tokens: `presence` once,
            `frequency` once for each time.
    """
    if runs_triton(impl, logits.device):
        return _launch(logits, rows, token_ids, is_output, repetition, presence, frequency)
    out = logits.float()
    rows, token_ids = rows.long(), token_ids.long()
    occurs = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
    # A Python value would be copied to the device synchronously.
    occurs.index_put_((rows, token_ids), torch.ones_like(rows, dtype=torch.bool))
    generated = torch.zeros_like(out)
    generated.index_put_((rows, token_ids), is_output.to(out.dtype), accumulate=True)
    factor = repetition.unsqueeze(1)
    out = torch.where(occurs, torch.where(out > 0, out / factor, out * factor), out)
    return out - frequency.unsqueeze(1) * generated - presence.unsqueeze(1) * (generated > 0)


def _launch(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    is_output: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Count histories into a table of the logits' shape, then go over both once."""
    source, vocab_size = as_rows(logits), logits.shape[1]
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    if len(rows):
        _count_kernel[(cdiv(len(rows), LOGITS.size),)](
            counts,
            rows,
            token_ids,
            is_output,
            len(rows),
            VOCAB_SIZE=vocab_size,
            **LOGITS.launch_arguments(),
        )
    if out.numel():
        _penalties_kernel[(out.shape[0] * cdiv(vocab_size, LOGITS.size),)](
            source,
            counts,
            repetition,
            presence,
            frequency,
            out,
            source.stride(0),
            VOCAB_SIZE=vocab_size,
            **LOGITS.launch_arguments(),
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["count"])
def _count_kernel(
    counts_ptr, rows_ptr, token_ids_ptr, is_output_ptr, count, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Bit 0: whether a token is in the prompt; the other bits count it in the answer."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    row = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
    at_ptr = counts_ptr + row * VOCAB_SIZE + tl.load(token_ids_ptr + index, mask=mask, other=0)
    is_output = tl.load(is_output_ptr + index, mask=mask, other=0) != 0
    tl.atomic_add(at_ptr, tl.full((BLOCK,), 2, tl.int32), mask=mask & is_output)
    tl.atomic_or(at_ptr, tl.full((BLOCK,), 1, tl.int32), mask=mask & (is_output == 0))


@triton.jit
def _penalties_kernel(
    logits_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    out_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_blocks: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    token = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB_SIZE
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=mask, other=0.0).to(tl.float32)
    counts = tl.load(counts_ptr + row * VOCAB_SIZE + token, mask=mask, other=0)
    generated = counts >> 1
    factor = tl.load(repetition_ptr + row)
    penalized = tl.where(logits > 0, tl.div_rn(logits, tl.zeros_like(logits) + factor), logits * factor)
    logits = tl.where(counts > 0, penalized, logits)
    # Rounded after the product, as in the reference: a fused sum would differ in the last bit.
    logits -= tl.load(frequency_ptr + row) * generated.to(tl.float32)
    logits -= tl.where(generated > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(out_ptr + row * VOCAB_SIZE + token, logits, mask=mask)
