"""What all layers have: their place, and weights that a checkpoint fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triton_ops.implementation import Impl


@dataclass(frozen=True)
class Placement:
    """The dtype and device of a model's weights, and the implementation of its operations.

    `deterministic`: the bits of a token's result depend on the tokens up to it alone, not on the pass.
    """

    dtype: torch.dtype
    device: torch.device
    impl: Impl = "auto"
    deterministic: bool = False

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised weight, in a dtype of its own if one is given."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


class Layer(nn.Module):
    """A layer with weights, uninitialised until the tensors of `checkpoint_tensors` are filled."""

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The layer's tensors in a checkpoint, where it is called `name`: (tensor name, destination)."""
        return self.named_parameters(name, recurse=False)
