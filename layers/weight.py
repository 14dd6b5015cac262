"""The weight of a linear layer: in the model's dtype, in e4m3 with scales, or in 4 bits with scales and zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from layers.int4_places import held_int4_places
from layers.place import LeftPlain, Place
from layers.placement import Placement
from layers.products import Product
from layers.quantization import Scales, held_places, plain_places
from triton_ops.activations.quantised_rows import BLOCK, QuantisedRows
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import cdiv, gpu_of, has_gluon, runs_triton
from triton_ops.linear.e4m3_linear import e4m3_linear
from triton_ops.linear.few_rows_linear import few_rows_linear
from triton_ops.linear.gated_linear import gated_linear
from triton_ops.linear.int4_linear import GROUP, int4_linear
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.tuning import FewRowsConfig, few_rows_config, gated_linear_config, split_k_config


class Weight(nn.Module):
    """`W [N, K]` of products `x W^T + b`.

    In e4m3 it is `values` times `scale`, and x is quantised, too, for each product. In 4 bits it is what
    `dequantized_int4` gives. Where the placement does not hold quantised weights, blocks of a stack's parts would
    not lie on those of the stack, or groups of 128 do not divide K, a quantised weight is held in the model's
    dtype. So it is, by `hold_plain`, where a checkpoint leaves a part as it is.

    Attributes:
        shape: `[N, K]`.
        values: `[N, K]`, in the model's dtype or in e4m3; in 4 bits uint8 `[N, K / 2]`, from `pack_int4`.
        scale: float32 `[N]`, or `[N / 128, K / 128]` rounded up, of blocks; in 4 bits `[N, K / 128]` in the
            model's dtype; None: values are in the model's dtype.
        zeros: uint8 `[N, K / 128]` in 4 bits, otherwise None.
    """

    def __init__(self, num_rows: int, depth: int, *, starts: Sequence[int] = (0,), placement: Placement) -> None:
        """`starts` are the first rows of the parts that a checkpoint stores."""
        super().__init__()
        self.impl, self.quantization, self._placement = placement.impl, placement.quantization, placement
        self.shape = torch.Size([num_rows, depth])
        self.scale: nn.Parameter | None = None
        self.zeros: nn.Parameter | None = None
        scales = None if self.quantization is None else self.quantization.scales
        by_blocks, by_groups = scales is Scales.BLOCK, scales is Scales.GROUP
        fits = not (by_blocks and any(start % BLOCK for start in starts)) and not (by_groups and depth % GROUP)
        if scales is None or not placement.holds_quantised or not fits:
            self.values = placement.parameter(num_rows, depth)
        elif by_groups:
            self.values = placement.parameter(num_rows, depth // 2, dtype=torch.uint8)
            self.scale = placement.parameter(num_rows, depth // GROUP)
            self.zeros = placement.parameter(num_rows, depth // GROUP, dtype=torch.uint8)
        else:
            shape = (cdiv(num_rows, BLOCK), cdiv(depth, BLOCK)) if by_blocks else (num_rows,)
            self.values = placement.parameter(num_rows, depth, dtype=E4M3)
            self.scale = placement.parameter(*shape, dtype=torch.float32)

    @property
    def input_groups(self) -> bool | None:
        """Whether products quantise x in groups of 128, or row by row (False); None: they take it as it is."""
        return None if self.scale is None or self.zeros is not None else self.scale.dim() == 2

    def product(
        self,
        x: Tensor | QuantisedRows,
        bias: Tensor | None,
        *,
        ordered: Product | None = None,
        split_k_ok: bool = False,
    ) -> Tensor:
        """`x [..., K]` to `x W^T + b`, `[..., N]` in x's dtype; by `ordered`, if it is given. x may be quantised
        already, as `input_groups` says.

        With `split_k_ok` the result may be parts: see `Linear.forward`.
        """
        if self.scale is not None and self.zeros is None:
            return e4m3_linear(x, self.values, self.scale, bias, impl=self.impl)
        assert isinstance(x, Tensor)
        if self.scale is not None and self.zeros is not None:
            return int4_linear(x, self.values, self.scale, self.zeros, bias, impl=self.impl)
        if ordered is not None:
            return ordered(x, self.values, bias)
        if split_k_ok and bias is None and runs_triton(self.impl, x.device):
            config = split_k_config(gpu_of(x.device), len(x), *self.shape, self.values.dtype)
            if config is not None:
                return split_k_linear(x, self.values, config, impl=self.impl)
        if bias is None and (few := self._few_rows(x, gated=False)) is not None:
            return few_rows_linear(x, self.values, few, impl=self.impl)
        return nn.functional.linear(x, self.values, bias)

    def silu_gated(self, x: Tensor | QuantisedRows) -> Tensor | None:
        """`silu_and_mul(x W^T)` of `x [T, K]` and W = gate | up in one kernel; None where the product and a kernel
        after it are as fast, or W is not in the model's dtype.
        """
        if isinstance(x, QuantisedRows) or self.scale is not None or not runs_triton(self.impl, x.device):
            return None
        if (few := self._few_rows(x, gated=True)) is not None:
            return few_rows_linear(x, self.values, few, gated=True, impl=self.impl)
        (num_outputs, depth), dtype = self.shape, self.values.dtype
        config = gated_linear_config(gpu_of(x.device), len(x), num_outputs // 2, depth, dtype, gluon=has_gluon())
        return None if config is None else gated_linear(x, self.values, config, impl=self.impl)

    def _few_rows(self, x: Tensor, *, gated: bool) -> FewRowsConfig | None:
        if x.dim() != 2 or not runs_triton(self.impl, x.device):
            return None
        num_columns, depth = self.shape[0] // (2 if gated else 1), self.shape[1]
        return few_rows_config(gpu_of(x.device), len(x), num_columns, depth, self.values.dtype, gated=gated)

    def hold_plain(self) -> None:
        """Hold the model's dtype in place of fewer bits. It is not filled any more."""
        self.values, self.scale, self.zeros = self._placement.parameter(*self.shape), None, None

    def places(self, name: str, start: int, stop: int) -> Iterator[tuple[str, Place]]:
        """Rows `start` to `stop` in a checkpoint, where their layer is called `name`: (tensor name, place)."""
        values = self.values[start:stop]
        if self.quantization is None or self.quantization.ignores(name):
            place: Place = values
            if self.scale is not None:
                place = LeftPlain(torch.Size([stop - start, self.shape[1]]), values.dtype, values.copy_, self)
            yield f"{name}.weight", place
        elif self.scale is not None and self.zeros is not None:
            words = None if self.quantization.scale_name is None else self.quantization.words
            yield from held_int4_places(name, values, self.scale[start:stop], self.zeros[start:stop], words)
        elif self.scale is not None:
            unit = BLOCK if self.scale.dim() == 2 else 1
            scale = self.scale[start // unit : cdiv(stop, unit)]
            yield from held_places(name, values, scale, self.quantization)
        else:
            yield from plain_places(name, values, self.quantization)
