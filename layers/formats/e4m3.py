"""Weights in e4m3, a float of 8 bits, with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layers.checkpoint_slot import Filled
from layers.formats.weight_format import UNNEEDED, Shape, Slots, Tensors, WeightFormat, gathered
from triton_ops.activations.quantised_rows import BLOCK, QuantisedRows
from triton_ops.e4m3 import E4M3, FIRST_CAPABILITY
from triton_ops.implementation import Impl, cdiv, gpu_of, runs_triton
from triton_ops.linear.e4m3_linear import dequantised_weight, e4m3_linear, quantised_weight
from triton_ops.moe.e4m3 import ScaledE4M3

PIECE_ROWS = 32 * BLOCK  # of a weight that is quantised as it is loaded: bounds the memory


class Scales(Enum):
    """What has a scale of its own: the whole weight, a row (an output), or a block of 128 x 128."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"


@dataclass(frozen=True)
class E4M3Format(WeightFormat):
    """`values` in e4m3 times `scale`, float32 `[..., N]`, or `[..., N / 128, K / 128]` rounded up, of blocks.
    Products quantise x, too.

    Attributes:
        scales: what has a scale of its own; in memory a tensor's scale is held for each row.
        scale_name: the last part of scales' names in the checkpoint; None: it stores plain weights.
    """

    scales: Scales
    scale_name: str | None = None

    numbers = "e4m3"
    needs = f"a GPU of compute capability {FIRST_CAPABILITY / 10}"
    of_experts = True
    unneeded = UNNEEDED

    @property
    def units(self) -> tuple[int, int]:
        return (BLOCK, BLOCK) if self.scales is Scales.BLOCK else (1, 1)

    @property
    def input_groups(self) -> bool:
        return self.scales is Scales.BLOCK

    def name_of_scalar(self, name: str) -> str:
        # transformers' own files call it otherwise than AutoFP8's.
        return name.replace(".weight_scale_inv", ".weight_scale") if self.scales is Scales.TENSOR else name

    def as_loaded(self) -> WeightFormat:
        return replace(self, scales=Scales.BLOCK if self.input_groups else Scales.ROW, scale_name=None)

    def is_multiplied(self, impl: Impl, device: torch.device, dtype: torch.dtype) -> bool:
        return runs_triton(impl, device) and gpu_of(device).capability >= FIRST_CAPABILITY

    def fits(self, depth: int, starts: Sequence[int]) -> bool:
        return not any(start % self.units[0] for start in starts)  # else blocks of parts are not those of a stack

    def tensors(self, *shape: int) -> dict[str, Shape]:
        *experts, num_rows, depth = shape
        scales = (cdiv(num_rows, BLOCK), cdiv(depth, BLOCK)) if self.input_groups else (num_rows,)
        return {"values": (shape, E4M3), "scale": ((*experts, *scales), torch.float32)}

    def rows(self, tensors: Tensors, start: int, stop: int) -> Tensors:
        unit = self.units[0]
        scale = tensors["scale"][start // unit : cdiv(stop, unit)]
        return {"values": tensors["values"][start:stop], "scale": scale}

    def slots(self, tensors: Tensors) -> Slots:
        codes, scale = tensors["values"], tensors["scale"]
        if self.scale_name is None:
            yield "weight", Filled(codes.shape, torch.float32, partial(self._quantise, tensors))
            return
        yield "weight", codes
        if self.scales is Scales.TENSOR:
            yield self.scale_name, Filled(torch.Size([1]), torch.float32, scale.copy_)
        else:
            yield self.scale_name, scale.view(len(scale), -1)

    def plain_slots(self, values: Tensor) -> Slots:
        if self.scale_name is None:
            yield "weight", Filled(values.shape, torch.float32, partial(_round, values))
            return
        num_rows, depth = values.shape
        shape = {
            Scales.TENSOR: [1],
            Scales.ROW: [num_rows, 1],
            Scales.BLOCK: [cdiv(num_rows, BLOCK), cdiv(depth, BLOCK)],
        }[self.scales]
        kinds = {"weight": (values.shape, E4M3), self.scale_name: (shape, torch.float32)}
        yield from gathered(partial(self._dequantise, values), **kinds)

    def product(
        self, tensors: Tensors, x: Tensor | QuantisedRows, bias: Tensor | None, impl: Impl, **_: Any
    ) -> Tensor:
        return e4m3_linear(x, tensors["values"], tensors["scale"], bias, impl=impl)

    def matrices(self, tensors: Tensors) -> ScaledE4M3:
        return ScaledE4M3(tensors["values"], tensors["scale"])

    def _quantise(self, tensors: Tensors, source: Tensor) -> None:
        for start in range(0, len(source), PIECE_ROWS):
            stop = start + PIECE_ROWS
            rows = self.rows(tensors, start, stop)
            piece = source[start:stop].to(rows["values"].device)
            for to, found in zip(rows.values(), quantised_weight(piece, blocks=self.input_groups), strict=True):
                to.copy_(found)

    def _dequantise(self, values: Tensor, weight: Tensor, **scales: Tensor) -> None:
        (scale,) = scales.values()
        if not self.input_groups:
            scale = scale.flatten().expand(len(values))
        values.copy_(dequantised_weight(weight.to(values.device), scale.to(values.device, torch.float32)))


FP8 = E4M3Format(Scales.ROW)  # of weights that are asked for in 8 bits


def _round(values: Tensor, source: Tensor) -> None:
    """Give `values` the numbers that they would have in e4m3, with a scale a row."""
    for piece, to in zip(torch.split(source, PIECE_ROWS), torch.split(values, PIECE_ROWS), strict=True):
        to.copy_(dequantised_weight(*quantised_weight(piece.to(values.device), blocks=False)))
