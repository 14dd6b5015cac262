"""The token embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """A row of `weight [vocab_size, hidden_size]` a token, times `scale`, which is rounded to the weight's
    dtype first.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`input_ids` int32 or int64 `[T]`, each below vocab_size, to `[T, hidden_size]`."""
        embedded = nn.functional.embedding(input_ids, self.weight)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint stores of this layer, called `name` there: (tensor name, where it goes)."""
        yield f"{name}.weight", self.weight
