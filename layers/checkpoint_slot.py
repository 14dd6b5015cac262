"""Where the tensors of a checkpoint go."""

# Tests: tests/layers/test_weight.py, tests/models/test_quantization.py

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CheckpointSlot(Protocol):
    """Where a stored tensor of this shape goes: a tensor of the model, or what makes one of it.

    A place of a dtype of 8 bits takes that dtype alone, any other takes all floats of more bits.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def copy_(self, source: Tensor, /) -> object:
        """Take the stored tensor, which is on the CPU."""


@dataclass(frozen=True)
class Filled:
    """A `CheckpointSlot` that gives what it takes to `fill`."""

    shape: torch.Size
    dtype: torch.dtype
    fill: Callable[[Tensor], object]

    def copy_(self, source: Tensor, /) -> None:
        self.fill(source)


@dataclass(frozen=True)
class Packed:
    """The place of parts stored as one tensor, which `whole` takes; `sizes` are those of their outputs."""

    whole: CheckpointSlot
    sizes: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def copy_(self, source: Tensor, /) -> None:
        self.whole.copy_(source)


def unpacked(place: CheckpointSlot) -> CheckpointSlot:
    """What takes the stored tensor."""
    return place.whole if isinstance(place, Packed) else place


@dataclass(frozen=True)
class LeftPlain(Filled):
    """The place of a part that its checkpoint leaves as it is, while it is held in fewer bits, until `hold_plain`
    makes new places, for the model's dtype.
    """

    hold_plain: Callable[[], object]
