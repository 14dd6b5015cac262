"""What all layers have: their place, and weights that a checkpoint fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from layers.checkpoint_slot import CheckpointSlot
from layers.formats.weight_format import PLAIN, WeightFormat
from layers.ranks import ALONE, Ranks
from layers.stages import WHOLE, Stage
from triton_ops.implementation import Impl


@dataclass(frozen=True)
class Placement:
    """The dtype and device of a model's weights, and the implementation of its operations.

    Attributes:
        deterministic: the bits of a token's result depend on the tokens up to it alone, not on the pass.
        quantization: of the weights of linear layers, as they are stored or quantised when they are loaded.
        holds_quantised: whether quantised weights are held and multiplied so; otherwise they are dequantised.
        ranks: those that hold the model's weights together, or those of a stage.
        stage: of the layers that these ranks have.
    """

    dtype: torch.dtype
    device: torch.device
    impl: Impl = "auto"
    deterministic: bool = False
    quantization: WeightFormat = PLAIN
    holds_quantised: bool = False
    ranks: Ranks = ALONE
    stage: Stage = WHOLE

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised weight, in another dtype if one is given."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    def unquantised(self) -> Placement:
        """The same for a linear layer that checkpoints leave in the model's dtype."""
        return replace(self, quantization=PLAIN)


class Layer(nn.Module):
    """A layer with weights, uninitialised until the tensors of `checkpoint_tensors` are filled."""

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        """The layer's tensors in a checkpoint, where it is called `name`: (tensor name, place)."""
        return self.named_parameters(name, recurse=False)
