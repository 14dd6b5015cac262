"""Matrices of experts in e4m3, with scales in float32: see `e4m3_linear` for the format and its source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.linear.e4m3_linear import dequantised_weight


@dataclass(frozen=True)
class ScaledE4M3:
    """Matrices `[..., columns, depth]`; what they multiply is quantised, too.

    Attributes:
        values: e4m3 `[..., columns, depth]`.
        scale: float32 `[..., columns]`, or `[..., columns / 128, depth / 128]` rounded up, of blocks.
    """

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the matrices."""
        return self.values.shape

    @property
    def by_blocks(self) -> bool:
        """Whether blocks have scales, and groups of 128 elements of a row that they multiply."""
        return self.scale.dim() == self.values.dim()

    def is_contiguous(self) -> bool:
        """Whether both parts are."""
        return self.values.is_contiguous() and self.scale.is_contiguous()

    def __getitem__(self, index: int) -> ScaledE4M3:
        """One of several matrices."""
        return ScaledE4M3(self.values[index], self.scale[index])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """A matrix `[columns, depth]` in `dtype`."""
        return dequantised_weight(self.values, self.scale).to(dtype)
