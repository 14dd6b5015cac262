"""Changes to the logits of single tokens: biases, bans, allow-lists and bit masks."""

# Tests: tests/triton_ops/sampling/test_logits.py

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, cdiv, runs_triton, tl, triton
from triton_ops.tuning import LOGITS

WORD_BITS = 32


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Logits `[R, vocab_size]` as float32, with `biases[h]` added at `(rows[h], token_ids[h])`.

    `rows` and `token_ids` are int32 `[H]`, `biases` is float32 `[H]`; a pair that occurs twice counts twice.
    """
    if runs_triton(impl, logits.device):
        return _add_at(logits.to(torch.float32, copy=True), rows, token_ids, biases, None)
    return logits.float().index_put((rows.long(), token_ids.long()), biases, accumulate=True)


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor, applies: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Logits `[R, vocab_size]` with -inf at `(rows[h], token_ids[h])` where `applies[h]`; all three are `[H]`."""
    if runs_triton(impl, logits.device):
        return _add_at(logits.clone(), rows, token_ids, None, applies)
    penalty = torch.where(applies, -torch.inf, 0.0).to(logits.dtype)
    banned = torch.zeros_like(logits).index_put((rows.long(), token_ids.long()), penalty, accumulate=True)
    return logits + banned


def keep_only(
    logits: Tensor, rows: Tensor, token_ids: Tensor, is_restricted: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Logits `[R, vocab_size]` with -inf at all tokens of restricted rows except `(rows[h], token_ids[h])`.

    `rows` and `token_ids` are int32 `[H]`, `is_restricted` is bool `[R]`.
    """
    if runs_triton(impl, logits.device):
        bitmask = torch.where(is_restricted, 0, -1).int().unsqueeze(1)
        bitmask = bitmask.repeat(1, -(-logits.shape[1] // WORD_BITS))
        if len(rows):
            _allow_kernel[(cdiv(len(rows), LOGITS.size),)](
                bitmask,
                rows,
                token_ids,
                len(rows),
                bitmask.shape[1],
                **LOGITS.launch_arguments(),
            )
        return apply_bitmask(logits, bitmask, impl=impl)
    allowed = (~is_restricted).unsqueeze(1).expand_as(logits).clone()
    # A Python value would be copied to the device synchronously.
    allowed.index_put_((rows.long(), token_ids.long()), torch.ones_like(rows, dtype=torch.bool))
    return logits.masked_fill(~allowed, -torch.inf)


def apply_bitmask(logits: Tensor, bitmask: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Logits `[R, vocab_size]` with -inf at the tokens whose bit is 0.

    `bitmask` is int32 `[R, ceil(vocab_size / 32)]`: token t has bit t % 32, from the lowest, of word t // 32.
    """
    vocab_size = logits.shape[1]
    if runs_triton(impl, logits.device):
        source = as_rows(logits)
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if out.numel():
            _bitmask_kernel[(out.shape[0] * cdiv(vocab_size, LOGITS.size),)](
                source,
                bitmask,
                out,
                source.stride(0),
                bitmask.stride(0),
                VOCAB_SIZE=vocab_size,
                **LOGITS.launch_arguments(),
            )
        return out
    return logits.masked_fill(~_allowed(bitmask, vocab_size), -torch.inf)


def mask_rows(logits: Tensor, rows: Tensor, bitmasks: Tensor, *, impl: Impl = "auto") -> None:
    """Put -inf, in place, at the tokens of rows of `logits` `[R, vocab_size]` whose bit is 0.

    `rows` are distinct, int32 `[M]`; `bitmasks` `[M, ceil(vocab_size / 32)]` are as in `apply_bitmask`. A row with
    NaN or +inf keeps one: it does not pass for finite.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    if runs_triton(impl, logits.device):
        if num_rows:
            _mask_rows_kernel[(num_rows * cdiv(vocab_size, LOGITS.size),)](
                logits,
                rows,
                bitmasks,
                logits.stride(0),
                bitmasks.stride(0),
                VOCAB_SIZE=vocab_size,
                **LOGITS.launch_arguments(),
            )
        return
    own = logits.index_select(0, rows)
    logits.index_copy_(0, rows.long(), torch.where(_allowed(bitmasks, vocab_size), own, own - torch.inf))


def _allowed(bitmask: Tensor, vocab_size: int) -> Tensor:
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=bitmask.device)
    return ((bitmask.unsqueeze(2) >> bits) & 1).flatten(1)[:, :vocab_size] != 0


def _add_at(
    logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor | None, applies: Tensor | None
) -> Tensor:
    """Add `values`, or without them -inf where it `applies`, in place at pairs of a row and a token."""
    if len(rows):
        _add_kernel[(cdiv(len(rows), LOGITS.size),)](
            logits,
            rows,
            token_ids,
            values,
            applies,
            len(rows),
            logits.stride(0),
            **LOGITS.launch_arguments(),
        )
    return logits


@triton.jit(do_not_specialize=["count"])
def _add_kernel(
    logits_ptr, rows_ptr, token_ids_ptr, values_ptr, applies_ptr, count, logits_stride, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    row = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
    at_ptr = logits_ptr + row * logits_stride + tl.load(token_ids_ptr + index, mask=mask, other=0)
    if values_ptr is not None:
        # Atomic, as a pair may occur twice.
        tl.atomic_add(at_ptr, tl.load(values_ptr + index, mask=mask, other=0.0), mask=mask)
    else:
        mask = mask & (tl.load(applies_ptr + index, mask=mask, other=0) != 0)
        # A sum, so that +inf and NaN do not pass for forbidden.
        logits = tl.load(at_ptr, mask=mask, other=0.0)
        tl.store(at_ptr, logits + float("-inf"), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _allow_kernel(bitmask_ptr, rows_ptr, token_ids_ptr, count, num_words, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    row = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
    token = tl.load(token_ids_ptr + index, mask=mask, other=0)
    bit = (tl.full((BLOCK,), 1, tl.int32) << (token % 32)).to(tl.int32)
    tl.atomic_or(bitmask_ptr + row * num_words + token // 32, bit, mask=mask)


@triton.jit
def _bitmask_kernel(
    logits_ptr, bitmask_ptr, out_ptr, logits_stride, bitmask_stride, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    num_blocks: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    token = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB_SIZE
    word = tl.load(bitmask_ptr + row * bitmask_stride + token // 32, mask=mask, other=0)
    allowed = ((word >> (token % 32)) & 1) != 0
    # Forbidden logits are not read.
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=mask & allowed, other=-float("inf"))
    tl.store(out_ptr + row * VOCAB_SIZE + token, logits, mask=mask)


@triton.jit
def _mask_rows_kernel(
    logits_ptr,
    rows_ptr,
    bitmasks_ptr,
    logits_stride,
    bitmasks_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_blocks: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    place = (program // num_blocks).to(tl.int64)
    token = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB_SIZE
    word = tl.load(bitmasks_ptr + place * bitmasks_stride + token // 32, mask=mask, other=0)
    forbidden = mask & (((word >> (token % 32)) & 1) == 0)
    at_ptr = logits_ptr + tl.load(rows_ptr + place).to(tl.int64) * logits_stride + token
    # A sum, so that +inf and NaN do not pass for forbidden.
    tl.store(at_ptr, tl.load(at_ptr, mask=forbidden, other=0.0) + float("-inf"), mask=forbidden)
