"""Linear projections: plain, and several stacked into one matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain

from torch import Tensor, nn

from layers.place import Packed, Place
from layers.placement import Layer, Placement
from layers.products import Product
from layers.ranks import Addend
from layers.weight import Weight
from triton_ops.activations.quantised_rows import QuantisedRows


class Linear(Layer):
    """`x W^T + b`."""

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
        return self.bias

    @property
    def input_groups(self) -> bool | None:
        """Of the weight: who makes x may quantise it so."""
        return self.weight.input_groups

    def forward(self, x: Tensor | QuantisedRows, *, split_k_ok: bool = False) -> Addend:
        """`x [..., in_features]` to `[..., out_features]`.

        With `split_k_ok`, for callers that can add parts (`RMSNorm.add`), the result may be float32 parts
        `[P, num_tokens, out_features]`, where `split_k_linear` is faster: on a GPU, for small batches, unless the
        layer is deterministic. Of several ranks it may be a RankPart then.
        """
        return self._product(x, split_k_ok=split_k_ok)

    def _product(self, x: Tensor | QuantisedRows, *, split_k_ok: bool) -> Tensor:
        return self.weight.product(x, self.added_bias, ordered=self.product, split_k_ok=split_k_ok)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Place]]:
        yield from self._part(name, 0, self.weight.shape[0])

    def _part(self, name: str, start: int, stop: int) -> Iterator[tuple[str, Place]]:
        """Of the outputs from `start` to `stop`, where a checkpoint calls them `name`."""
        yield from self.weight.places(name, start, stop)
        if self.bias is not None:
            yield f"{name}.bias", self.bias[start:stop]


class SummedLinear(Linear):
    """`x W^T + b` where each rank has some of x's features, and W's columns for them; `in_features` are its own.

    All ranks hold the bias, the first one adds it.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        super().__init__(in_features, out_features, bias=bias, placement=placement)
        self.ranks = placement.ranks

    @property
    def added_bias(self) -> nn.Parameter | None:
        return self.bias if self.ranks.rank == 0 else None

    def forward(self, x: Tensor | QuantisedRows, *, split_k_ok: bool = False) -> Addend:
        """As `Linear.forward`; of several ranks the sum."""
        part = self._product(x, split_k_ok=split_k_ok and self.ranks.is_alone)
        return self.ranks.addend(part) if split_k_ok else self.ranks.summed(part)


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

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Place]]:
        """As `Layer.checkpoint_tensors`, with a view for each part; `name` is the prefix of their names."""
        for (part, sizes), start, stop in self.stored_parts:
            for stored, place in self._part(f"{name}.{part}", start, stop):
                yield stored, place if len(sizes) == 1 else Packed(place, sizes)
