"""RMSNorm, alone, before or after the addition of a residual."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from layers.placement import Layer, Placement
from layers.products import Product
from layers.ranks import Addend, RankPart, whole
from triton_ops.activations.quantised_rows import BLOCK, QuantisedRows
from triton_ops.implementation import cdiv
from triton_ops.norms.rms_norm import add_rms_norm, normed_by, quantised_rms_norm, rms_norm, rms_norm_add
from triton_ops.recurrent.gated_rms_norm import gated_rms_norm, gated_squares


class RMSNorm(Layer):
    """Root mean square norm over the last dimension, with a weight and no bias.

    `offset`: see `rms_norm`. `neutral` is the weight that changes nothing. `accepts_split_k`: whether `add` takes
    parts of x.
    """

    def __init__(self, size: int, eps: float, *, offset: float | None = None, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.eps, self.offset, self.impl = eps, offset, placement.impl
        self.neutral = 1.0 - (offset or 0.0)
        self.accepts_split_k = offset is None

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]`, normed."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset, impl=self.impl)

    def add(self, x: Addend, residual: Tensor, *, before: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """`x + residual` normed, and the sum, the next residual. `x` may be parts: see `Linear.forward`.
        With a norm `before`, of the same kind, x is `before(x)`.
        """
        if isinstance(x, RankPart):
            if self.accepts_split_k and before is None:
                return x.peers.add_rms_norm(x.part, residual, self.weight, self.eps)
            x = whole(x)
        first = None if before is None else before.weight
        return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, before=first, impl=self.impl)

    def quantised(self, x: Addend, residual: Tensor | None, *, groups: bool) -> tuple[QuantisedRows, Tensor]:
        """`add`, or without a residual `forward` and x, for a layer that quantises its input: see
        `Linear.input_groups`.
        """
        fits = self.accepts_split_k and not (groups and len(self.weight) < BLOCK)
        if fits and isinstance(x, RankPart) and residual is not None:
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
