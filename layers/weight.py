"""The weight of a linear layer: in the model's dtype, or in e4m3 with scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layers.place import Filled, Place
from layers.placement import Placement
from layers.products import Product
from layers.quantization import Scales, held_places, plain_places, rounded_place
from triton_ops.implementation import cdiv, gpu_of, runs_triton
from triton_ops.kv.e4m3 import E4M3
from triton_ops.linear.e4m3_linear import BLOCK, e4m3_linear
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.tuning import split_k_config


class Weight(nn.Module):
    """`W [N, K]` of products `x W^T + b`.

    In e4m3 it is `values` times `scale`, and x is quantised, too, for each product. Where the placement does not
    hold e4m3, or blocks of a stack's parts would not lie on those of the stack, a quantised weight is held in the
    model's dtype. So it is, by `hold_plain`, where a checkpoint leaves a part as it is.

    Attributes:
        values: `[N, K]`, in the model's dtype or in e4m3.
        scale: float32 `[N]`, or `[N / 128, K / 128]` rounded up, of blocks; None: values are in the model's dtype.
    """

    def __init__(self, num_rows: int, depth: int, *, starts: Sequence[int] = (0,), placement: Placement) -> None:
        """`starts` are the first rows of the parts that a checkpoint stores."""
        super().__init__()
        self.impl, self.quantization, self._placement = placement.impl, placement.quantization, placement
        self.scale: nn.Parameter | None = None
        by_blocks = self.quantization is not None and self.quantization.scales is Scales.BLOCK
        aligned = not by_blocks or all(start % BLOCK == 0 for start in starts)
        if self.quantization is not None and placement.holds_e4m3 and aligned:
            shape = (cdiv(num_rows, BLOCK), cdiv(depth, BLOCK)) if by_blocks else (num_rows,)
            self.values = placement.parameter(num_rows, depth, dtype=E4M3)
            self.scale = placement.parameter(*shape, dtype=torch.float32)
        else:
            self.values = placement.parameter(num_rows, depth)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def product(
        self, x: Tensor, bias: Tensor | None, *, ordered: Product | None = None, split_k_ok: bool = False
    ) -> Tensor:
        """`x [..., K]` to `x W^T + b`, `[..., N]` in x's dtype; by `ordered`, if it is given.

        With `split_k_ok` the result may be parts: see `Linear.forward`.
        """
        if self.scale is not None:
            return e4m3_linear(x, self.values, self.scale, bias, impl=self.impl)
        if ordered is not None:
            return ordered(x, self.values, bias)
        if split_k_ok and bias is None and runs_triton(self.impl, x.device):
            config = split_k_config(gpu_of(x.device), len(x), *self.shape, self.values.dtype)
            if config is not None:
                return split_k_linear(x, self.values, config, impl=self.impl)
        return nn.functional.linear(x, self.values, bias)

    def hold_plain(self) -> None:
        """Hold the model's dtype in place of e4m3. It is not filled any more."""
        self.values, self.scale = self._placement.parameter(*self.shape), None

    def places(self, name: str, start: int, stop: int) -> Iterator[tuple[str, Place]]:
        """Rows `start` to `stop` in a checkpoint, where their layer is called `name`: (tensor name, place)."""
        values = self.values[start:stop]
        if self.quantization is None or self.quantization.ignores(name):
            place: Place = values
            if self.scale is not None:
                place = LeftPlain(values.shape, values.dtype, values.copy_, self)
            yield f"{name}.weight", place
        elif self.scale is not None:
            unit = BLOCK if self.scale.dim() == 2 else 1
            scale = self.scale[start // unit : cdiv(stop, unit)]
            yield from held_places(name, values, scale, self.quantization)
        elif self.quantization.scale_name is None:
            yield f"{name}.weight", rounded_place(values)
        else:
            yield from plain_places(name, values, self.quantization)


@dataclass(frozen=True)
class LeftPlain(Filled):
    """The place of a part that its checkpoint leaves as it is, while the `weight` is held in e4m3."""

    weight: Weight
