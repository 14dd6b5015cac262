"""Root mean square norm whose result is gated, of heads."""

from __future__ import annotations

from torch import Tensor

from triton_ops.activations.elementwise import check_vector
from triton_ops.norms.rms_norm import rms_norm


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x, weight) * silu(gate)` of heads, over the last dimension: `[T, H, D]` in x's dtype, contiguous.

    `x` and `gate` are `[T, H, D]` in any float dtype, elements of a head side by side, `weight` is `[D]` in the
    same. The order is that of transformers: normed in float32, rounded, multiplied by the weight and rounded,
    multiplied by `silu(gate)` in float32, rounded.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, gate, weight)
    normed = rms_norm(x, weight, eps, impl="torch")
    wide = gate.float()
    return (normed.float() * (wide / (-wide).exp().add_(1.0))).to(x.dtype).contiguous()


def _check(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must be [T, H, D], but is {[*x.shape]}")
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(f"gate must be {[*x.shape]} in {x.dtype}, but is {[*gate.shape]} in {gate.dtype}")
    for name, heads in (("x", x), ("gate", gate)):
        if heads.numel() and heads.stride(2) != 1:
            raise ValueError(
                f"elements of {name}'s heads must lie side by side, but have a stride of {heads.stride(2)}"
            )
    check_vector("weight", weight, x)
