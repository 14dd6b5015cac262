"""The dtype, device and implementation of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from triton_ops.implementation import Impl


@dataclass(frozen=True)
class Placement:
    """The dtype and device of a model's weights, and the implementation of its operations."""

    dtype: torch.dtype
    device: torch.device
    impl: Impl = "auto"

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
