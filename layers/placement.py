"""Where a layer lives and what computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from triton_ops.implementation import Impl


@dataclass(frozen=True)
class Placement:
    """What every layer of a model is told when it is built.

    Attributes:
        dtype, device: of its weights.
        impl: which implementation of the operations it runs.
    """

    dtype: torch.dtype
    device: torch.device
    impl: Impl = "auto"

    def parameter(self, *shape: int) -> nn.Parameter:
        """A weight that someone has to fill."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
