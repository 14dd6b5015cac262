"""The gated activation of gpt-oss' experts (OpenAI, 2025): SwiGLU with both halves clamped and 1 added to `up`."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import launch_gated, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton

ALPHA = 1.702
LIMIT = 7.0
# For kernels.
_ALPHA: tl.constexpr = ALPHA if tl is None else tl.constexpr(ALPHA)
_LIMIT: tl.constexpr = LIMIT if tl is None else tl.constexpr(LIMIT)


def clamped_swiglu(x: Tensor, *, deterministic: bool = False, impl: Impl = "auto") -> Tensor:
    """`gate * sigmoid(ALPHA * gate) * (up + 1)` of `x [..., 2 * size]` = gate | up: `[..., size]` in x's dtype.

    `gate` is at most LIMIT, `up` from -LIMIT to LIMIT: what is beyond counts as the limit. It is computed in
    float32 and rounded once. `deterministic`: see `silu_and_mul`.
    """
    if runs_triton(impl, x.device):
        return launch_gated(_clamped_swiglu_kernel, x)
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=LIMIT)
    scaled = gate * ALPHA
    # Of steps that torch computes alike at all places, unlike its sigmoid.
    share = scaled.neg_().exp_().add_(1.0).reciprocal_() if deterministic else torch.sigmoid(scaled)
    return (gate * share * (up.clamp(-LIMIT, LIMIT) + 1.0)).to(x.dtype)


@triton.jit
def _clamped_swiglu_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    gate = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + col, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + col, clamped_swiglu_of(gate, up), mask=mask)


@triton.jit
def clamped_swiglu_of(gate, up):
    """The activation of both halves, in their dtype."""
    dtype: tl.constexpr = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    # Unlike minimum and maximum, which NaN would leave as the limit.
    gate = tl.where(gate > _LIMIT, _LIMIT, gate)
    up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
    return (gate / (1.0 + tl.exp(gate * -_ALPHA)) * (up + 1.0)).to(dtype)
