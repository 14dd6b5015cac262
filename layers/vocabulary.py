"""The two ends of a model: the token embedding and the output head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layers.input_metadata import InputMetadata
from layers.placement import Layer, Placement
from layers.products import Product
from triton_ops.attention.soft_cap import soft_cap


class Embedding(Layer):
    """A row of `weight [vocab_size, hidden_size]` for each token, times `scale` in the weight's dtype.

    Ranks hold equal parts of the rows; where these do not divide them, all rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, placement: Placement) -> None:
        super().__init__()
        self.scale = torch.tensor(scale, dtype=placement.dtype, device="cpu").item()
        self.ranks = placement.ranks.dividing(vocab_size)
        self.weight = placement.parameter(vocab_size // self.ranks.size, hidden_size)

    def forward(self, input_ids: Tensor, metadata: InputMetadata) -> Tensor:
        """`input_ids` int32 or int64 `[T]`, each below vocab_size, to `[T, hidden_size]`."""
        embedded = self._rows(input_ids)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def _rows(self, input_ids: Tensor) -> Tensor:
        if self.ranks.is_alone:
            return nn.functional.embedding(input_ids, self.weight)
        rows = input_ids - self.ranks.rank * len(self.weight)
        elsewhere = (rows < 0) | (rows >= len(self.weight))
        own = nn.functional.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.ranks.summed(own.masked_fill_(elsewhere.unsqueeze(1), 0.0))


class LogitsHead(Layer):
    """Projects hidden states to the vocabulary by `weight [vocab_size, hidden_size]`, maybe the embedding's, of
    which ranks hold equal parts, or all rows, as there.

    With a `softcap` the logits become `softcap * tanh(logits / softcap)`.
    """

    def __init__(
        self, weight: nn.Parameter, vocab_size: int, *, softcap: float | None = None, placement: Placement
    ) -> None:
        super().__init__()
        self.ranks = placement.ranks.dividing(vocab_size)
        self.weight, self.softcap, self.impl = weight, softcap, placement.impl
        self.product = Product(placement.impl) if placement.deterministic else None

    def forward(
        self, hidden_states: Tensor, logits_indices: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens `logits_indices`, int32 `[S]`, or of all T tokens if None.

        `hidden_states` is `[T, hidden_size]`. Returns `[S, vocab_size]` in the model's dtype: `out`, if given.
        """
        if logits_indices is not None:
            hidden_states = hidden_states.index_select(0, logits_indices)
        if self.softcap is None:
            return self._project(hidden_states, out)
        capped = soft_cap(self._project(hidden_states, None), self.softcap, impl=self.impl)
        return capped if out is None else out.copy_(capped)

    def _project(self, hidden_states: Tensor, out: Tensor | None) -> Tensor:
        if self.ranks.is_alone:
            return self._product(hidden_states, out)
        return self.ranks.joined(self._product(hidden_states, None), out)

    def _product(self, hidden_states: Tensor, out: Tensor | None) -> Tensor:
        if self.product is not None:
            return self.product(hidden_states, self.weight, out=out)
        return torch.mm(hidden_states, self.weight.T, out=out)
