"""What the layers of a model keep: parts of each token, such as K and V, and parts of each sequence, its state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Part:
    """What some layers keep of a token or of a sequence: in each of them arrays of one shape and one dtype.

    Attributes:
        name: of the part in a layout, and of its rows in kept caches.
        num_layers: layers that keep it; a stage's own, 0 if others of the model do.
        shape: of an array.
        divided: pieces of the first dimension, such as heads; ranks divide each by itself. With none every rank
            has the whole part.
        num_arrays: 2 for K and V, which lie beside one another.
    """

    name: str
    num_layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    divided: tuple[int, ...] = ()
    num_arrays: int = 1

    def __post_init__(self) -> None:
        if self.divided and sum(self.divided) != self.shape[0]:
            raise ValueError(f"{self.name} has {self.shape[0]} rows, but ranks divide {[*self.divided]}")
        if self.num_arrays not in (1, 2):
            raise ValueError(f"{self.name} has {self.num_arrays} arrays in a layer; copies know 1 and 2")

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of all that is kept of one token or sequence: `[num_layers, num_arrays, *shape]`; one array adds no
        dimension.
        """
        return self.num_layers, *([self.num_arrays] if self.num_arrays > 1 else []), *self.shape

    @property
    def num_bytes(self) -> int:
        """Of one token or sequence, in all layers."""
        return math.prod(self.row_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All that a model keeps, or a rank's part of it: `tokens` of each token, `sequences` of each sequence.

    Models without recurrent layers have no parts of sequences. Stages have all parts of the model, some of them in
    no layer.
    """

    tokens: tuple[Part, ...]
    sequences: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of tokens, then of sequences."""
        return *self.tokens, *self.sequences

    @property
    def bytes_per_token(self) -> int:
        """Of one token, in all layers."""
        return sum(part.num_bytes for part in self.tokens)

    @property
    def bytes_per_sequence(self) -> int:
        """Of one sequence's state, in all layers; 0 where none keeps one."""
        return sum(part.num_bytes for part in self.sequences)
