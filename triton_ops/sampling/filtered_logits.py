"""The logits whose softmax `sample` draws from: divided by the temperature, without what the filters leave out.

The filters' thresholds are those of the draw, bit for bit: no token that is drawn is left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, cdiv, runs_triton, tl, triton
from triton_ops.sampling.logit_threshold import logit_thresholds, reference_thresholds
from triton_ops.sampling.row_maxima import chunk_maxima
from triton_ops.sampling.token_draw import is_likely
from triton_ops.sampling.token_mass import exponent_scale, load_scale
from triton_ops.tuning import LOGITS

_LN_2: tl.constexpr = math.log(2.0) if tl is None else tl.constexpr(math.log(2.0))


def filtered_logits(
    logits: Tensor,
    *,
    temperatures: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Float32 `[R, vocab_size]`, relative to the greatest of each row; -inf for tokens that are filtered out.

    The parameters are those of `sample`, and `logits` too. A row of temperature 0 stays as it is, without filters.
    One that `finite_rows` rejects gives some numbers.
    """
    min_log2 = None if min_ps is None else min_ps.log2()
    if runs_triton(impl, logits.device):
        return _launch(as_rows(logits), temperatures, top_ks, top_ps, min_log2)
    wide, scale = logits.float(), exponent_scale(temperatures).unsqueeze(1)
    kept = reference_kept(wide, temperatures, top_ks, top_ps, min_log2)
    scaled = (wide - wide.amax(dim=-1, keepdim=True)) * scale * math.log(2.0)
    return torch.where((temperatures > 0.0).unsqueeze(1), scaled.masked_fill(~kept, -torch.inf), wide)


def reference_kept(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_log2: Tensor | None
) -> Tensor:
    """Which tokens of float32 `logits [R, vocab_size]` the filters of `sample` keep where temperatures are above
    0: bool of the same shape. `min_log2` are binary logarithms of the smallest relative probabilities.
    """
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_ks is not None or top_ps is not None:
        kept = logits >= reference_thresholds(logits, temperatures, top_ks, top_ps).unsqueeze(1)
    if min_log2 is not None:
        exponents = (logits - logits.amax(dim=-1, keepdim=True)) * exponent_scale(temperatures).unsqueeze(1)
        kept &= exponents >= min_log2.unsqueeze(1)
    return kept


def _launch(
    rows: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_log2: Tensor | None
) -> Tensor:
    num_rows, vocab_size = rows.shape
    out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    thresholds, maximum = logit_thresholds(rows, chunk_maxima(rows), temperatures, top_ks, top_ps, None)
    if out.numel():
        _filter_kernel[(num_rows * cdiv(vocab_size, LOGITS.size),)](
            rows,
            temperatures,
            thresholds,
            maximum,
            min_log2,
            out,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            **LOGITS.launch_arguments(),
        )
    return out


@triton.jit
def _filter_kernel(
    logits_ptr,
    temperatures_ptr,
    thresholds_ptr,
    maximum_ptr,
    min_log2_ptr,
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
    x = tl.load(logits_ptr + row * logits_stride + token, mask=mask, other=0.0).to(tl.float32)
    scale, temperature = load_scale(temperatures_ptr, row)
    likeliest = tl.load(maximum_ptr + row)
    kept = x >= tl.load(thresholds_ptr + row)
    if min_log2_ptr is not None:
        kept = kept & is_likely(x, likeliest, scale, row, min_log2_ptr)
    scaled = tl.where(kept, (x - likeliest) * scale * _LN_2, -float("inf"))
    tl.store(out_ptr + row * VOCAB_SIZE + token, tl.where(temperature > 0.0, scaled, x), mask=mask)
