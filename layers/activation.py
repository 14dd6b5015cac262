"""The activations of gated feed-forward layers."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import Impl


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of the stacked projection gate | up."""

    def __init__(self, impl: Impl = "auto") -> None:
        super().__init__()
        self.impl = impl

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., 2 * size]` to `[..., size]`."""
        return silu_and_mul(x, impl=self.impl)


class GeluAndMul(nn.Module):
    """`gelu(gate) * up` of the stacked projection gate | up; `approximate` as in `gelu_and_mul`."""

    def __init__(self, approximate: Literal["none", "tanh"], impl: Impl = "auto") -> None:
        super().__init__()
        self.approximate: Literal["none", "tanh"] = approximate
        self.impl = impl

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., 2 * size]` to `[..., size]`."""
        return gelu_and_mul(x, approximate=self.approximate, impl=self.impl)
