"""The gated activation of GeGLU feed-forward layers (Shazeer, 2020; GELU: Hendrycks and Gimpel, 2016)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu

from triton_ops.activations.elementwise import launch_gated, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton


def gelu_and_mul(
    x: Tensor, *, approximate: Literal["none", "tanh"], deterministic: bool = False, impl: Impl = "auto"
) -> Tensor:
    """`gelu(gate) * up` of `x [..., 2 * size]` = gate | up: `[..., size]` in x's dtype.

    `approximate` "none" is `gate * Phi(gate)` with the normal distribution's Phi, "tanh" the approximation
    `gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3)))`. `deterministic`: see `silu_and_mul`.
    """
    if runs_triton(impl, x.device):
        return launch_gated(_gelu_and_mul_kernel, x, TANH={"none": False, "tanh": True}[approximate])
    gate, up = x.chunk(2, dim=-1)
    return (_gelu_alike(gate, approximate) if deterministic else gelu(gate, approximate=approximate)) * up


def _gelu_alike(gate: Tensor, approximate: str) -> Tensor:
    """`gelu(gate)`, of steps that torch computes alike at all places."""
    wide = gate.float()
    if approximate == "tanh":
        bent = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(0.7978845608028654).tanh_()
    else:
        bent = (wide * 0.7071067811865476).erf_()
    return (bent.add_(1.0).mul_(wide).mul_(0.5)).to(gate.dtype)


@triton.jit
def _gelu_and_mul_kernel(
    x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, TANH: tl.constexpr
):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    gate = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + col, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    if TANH:
        # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), which neither cancels nor overflows.
        activated = wide / (1.0 + tl.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))
    else:
        activated = wide * (0.5 + 0.5 * tl.erf(wide * 0.7071067811865476))
    # Rounded before it multiplies, as in torch.
    tl.store(out_ptr + row * SIZE + col, activated.to(gate.dtype) * up, mask=mask)
