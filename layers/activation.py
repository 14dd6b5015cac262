"""The activation of SwiGLU feed-forward layers."""

from __future__ import annotations

from torch import Tensor, nn

from triton_ops.silu_and_mul import silu_and_mul


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of the stacked projection gate | up."""

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., 2 * size]` to `[..., size]`."""
        return silu_and_mul(x)
