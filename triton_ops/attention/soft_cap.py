"""Soft capping of attention scores and logits (Gemma 2, Google DeepMind, 2024)."""

from __future__ import annotations

from torch import Tensor

from triton_ops.activations.elementwise import launch_each, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton


def soft_cap(x: Tensor, cap: float, *, impl: Impl = "auto") -> Tensor:
    """`cap * tanh(x / cap)`, in x's dtype: about x near 0, never beyond -cap and cap."""
    if runs_triton(impl, x.device):
        return launch_each(_soft_cap_kernel, x, CAP=float(cap))
    return (x / cap).tanh_().mul_(cap)


@triton.jit
def _soft_cap_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    CAP: tl.constexpr,
):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    # Each step is rounded, as in the reference and in transformers.
    scaled = (x.to(tl.float32) / CAP).to(x.dtype)
    # tanh; exp may overflow to infinity, which gives 1.
    bent = (1.0 - 2.0 / (tl.exp(2.0 * scaled.to(tl.float32)) + 1.0)).to(x.dtype)
    tl.store(out_ptr + row * SIZE + col, (bent.to(tl.float32) * CAP).to(x.dtype), mask=mask)
