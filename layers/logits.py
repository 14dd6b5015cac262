"""The output head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from layers.embedding import Embedding
from layers.placement import Placement
from triton_ops.attention.soft_cap import soft_cap


class LogitsHead(nn.Module):
    """Projects hidden states to the vocabulary, with a weight of its own or the embedding's (`tied_to`).

    With a `softcap` the logits become `softcap * tanh(logits / softcap)`.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        softcap: float | None = None,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.softcap = softcap
        self.impl = placement.impl
        self.weight = placement.parameter(vocab_size, hidden_size) if tied_to is None else tied_to.weight

    def forward(
        self, hidden_states: Tensor, logits_indices: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens `logits_indices`, int32 `[S]`, or of all T tokens if None.

        `hidden_states` is `[T, hidden_size]`. Returns `[S, vocab_size]` in the model's dtype: `out`, if given.
        """
        if logits_indices is not None:
            hidden_states = hidden_states.index_select(0, logits_indices)
        if self.softcap is None:
            return torch.mm(hidden_states, self.weight.T, out=out)
        capped = soft_cap(torch.mm(hidden_states, self.weight.T), self.softcap, impl=self.impl)
        return capped if out is None else out.copy_(capped)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The layer's tensors in a checkpoint, where it is called `name`; none if it is tied."""
        if not self.tied:
            yield f"{name}.weight", self.weight
