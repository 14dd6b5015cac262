"""Linear projections: plain, and several stacked into one matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain

from torch import nn

from layers.checkpoint_slot import CheckpointSlot, Packed
from layers.input_metadata import InputMetadata
from layers.norm import Hidden
from layers.placement import Layer, Placement
from layers.products import Product
from layers.ranks import ALONE, PartialSum, Ranks
from layers.weight import Weight


class Linear(Layer):
    """`x W^T + b`.

    Attributes:
        ranks: what is computed is a part of their sum; the first one adds the bias.
        emits_parts: whether the result may be parts, because its reader adds them, as `RMSNorm.add` does: see
            `Sublayer.join`. They are float32 `[P, num_tokens, out_features]`, where `split_k_linear` is faster (on
            a GPU, for small batches, unless the layer is deterministic); of several ranks a RankSum.
    """

    ranks: Ranks = ALONE
    emits_parts = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        starts: Sequence[int] = (0,),
        placement: Placement,
    ) -> None:
        """`starts`: see `Weight`."""
        super().__init__()
        self.weight = Weight(out_features, in_features, starts=starts, placement=placement)
        self.bias = placement.parameter(out_features) if bias else None
        self.product = Product(placement.impl) if placement.deterministic else None

    @property
    def added_bias(self) -> nn.Parameter | None:
        """The bias that this rank adds."""
        return self.bias if self.ranks.rank == 0 else None

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        """`x [..., in_features]` to `[..., out_features]`, or to parts: see `emits_parts`."""
        cuts = self.emits_parts and self.ranks.is_alone
        part = self.weight.product(x, self.added_bias, ordered=self.product, split_k_ok=cuts)
        # The one place between a product and what follows: an adapter of the pass would add to `part` here.
        return self.ranks.partial_sum(part) if self.emits_parts else self.ranks.summed(part)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self._part(name, 0, self.weight.shape[0])

    def _part(self, name: str, start: int, stop: int) -> Iterator[tuple[str, CheckpointSlot]]:
        """Of the outputs from `start` to `stop`, where a checkpoint calls them `name`."""
        yield from self.weight.places(name, start, stop)
        if self.bias is not None:
            yield f"{name}.bias", self.bias[start:stop]


class SummedLinear(Linear):
    """`x W^T + b` where each rank has some of x's features, and W's columns for them; `in_features` are its own.

    All ranks hold the bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        super().__init__(in_features, out_features, bias=bias, placement=placement)
        self.ranks = placement.ranks


class StackedLinear(Linear):
    """Projections of the same input as one matrix, their outputs side by side.

    `parts` maps the last component of each part's name to its number of outputs, in the order of the stack, or to
    those of several that are stored as one. A checkpoint stores the parts one by one, or as one tensor whose name
    ends in `packed_as`. Ranks cut each by itself.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | Sequence[int]],
        *,
        packed_as: str | None,
        bias: bool,
        placement: Placement,
    ) -> None:
        sizes = {name: (size,) if isinstance(size, int) else tuple(size) for name, size in parts.items()}
        if packed_as is not None:
            sizes = {packed_as: tuple(chain(*sizes.values()))}
        ends = [*accumulate(map(sum, sizes.values()))]
        starts = [0, *ends[:-1]]
        super().__init__(in_features, ends[-1], bias=bias, starts=starts, placement=placement)
        self.stored_parts = tuple(zip(sizes.items(), starts, ends, strict=True))

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        """As `Layer.checkpoint_tensors`, with a view for each part; `name` is the prefix of their names."""
        for (part, sizes), start, stop in self.stored_parts:
            for stored, place in self._part(f"{name}.{part}", start, stop):
                yield stored, place if len(sizes) == 1 else Packed(place, sizes)
