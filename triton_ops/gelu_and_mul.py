"""The gated activation of GeGLU feed-forward layers (Shazeer, 2020; GELU: Hendrycks and Gimpel, 2016)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu


def gelu_and_mul(x: Tensor, *, approximate: Literal["none", "tanh"]) -> Tensor:
    """`gelu(gate) * up` of `x [..., 2 * size]` = gate | up: `[..., size]` in x's dtype.

    `approximate` "none" is `gate * Phi(gate)` with the normal distribution's Phi, "tanh" the approximation
    `gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3)))`.
    """
    gate, up = x.chunk(2, dim=-1)
    return gelu(gate, approximate=approximate) * up
