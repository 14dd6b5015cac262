"""Linear projections: plain, and several stacked into one matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from layers.placement import Layer, Placement
from layers.products import Product
from triton_ops.implementation import gpu_of, runs_triton
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.tuning import split_k_config


class Linear(Layer):
    """`x W^T + b`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(out_features, in_features)
        self.bias = placement.parameter(out_features) if bias else None
        self.impl = placement.impl
        self.product = Product(placement.impl) if placement.deterministic else None

    def forward(self, x: Tensor, *, split_k_ok: bool = False) -> Tensor:
        """`x [..., in_features]` to `[..., out_features]`.

        With `split_k_ok`, for callers that can add parts (`RMSNorm.add`), the result may be float32 parts
        `[P, num_tokens, out_features]`, where `split_k_linear` is faster: on a GPU, for small batches, unless the
        layer is deterministic.
        """
        if self.product is not None:
            return self.product(x, self.weight, self.bias)
        if split_k_ok and self.bias is None and runs_triton(self.impl, x.device):
            config = split_k_config(gpu_of(x.device), len(x), *self.weight.shape, self.weight.dtype)
            if config is not None:
                return split_k_linear(x, self.weight, config, impl=self.impl)
        return nn.functional.linear(x, self.weight, self.bias)


class StackedLinear(Linear):
    """Projections of the same input as one matrix, their outputs side by side.

    `parts` maps the last component of each part's name to its number of outputs, in the order of the stack. A
    checkpoint stores the parts one by one, or as one tensor whose name ends in `packed_as`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        packed_as: str | None,
        bias: bool,
        placement: Placement,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, placement=placement)
        self.parts, self.packed_as = parts, packed_as

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """As `Layer.checkpoint_tensors`, with a view for each part; `name` is the prefix of their names."""
        if self.packed_as is not None:
            yield from super().checkpoint_tensors(f"{name}.{self.packed_as}")
            return
        start = 0
        for part, size in self.parts.items():
            for own, tensor in super().checkpoint_tensors(f"{name}.{part}"):
                yield own, tensor[start : start + size]
            start += size
