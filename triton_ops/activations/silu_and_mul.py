"""The gated activation of SwiGLU feed-forward layers (Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from triton_ops.activations.elementwise import launch_gated, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton


def silu_and_mul(x: Tensor, *, deterministic: bool = False, impl: Impl = "auto") -> Tensor:
    """`silu(gate) * up` of `x [..., 2 * size]` = gate | up: `[..., size]` in x's dtype.

    `deterministic`: the bits of an element do not depend on its place. They do in torch's silu on a CPU, which
    computes the last elements of each thread's share in another way than the others; the kernel has no such rest.
    """
    if runs_triton(impl, x.device):
        return launch_gated(_silu_and_mul_kernel, x)
    gate, up = x.chunk(2, dim=-1)
    return (_silu_alike(gate) if deterministic else silu(gate)) * up


def _silu_alike(gate: Tensor) -> Tensor:
    """`silu(gate)`, of steps that torch computes alike at all places."""
    wide = gate.float()
    return (wide / (-wide).exp_().add_(1.0)).to(gate.dtype)


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    gate = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + col, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + col, silu_times(gate, up), mask=mask)


@triton.jit
def silu_times(gate, up):
    """`silu(gate) * up` in their dtype."""
    wide = gate.to(tl.float32)
    # Rounded before it multiplies, as in torch.
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up
