"""The token embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from layers.placement import Placement


class Embedding(nn.Module):
    """A row of `weight [vocab_size, hidden_size]` for each token, times `scale` in the weight's dtype."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, placement: Placement) -> None:
        super().__init__()
        self.scale = torch.tensor(scale, dtype=placement.dtype, device="cpu").item()
        self.weight = placement.parameter(vocab_size, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`input_ids` int32 or int64 `[T]`, each below vocab_size, to `[T, hidden_size]`."""
        embedded = nn.functional.embedding(input_ids, self.weight)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The layer's tensors in a checkpoint, where it is called `name`: (tensor name, destination)."""
        yield f"{name}.weight", self.weight
