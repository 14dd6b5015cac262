"""The ranks that compute a model together, each with its part of the weights, as a layer sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from triton_ops.ranks.peer_sum import PeerSum

_SUM: Any = c10d.AllreduceOptions()
_GATHER: Any = c10d.AllgatherOptions()  # type: ignore[attr-defined]
for _options in (_SUM, _GATHER):
    if hasattr(_options, "asyncOp"):  # torch 2.8 and later: on the current stream, not on one of its own
        _options.asyncOp = False


@dataclass(frozen=True)
class Ranks:
    """Whose place is `rank` of `size`. All of them call the same methods in the same order, with the same shapes.

    Attributes:
        group: torch's process group, NCCL's on GPUs, Gloo's on CPUs; None: of one rank.
        peers: sums parts that it takes, in the order of ranks, in float32, and joins them; None: the group does
            all.
        ordered: sums are taken in the order of ranks, in float32. Otherwise the order, and so the bits of a sum of
            more than two, may depend on where in a tensor an element is, and on the tensor's size.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    peers: PeerSum | None = None
    ordered: bool = False

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def dividing(self, num_rows: int) -> Ranks:
        """Those that hold so many rows in equal parts: these, or where the parts would not be equal, one alone."""
        return self if num_rows % self.size == 0 else ALONE

    def partial_sum(self, part: Tensor) -> PartialSum:
        """`summed`, or what `RMSNorm.add` takes where it sums in its own kernel."""
        if self.peers is not None and not self.is_alone and self.peers.takes_rows(part):
            return RankSum(part, self.peers)
        return self.summed(part)

    def summed(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, of the same bits on each, in the place of `part`, which is contiguous."""
        if self.is_alone:
            return part
        if self.peers is not None and self.peers.takes(part):
            return self.peers(part)
        if not self.ordered:
            _wait(self.group.allreduce([part], _SUM))
            return part
        total = torch.zeros_like(part, dtype=torch.float32)
        for each in self._gathered(part):
            total += each
        return part.copy_(total)

    def joined(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The ranks' parts `[S, N]` side by side, `[S, size * N]`: `out`, if it is given."""
        if self.is_alone:
            return part if out is None else out.copy_(part)
        num_rows, width = part.shape
        if out is None:
            out = part.new_empty(num_rows, self.size * width)
        if self.peers is not None and self.peers.joins(part):
            return self.peers.join(part, out)
        out.view(num_rows, self.size, width).copy_(self._gathered(part).transpose(0, 1))
        return out

    def _gathered(self, part: Tensor) -> Tensor:
        """`[size, ...]`, all ranks' parts."""
        parts = part.new_empty(self.size * len(part), *part.shape[1:])
        _wait(self.group._allgather_base(parts, part.contiguous(), _GATHER))
        return parts.view(self.size, *part.shape)


class RankSum(NamedTuple):
    """A rank's part of a sum, which was not made yet.

    Attributes:
        part: `[num_tokens, size]`, contiguous.
        peers: sum it.
    """

    part: Tensor
    peers: PeerSum

    def summed(self) -> Tensor:
        """The sum, in the part's place."""
        return self.peers(self.part)


PartialSum = Tensor | RankSum
"""What `RMSNorm.add` adds to a residual."""


def whole(addend: PartialSum) -> Tensor:
    """With the sum made."""
    return addend.summed() if isinstance(addend, RankSum) else addend


ALONE = Ranks()


def _wait(work: Any) -> None:
    """Until what was asked for is done; where it is in a GPU's order there is nothing to wait for."""
    if work is not None:
        work.wait()
