"""RMSNorm, alone or after the addition of a residual."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from layers.placement import Placement
from triton_ops.rms_norm import add_rms_norm, rms_norm
from triton_ops.wide_rms_norm import add_wide_rms_norm, wide_rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, with a weight and no bias.

    `neutral` is the value of the weights that changes nothing. `offset` None: the result is rounded before the
    weight multiplies it.
    """

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
        """`x + residual` normed, and the sum: the next residual."""
        return add_rms_norm(x, residual, self.weight, self.eps, impl=self.impl)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint stores of this layer, called `name` there: (tensor name, where it goes)."""
        yield f"{name}.weight", self.weight


class WideRMSNorm(RMSNorm):
    """The norm of OLMo 2 (`offset` 0) and Gemma (1): `x * (offset + weight)` is rounded once, at the end."""

    offset: float

    def __init__(self, size: int, eps: float, *, offset: float, placement: Placement) -> None:
        super().__init__(size, eps, placement=placement)
        self.offset = offset
        self.neutral = 1.0 - offset

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]`, normed."""
        return wide_rms_norm(x, self.weight, self.eps, offset=self.offset, impl=self.impl)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual` normed, and the sum: the next residual."""
        return add_wide_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, impl=self.impl)
