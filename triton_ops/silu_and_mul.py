"""The gated activation of SwiGLU feed-forward layers (Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of `x [..., 2 * size]` = gate | up: `[..., size]` in x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up
