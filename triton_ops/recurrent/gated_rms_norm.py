"""Root mean square norm whose result is gated, of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import check_vector
from triton_ops.implementation import (
    Impl,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    overlapped,
    runs_triton,
    tl,
    triton,
)
from triton_ops.norms.rms_norm import rms_norm, row_scale, weighted
from triton_ops.tuning import row_blocks


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, impl: Impl = "auto") -> Tensor:
    """`rms_norm(x, weight) * silu(gate)` of heads, over the last dimension: `[T, H, D]` in x's dtype, contiguous.

    `x` and `gate` are `[T, H, D]` in any float dtype, elements of a head side by side, `weight` is `[D]` in the
    same. The order is that of transformers: normed in float32, rounded, multiplied by the weight and rounded,
    multiplied by `silu(gate)` in float32, rounded.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, gate, weight)
    if runs_triton(impl, x.device):
        return _launch(x, gate, weight, eps)
    normed = rms_norm(x, weight, eps, impl="torch")
    wide = gate.float()
    return (normed.float() * (wide / (-wide).exp().add_(1.0))).to(x.dtype).contiguous()


def _check(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must be [T, H, D], but is {[*x.shape]}")
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(f"gate must be {[*x.shape]} in {x.dtype}, but is {[*gate.shape]} in {gate.dtype}")
    for name, heads in (("x", x), ("gate", gate)):
        if heads.numel() and heads.stride(2) != 1:
            raise ValueError(
                f"elements of {name}'s heads must lie side by side, but have a stride of {heads.stride(2)}"
            )
    check_vector("weight", weight, x)


# --- the kernel ---


def _launch(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_tokens, num_heads, size = x.shape
    if out.numel() == 0:
        return out
    block, block_rows, num_warps = row_blocks(size, x.dtype)
    _gated_rms_norm_kernel[(cdiv(num_tokens * num_heads, block_rows),)](
        x,
        gate,
        weight,
        out,
        num_tokens * num_heads,
        num_heads,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=block_rows,
        num_warps=num_warps,
        **overlapped(x.device, num_tokens),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x, gate, weight, out, num_rows, num_heads, x_stride, x_head_stride, gate_stride, gate_head_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token."""
    if EARLY:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (col < SIZE)
    factors = tl.load(weight + tl.zeros_like(row) + col, mask=mask, other=0.0)
    if EARLY:
        gdc_wait()
    token, head = row // num_heads, row % num_heads
    heads = tl.load(x + token * x_stride + head * x_head_stride + col, mask=mask, other=0.0)
    gates = tl.load(gate + token * gate_stride + head * gate_head_stride + col, mask=mask, other=0.0)
    normed = weighted(heads.to(tl.float32) * row_scale(heads, eps, SIZE), factors, x.dtype.element_ty, None)
    gates = gates.to(tl.float32)
    tl.store(out + row * SIZE + col, normed.to(tl.float32) * (gates / (1.0 + tl.exp(-gates))), mask=mask)
