"""Root mean square norm (Zhang and Sennrich, 2019), alone or after the addition of a residual."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    `x` is `[..., size]` in any float dtype, `weight` `[size]`. Normalised in float32, rounded to x's
    dtype, then multiplied by the weight: the order of transformers, which checkpoints were trained with.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)` and the sum, which is the next residual; both `[..., size]` in x's dtype."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
