"""Quantised weights: what has a scale of its own, and what the tensors of a checkpoint in e4m3 fill."""

# Tests: tests/layers/test_weight.py, tests/models/test_quantization.py

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from layers.int4_formats import IN_A_WORD, Words
from layers.int4_places import plain_int4_places
from layers.place import Filled, Place
from triton_ops.activations.quantised_rows import BLOCK
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import cdiv
from triton_ops.linear.e4m3_linear import dequantised_weight, quantised_weight
from triton_ops.linear.int4_linear import GROUP

PIECE_ROWS = 32 * BLOCK  # of a weight that is quantised as it is loaded: bounds the memory


class Scales(Enum):
    """What has a scale of its own: the whole weight, a row (an output), or a block of 128 x 128; in 4 bits, a
    group of 128 elements of a row.
    """

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"
    GROUP = "group"


@dataclass(frozen=True)
class Quantization:
    """That linear layers have weights in e4m3 or in 4 bits; embeddings, the output head and routers never do.

    Attributes:
        scales: what has a scale of its own; in memory a tensor's scale is held for each row.
        scale_name: the last part of scales' names in the checkpoint; None: the checkpoint is not quantised, its
            weights are as they are loaded.
        ignored: layers that the checkpoint leaves as they are: names, beginnings or ends of names, or "re:" and a
            regular expression for the beginning.
        plain: layers that it is known to store as they are; then `ignored` says nothing. None: not known.
        words: how the checkpoint packs numbers of 4 bits; None: they are in e4m3.
    """

    scales: Scales
    scale_name: str | None = None
    ignored: tuple[str, ...] = ()
    words: Words | None = None
    plain: frozenset[str] | None = None

    @property
    def numbers(self) -> str:
        """What weights are in, for messages."""
        return "e4m3" if self.words is None else "4 bits"

    @property
    def units(self) -> tuple[int, int]:
        """Outputs, and inputs, that have a scale or a word together in a checkpoint."""
        if self.words is not None:
            return 1 if self.words is Words.COMPRESSED else IN_A_WORD, GROUP
        return (BLOCK, BLOCK) if self.scales is Scales.BLOCK else (1, 1)

    def ignores(self, layer: str) -> bool:
        """Whether the checkpoint leaves the layer of that name as it is."""
        if self.plain is not None:
            return layer in self.plain
        return any(
            re.match(entry.removeprefix("re:"), layer) is not None
            if entry.startswith("re:")
            else f".{entry}." in f".{layer}." and (layer.startswith(entry) or layer.endswith(entry))
            for entry in self.ignored
        )


def held_places(
    name: str, codes: Tensor, scale: Tensor, quantization: Quantization
) -> Iterator[tuple[str, Place]]:
    """The tensors of the layer `name` in a checkpoint, where its weight is held in e4m3: (tensor name, place).

    They fill `codes` `[N, K]` and `scale`, float32 `[N]` or `[N / 128, K / 128]` rounded up.
    """
    if quantization.scale_name is None:
        yield f"{name}.weight", Filled(codes.shape, torch.float32, partial(_quantise, codes, scale))
        return
    place: Place = scale
    if quantization.scales is Scales.ROW:
        place = scale.unsqueeze(1)
    elif quantization.scales is Scales.TENSOR:
        place = Filled(torch.Size([1]), torch.float32, scale.copy_)
    yield f"{name}.weight", codes
    yield f"{name}.{quantization.scale_name}", place


def plain_places(name: str, weight: Tensor, quantization: Quantization | None) -> Iterator[tuple[str, Place]]:
    """The same where `weight` `[N, K]` is held in the model's dtype: what is quantised is dequantised, and what is
    to be in e4m3 is rounded.
    """
    if quantization is None or quantization.ignores(name):
        yield f"{name}.weight", weight
        return
    if quantization.scale_name is None:
        yield f"{name}.weight", rounded_place(weight) if quantization.words is None else weight
        return
    if quantization.words is not None:
        yield from plain_int4_places(name, weight, quantization.words)
        return
    num_rows, depth = weight.shape
    shape = {
        Scales.TENSOR: [1],
        Scales.ROW: [num_rows, 1],
        Scales.BLOCK: [cdiv(num_rows, BLOCK), cdiv(depth, BLOCK)],
    }[quantization.scales]
    pair = _StoredPair(weight, quantization.scales)
    yield f"{name}.weight", Filled(weight.shape, E4M3, pair.take_codes)
    yield f"{name}.{quantization.scale_name}", Filled(torch.Size(shape), torch.float32, pair.take_scale)


def rounded_place(weight: Tensor) -> Place:
    """Fills a weight in the model's dtype with the values that it would have in e4m3, with a scale a row."""

    def fill(source: Tensor) -> None:
        for piece, to in zip(torch.split(source, PIECE_ROWS), torch.split(weight, PIECE_ROWS), strict=True):
            to.copy_(dequantised_weight(*quantised_weight(piece.to(weight.device), blocks=False)))

    return Filled(weight.shape, torch.float32, fill)


class _StoredPair:
    """A stored weight and its scale, which come in either order: both together fill `out`."""

    def __init__(self, out: Tensor, scales: Scales) -> None:
        self._out, self._scales = out, scales
        self._codes: Tensor | None = None
        self._scale: Tensor | None = None

    def take_codes(self, codes: Tensor) -> None:
        self._codes = codes
        self._fill()

    def take_scale(self, scale: Tensor) -> None:
        self._scale = scale if self._scales is Scales.BLOCK else scale.flatten().expand(len(self._out))
        self._fill()

    def _fill(self) -> None:
        if self._codes is None or self._scale is None:
            return
        device = self._out.device
        self._out.copy_(dequantised_weight(self._codes.to(device), self._scale.to(device, torch.float32)))
        self._codes = self._scale = None


def _quantise(codes: Tensor, scale: Tensor, source: Tensor) -> None:
    """Fill codes and scale, whose dimensions say what has a scale of its own."""
    blocks = scale.dim() == 2
    rows_of_a_scale = BLOCK if blocks else 1
    for start in range(0, len(source), PIECE_ROWS):
        stop = start + PIECE_ROWS
        values, scales = quantised_weight(source[start:stop].to(codes.device), blocks=blocks)
        codes[start:stop].copy_(values)
        scale[start // rows_of_a_scale : cdiv(stop, rows_of_a_scale)].copy_(scales)
