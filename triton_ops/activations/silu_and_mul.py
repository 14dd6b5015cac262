"""The gated activation of SwiGLU feed-forward layers (Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from triton_ops.activations.elementwise import launch_gated, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton


def silu_and_mul(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`silu(gate) * up` of `x [..., 2 * size]` = gate | up: `[..., size]` in x's dtype."""
    if runs_triton(impl, x.device):
        return launch_gated(_silu_and_mul_kernel, x)
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, col = row_and_columns(SIZE, BLOCK)
    mask = col < SIZE
    gate = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + col, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded before it multiplies, as in torch.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * SIZE + col, activated * up, mask=mask)
