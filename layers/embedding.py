"""The token embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """A row of `weight [vocab_size, hidden_size]` a token."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`input_ids` int32 or int64 `[T]`, each below vocab_size, to `[T, hidden_size]`."""
        return nn.functional.embedding(input_ids, self.weight)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint stores of this layer, called `name` there: (tensor name, where it goes)."""
        yield f"{name}.weight", self.weight
