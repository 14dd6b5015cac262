"""RMSNorm, alone or after the addition of a residual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from layers.placement import Placement
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm
from triton_ops.norms.rms_norm_fp32_weight import (
    add_rms_norm_fp32_weight,
    norm_add_rms_norm_fp32_weight,
    rms_norm_fp32_weight,
    rms_norm_fp32_weight_add,
)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, with a weight and no bias.

    `neutral` is the weight that changes nothing. `offset` None: the result is rounded before the weight multiplies
    it. `accepts_split_k`: whether `add` takes parts of x.
    """

    accepts_split_k: ClassVar[bool] = True
    neutral = 1.0
    offset: float | None = None

    def __init__(self, size: int, eps: float, *, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.eps = eps
        self.impl = placement.impl

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]`, normed."""
        return rms_norm(x, self.weight, self.eps, impl=self.impl)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual` normed, and the sum, the next residual. `x` may be parts: see `Linear.forward`."""
        return add_rms_norm(x, residual, self.weight, self.eps, impl=self.impl)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The layer's tensors in a checkpoint, where it is called `name`: (tensor name, destination)."""
        yield f"{name}.weight", self.weight


class GemmaRMSNorm(RMSNorm):
    """The norm of OLMo 2 (`offset` 0) and Gemma (1): `x * (offset + weight)` is rounded once, at the end."""

    accepts_split_k = False
    offset: float

    def __init__(self, size: int, eps: float, *, offset: float, placement: Placement) -> None:
        super().__init__(size, eps, placement=placement)
        self.offset = offset
        self.neutral = 1.0 - offset

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]`, normed."""
        return rms_norm_fp32_weight(x, self.weight, self.eps, offset=self.offset, impl=self.impl)

    def add(self, x: Tensor, residual: Tensor, *, before: GemmaRMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add`; with a norm `before`, of the same kind, x is `before(x)`."""
        if before is None:
            return add_rms_norm_fp32_weight(x, residual, self.weight, self.eps, offset=self.offset, impl=self.impl)
        weights = (before.weight, self.weight)
        return norm_add_rms_norm_fp32_weight(x, residual, *weights, self.eps, offset=self.offset, impl=self.impl)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """`x` normed, plus `residual`."""
        return rms_norm_fp32_weight_add(x, residual, self.weight, self.eps, offset=self.offset, impl=self.impl)
