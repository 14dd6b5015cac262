"""Layer norm (Ba, Kiros and Hinton, 2016), alone or after adding a residual. No model here uses it yet."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.activations.elementwise import as_rows, check_residual, check_vector
from triton_ops.implementation import Impl, cdiv, runs_triton, tl, triton
from triton_ops.tuning import EARLY_BLOCK, row_blocks


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, impl: Impl = "auto") -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension.

    `x` is `[..., size]` in any float dtype, `weight` and `bias` (None: 0) are `[size]` in the same. The result is
    computed in float32 and rounded to x's dtype.
    """
    if runs_triton(impl, x.device):
        return _launch(x, None, weight, bias, eps)[0]
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """`layer_norm(x + residual)` and the sum, which is the next residual; both `[..., size]` in x's dtype."""
    if runs_triton(impl, x.device):
        return _launch(x, residual, weight, bias, eps)
    residual = x + residual
    return layer_norm(residual, weight, bias, eps, impl="torch"), residual


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of `x`, or of `x + residual`, and that sum (x itself without a residual)."""
    size = x.shape[-1]
    check_vector("weight", weight, x)
    if bias is not None:
        check_vector("bias", bias, x)
    rows, num_rows = as_rows(x), x.numel() // size
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    others = total = None
    if residual is not None:
        check_residual(residual, x)
        others, total = as_rows(residual), torch.empty_like(normed)
    if num_rows:
        block, block_rows, num_warps = row_blocks(size, x.dtype)
        _layer_norm_kernel[(cdiv(num_rows, block_rows),)](
            rows,
            others,
            weight,
            bias,
            normed,
            total,
            num_rows,
            rows.stride(0),
            0 if others is None else others.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=block_rows,
            num_warps=num_warps,
        )
    return normed, x if total is None else total


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (col < SIZE)
    # A pointer for each row: weights are loaded in the rows' layout, and nothing moves between threads.
    same = tl.zeros_like(row) + col
    early: tl.constexpr = BLOCK <= EARLY_BLOCK
    if early:
        weight = tl.load(weight_ptr + same, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    dtype = x.dtype
    if residual_ptr is not None:
        other = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0)
        # Rounded before it is normed, as the next layer adds to this sum.
        x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * SIZE + col, x, mask=mask)
    wide = x.to(tl.float32)
    # The row is in registers: the deviations from its mean, not a difference of two large sums.
    wide = tl.where(mask, wide - tl.sum(wide, axis=1, keep_dims=True) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE + eps)
    if not early:
        weight = tl.load(weight_ptr + same, mask=mask, other=0.0).to(tl.float32)
    normed = wide * scale * weight
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + same, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + col, normed.to(dtype), mask=mask)
