"""The ranks that compute a model together, each with its part of the weights, as a layer sees them."""

# Tests: tests/layers/test_ranks.py

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Whose place is `rank` of `size`. All of them call the same methods in the same order, with the same shapes.

    Attributes:
        group: torch's process group, NCCL's on GPUs, Gloo's on CPUs; None: of one rank.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def dividing(self, num_rows: int) -> Ranks:
        """Those that hold so many rows in equal parts: these, or where the parts would not be equal, one alone."""
        return self if num_rows % self.size == 0 else ALONE

    def summed(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, the same bits on each of them; in place of `part`, which is contiguous."""
        if not self.is_alone:
            self.group.allreduce([part]).wait()
        return part

    def joined(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The ranks' parts `[S, N]` side by side, `[S, size * N]`: `out`, if it is given."""
        if self.is_alone:
            return part if out is None else out.copy_(part)
        num_rows, width = part.shape
        parts = torch.empty((self.size * num_rows, width), dtype=part.dtype, device=part.device)
        self.group._allgather_base(parts, part.contiguous()).wait()
        if out is None:
            out = part.new_empty(num_rows, self.size * width)
        out.view(num_rows, self.size, width).copy_(parts.view(self.size, num_rows, width).transpose(0, 1))
        return out


ALONE = Ranks()
