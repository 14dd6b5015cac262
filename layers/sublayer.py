"""Sublayer: what a layer of a model adds to the residual, and what it hands on."""

# Tests: tests/models/test_kernels.py, tests/models/test_quantization.py

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from layers.input_metadata import InputMetadata
from layers.norm import Hidden, RMSNorm
from layers.placement import Layer
from layers.ranks import PartialSum
from layers.weight import Weight


class End(Protocol):
    """The layer that makes a sublayer's output: see `Linear`."""

    emits_parts: bool


class Sublayer(Layer):
    """Attention, a recurrent layer, a feed-forward layer, or experts."""

    @abstractmethod
    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        """`x [T, hidden_size]` to the same shape, or to parts: see `Linear`."""

    @property
    @abstractmethod
    def ends(self) -> tuple[Weight | None, End]:
        """The weight whose product alone reads the input, if there is one, and the layer that makes the output."""

    def join(self, before: RMSNorm, after: RMSNorm) -> None:
        """Settle what is handed on. This sublayer alone reads what the norm `before` makes: it is quantised as the
        weight takes it. The norm `after` adds the output, which may be parts if that norm adds these.
        """
        weight, end = self.ends
        before.reader = () if weight is None else (weight,)
        end.emits_parts = after.adds_parts
