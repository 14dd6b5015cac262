"""RMSNorm, alone, before or after the addition of a residual."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from layers.placement import Layer, Placement
from layers.products import Product
from layers.ranks import PartialSum, RankSum, whole
from layers.weight import Weight
from triton_ops.activations.quantised_rows import BLOCK, QuantisedRows
from triton_ops.implementation import cdiv
from triton_ops.norms.rms_norm import add_rms_norm, normed_by, quantised_rms_norm, rms_norm, rms_norm_add
from triton_ops.recurrent.gated_rms_norm import gated_rms_norm, gated_squares

Hidden = Tensor | QuantisedRows
"""`[T, size]`, for layers whose weights are in e4m3 quantised by the kernel that made it."""


class RMSNorm(Layer):
    """Root mean square norm over the last dimension, with a weight and no bias.

    `offset`: see `rms_norm`. `neutral` is the weight that changes nothing.

    Attributes:
        adds_parts: whether `add` takes parts of x: see `Linear`.
        before: the norm, of the same kind, that x goes through before `add` adds it to a residual.
        reader: the weight whose product alone reads what `add` norms: if it is in e4m3, `add` quantises that.

    A block sets the last two. They are in tuples, since they are no modules of the norm's; empty: there is none.
    """

    def __init__(self, size: int, eps: float, *, offset: float | None = None, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.eps, self.offset, self.impl = eps, offset, placement.impl
        self.neutral = 1.0 - (offset or 0.0)
        self.adds_parts = offset is None
        self.before, self.reader = tuple[RMSNorm, ...](), tuple[Weight, ...]()

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]`, normed."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset, impl=self.impl)

    def add(self, x: PartialSum, residual: Tensor | None) -> tuple[Hidden, Tensor]:
        """`x + residual` normed as the `reader` takes it, and the sum, the next residual; without a residual, x
        normed, and x.
        """
        if self.reader and (groups := self.reader[0].input_groups) is not None:
            return self._quantised(x, residual, groups)
        if residual is None:
            x = whole(x)
            return self(x), x
        if isinstance(x, RankSum):
            if self.adds_parts and not self.before:
                return x.peers.add_rms_norm(x.part, residual, self.weight, self.eps)
            x = whole(x)
        first = self.before[0].weight if self.before else None
        return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, before=first, impl=self.impl)

    def _quantised(self, x: PartialSum, residual: Tensor | None, groups: bool) -> tuple[QuantisedRows, Tensor]:
        fits = self.adds_parts and not (groups and len(self.weight) < BLOCK)
        if fits and isinstance(x, RankSum) and residual is not None:
            return x.peers.quantised_rms_norm(x.part, residual, self.weight, self.eps, groups=groups)
        args = whole(x), residual, self.weight, self.eps
        return quantised_rms_norm(*args, groups=groups, offset=self.offset, impl=self.impl)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """`x` normed, plus `residual`."""
        return rms_norm_add(x, residual, self.weight, self.eps, offset=self.offset, impl=self.impl)


class JointRMSNorm(RMSNorm):
    """RMSNorm of what ranks hold together, such as all heads of a token; `size` is of this rank's part.

    What several ranks hold is in the sum of squares as often as in the number that it is divided by.
    """

    def __init__(self, size: int, eps: float, *, offset: float | None = None, placement: Placement) -> None:
        super().__init__(size, eps, offset=offset, placement=placement)
        self.ranks = placement.ranks
        self.product = Product(placement.impl) if placement.deterministic else None

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]`, normed by the mean of all ranks' squares."""
        if self.ranks.is_alone:
            return super().forward(x)
        total = self.ranks.summed(self._squares(x.float()))
        mean = total / (x.shape[-1] * self.ranks.size)
        return normed_by(mean, x, self.weight, self.eps, offset=self.offset)

    def _squares(self, x: Tensor) -> Tensor:
        """Their sum, `[..., 1]`."""
        squares = x.square()
        if self.product is None:
            return squares.sum(-1, keepdim=True)
        return self.product(squares, squares.new_ones(1, x.shape[-1]))  # in one order at every number of rows


class GatedRMSNorm(RMSNorm):
    """RMSNorm of features times `silu` of their gates, in `num_groups` groups of equal sizes that are normed by
    themselves. Ranks hold the groups together, and `size` is of this rank's part: some of the groups, or a part of
    one, whose neighbours have the others.
    """

    def __init__(self, size: int, num_groups: int, eps: float, *, placement: Placement) -> None:
        super().__init__(size, eps, placement=placement)
        self.ranks, self.num_groups = placement.ranks, num_groups

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x * silu(gate)`, both `[T, size]`, normed."""
        own_groups = cdiv(self.num_groups, self.ranks.size)
        x, gate = (each.view(len(each), own_groups, -1) for each in (x, gate))
        mean = None if self.num_groups % self.ranks.size == 0 else self._mean(x, gate)
        args = x, gate, self.weight, self.eps
        return gated_rms_norm(*args, gate_first=True, mean=mean, impl=self.impl).flatten(1)

    def _mean(self, x: Tensor, gate: Tensor) -> Tensor:
        """Of the squares of a group, float32 `[T, 1]`, of which this rank has a part, `[T, 1, size]`."""
        num_parts = self.ranks.size // self.num_groups
        part = gated_squares(x, gate, num_parts * x.shape[2], impl=self.impl)
        if self.num_groups == 1:
            return self.ranks.summed(part)
        group = self.ranks.rank // num_parts
        # All ranks sum the means of all groups at once.
        means = self.ranks.summed(pad(part, (group, self.num_groups - 1 - group)))
        return means[:, group : group + 1]
