"""The head: logits of the tokens that are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from layers.embedding import Embedding
from layers.placement import Placement
from triton_ops.soft_cap import soft_cap


class LogitsHead(nn.Module):
    """Projects hidden states on the vocabulary, with a weight of its own or the embedding's (`tied_to`).

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

    def forward(self, hidden_states: Tensor, logits_indices: Tensor) -> Tensor:
        """Logits, in the model's dtype, of the tokens that are asked for.

        `hidden_states` is `[T, hidden_size]`, `logits_indices` int32 `[S]`; returns `[S, vocab_size]`.
        """
        logits = nn.functional.linear(hidden_states.index_select(0, logits_indices), self.weight)
        return logits if self.softcap is None else soft_cap(logits, self.softcap, impl=self.impl)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint stores of this layer, called `name` there; nothing if it is tied."""
        if not self.tied:
            yield f"{name}.weight", self.weight
