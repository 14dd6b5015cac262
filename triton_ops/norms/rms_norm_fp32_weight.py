"""Root mean square norm whose weight multiplies in float32, before rounding, as in OLMo 2 and Gemma."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import Impl, runs_triton
from triton_ops.norms.rms_norm import launch_rms_norm


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, eps: float, *, offset: float, impl: Impl = "auto") -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension.

    `x` is `[..., size]` in any float dtype, `weight` `[size]` in the same. Everything is computed in float32 and
    rounded to x's dtype at the end; `rms_norm` rounds before it multiplies. `offset` is 0 in OLMo 2 and 1 in
    Gemma, whose weights are centred on 0.
    """
    if runs_triton(impl, x.device):
        return launch_rms_norm(x, None, weight, eps, offset=offset)[0]
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype)


def add_rms_norm_fp32_weight(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """`rms_norm_fp32_weight(x + residual)` and the sum, the next residual; both `[..., size]` in x's dtype."""
    if runs_triton(impl, x.device):
        return launch_rms_norm(x, residual, weight, eps, offset=offset)
    residual = x + residual
    return rms_norm_fp32_weight(residual, weight, eps, offset=offset, impl="torch"), residual


def norm_add_rms_norm_fp32_weight(
    x: Tensor,
    residual: Tensor,
    before: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_fp32_weight` of `rms_norm_fp32_weight(x, before)`, as between Gemma's attention and
    feed-forward.
    """
    if runs_triton(impl, x.device):
        return launch_rms_norm(x, residual, weight, eps, offset=offset, before=before)
    x = rms_norm_fp32_weight(x, before, eps, offset=offset, impl="torch")
    return add_rms_norm_fp32_weight(x, residual, weight, eps, offset=offset, impl="torch")


def rms_norm_fp32_weight_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float, impl: Impl = "auto"
) -> Tensor:
    """`rms_norm_fp32_weight(x) + residual`, as after OLMo 2's attention and feed-forward."""
    if runs_triton(impl, x.device):
        return launch_rms_norm(x, residual, None, eps, offset=offset, before=weight)[1]
    return rms_norm_fp32_weight(x, weight, eps, offset=offset, impl="torch") + residual
