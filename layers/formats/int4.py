"""Weights in 4 bits, with a scale and a zero for each group of 128 elements of a row.

AWQ, GPTQ and compressed-tensors pack eight numbers into an int32. `awq_values` to `packed_values` turn a stored
tensor into numbers 0 to 15, uint8, in rows of outputs as `int4_linear` has them. Zeros of GPTQ may be 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layers.checkpoint_slot import Filled
from layers.formats.weight_format import UNNEEDED, Shape, Slots, Tensors, WeightFormat, gathered
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.implementation import Impl, cdiv, runs_triton
from triton_ops.linear.int4_linear import GROUP, int4_linear, pack_int4

IN_A_WORD = 8  # numbers
PIECE_ROWS = 1024  # of a weight that is unpacked at once: bounds the memory
MIDDLE = 8  # stands for 0 where no zeros are stored

# Of the eight columns that AWQ packs into a word, the one in its bits 0 to 3, 4 to 7, ...
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Int4Packing(Enum):
    """How a checkpoint packs numbers of 4 bits. Zeros of the first format of GPTQ are stored less one."""

    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    COMPRESSED = "pack-quantized"


@dataclass(frozen=True)
class Int4Format(WeightFormat):
    """What `dequantized_int4` makes of `values` uint8 `[N, K / 2]`, `scale` `[N, K / 128]` in the model's dtype,
    and `zeros` uint8 `[N, K / 128]`.

    Attributes:
        words: how the checkpoint packs numbers; None: it stores plain weights, which are rounded to the nearest
            number, with the middle as zero.
        plain: layers that it is known to leave as they are; then `ignored` says nothing. None: not known.
    """

    words: Int4Packing | None
    plain: frozenset[str] | None = None

    numbers = "4 bits"
    needs = "float16 or bfloat16"
    unneeded = UNNEEDED
    checked = (".g_idx",)

    @property
    def units(self) -> tuple[int, int]:
        return 1 if self.words is Int4Packing.COMPRESSED else IN_A_WORD, GROUP

    def ignores(self, layer: str) -> bool:
        return super().ignores(layer) if self.plain is None else layer in self.plain

    def leaving(self, layers: frozenset[str]) -> WeightFormat:
        return replace(self, plain=layers)  # as there are several ways to match the names in config.json's lists

    def problem(self, stored: Tensor) -> str | None:
        expected = torch.arange(len(stored), device=stored.device).div(GROUP, rounding_mode="floor")
        if torch.equal(stored, expected):
            return None
        return (
            "puts inputs into groups in another order than theirs; take a checkpoint with desc_act false, or one "
            "that is not quantised"
        )

    def as_loaded(self) -> WeightFormat:
        return replace(self, words=None)

    def is_multiplied(self, impl: Impl, device: torch.device, dtype: torch.dtype) -> bool:
        return runs_triton(impl, device) and dtype != torch.float32

    def fits(self, depth: int, starts: Sequence[int]) -> bool:
        return depth % GROUP == 0

    def tensors(self, *shape: int) -> dict[str, Shape]:
        num_rows, depth = shape
        halves, groups = (num_rows, depth // 2), (num_rows, depth // GROUP)
        return {"values": (halves, torch.uint8), "scale": (groups, None), "zeros": (groups, torch.uint8)}

    def slots(self, tensors: Tensors) -> Slots:
        num_rows, half = tensors["values"].shape
        if self.words is None:
            yield "weight", Filled(torch.Size([num_rows, 2 * half]), torch.float32, partial(_quantise, **tensors))
        else:
            yield from gathered(partial(_hold, self.words, tensors), **_stored(self.words, num_rows, 2 * half))

    def plain_slots(self, values: Tensor) -> Slots:
        if self.words is None:
            yield "weight", values
        else:
            yield from gathered(partial(_dequantise, self.words, values), **_stored(self.words, *values.shape))

    def product(
        self, tensors: Tensors, x: Tensor | QuantisedRows, bias: Tensor | None, impl: Impl, **_: Any
    ) -> Tensor:
        assert isinstance(x, Tensor)
        return int4_linear(x, tensors["values"], tensors["scale"], tensors["zeros"], bias, impl=impl)


def _stored(words: Int4Packing, num_rows: int, depth: int) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Shapes and dtypes of the tensors of a weight `[N, K]`: numbers, scales, maybe zeros."""
    groups, row_words, column_words = cdiv(depth, GROUP), cdiv(depth, IN_A_WORD), cdiv(num_rows, IN_A_WORD)
    if words is Int4Packing.COMPRESSED:
        shapes = {"weight_packed": (num_rows, row_words), "weight_scale": (num_rows, groups)}
    else:
        numbers = (depth, column_words) if words is Int4Packing.AWQ else (row_words, num_rows)
        shapes = {"qweight": numbers, "qzeros": (groups, column_words), "scales": (groups, num_rows)}
    dtypes = {"weight_scale": torch.float32, "scales": torch.float32}
    return {kind: (shape, dtypes.get(kind, torch.int32)) for kind, shape in shapes.items()}


def _scales_and_zeros(words: Int4Packing, stored: Tensors, num_rows: int) -> tuple[Tensor, Tensor]:
    """Any float and uint8, `[N, K / 128]`."""
    if words is Int4Packing.COMPRESSED:
        scales = stored["weight_scale"]
        return scales, torch.full_like(scales, MIDDLE, dtype=torch.uint8)
    zeros = stored["qzeros"]
    is_gptq = words is Int4Packing.GPTQ
    zeros = awq_values(zeros) if words is Int4Packing.AWQ else gptq_zeros(zeros, less_one=is_gptq)
    return stored["scales"].T, zeros[:num_rows]


def _pieces(
    words: Int4Packing, stored: Tensors, out: Tensor, depth: int
) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Some rows of `out` at a time, which they are, and their numbers uint8 `[rows, K]` on its device."""
    packed = stored["weight_packed" if words is Int4Packing.COMPRESSED else "qweight"]
    for start in range(0, len(out), PIECE_ROWS):
        rows = slice(start, min(start + PIECE_ROWS, len(out)))
        if words is Int4Packing.AWQ:
            values = awq_values(packed[:, start // IN_A_WORD : cdiv(rows.stop, IN_A_WORD)].to(out.device))
        elif words is Int4Packing.COMPRESSED:
            values = packed_values(packed[rows].to(out.device))
        else:
            values = gptq_values(packed[:, rows].to(out.device))
        yield out[rows], rows, values[: rows.stop - start, :depth]


def _hold(words: Int4Packing, tensors: Tensors, **stored: Tensor) -> None:
    packed = tensors["values"]
    for to, _, values in _pieces(words, stored, packed, 2 * packed.shape[1]):
        to.copy_(pack_int4(values))
    scales, zeros = _scales_and_zeros(words, stored, len(packed))
    tensors["scale"].copy_(scales)
    tensors["zeros"].copy_(zeros)


def _dequantise(words: Int4Packing, out: Tensor, **stored: Tensor) -> None:
    depth = out.shape[1]
    scales, zeros = _scales_and_zeros(words, stored, len(out))
    scales = scales.to(out.device, out.dtype).float()  # rounded as where they are held
    zeros = zeros.to(out.device).float()
    for to, rows, values in _pieces(words, stored, out, depth):
        distance = values.float() - _spread(zeros[rows], depth)
        to.copy_(distance.mul_(_spread(scales[rows], depth)))


def _spread(groups: Tensor, depth: int) -> Tensor:
    """`[N, K / 128]` for each element."""
    return groups.repeat_interleave(GROUP, 1)[:, :depth]


def _quantise(source: Tensor, *, values: Tensor, scale: Tensor, zeros: Tensor) -> None:
    """Fill all three with the nearest numbers to `source` `[N, K]`."""
    zeros.fill_(MIDDLE)
    for start in range(0, len(source), PIECE_ROWS):
        rows = slice(start, start + PIECE_ROWS)
        piece = source[rows].to(values.device).float()
        groups = piece.view(len(piece), -1, GROUP)
        scale[rows].copy_(groups.abs().amax(2) / (MIDDLE - 1))
        steps = groups / scale[rows].float().clamp_min(torch.finfo(scale.dtype).tiny).unsqueeze(2)
        numbers = steps.round().add(MIDDLE).clamp(0, 15).to(torch.uint8)
        values[rows].copy_(pack_int4(numbers.flatten(1)))


def awq_values(qweight: Tensor) -> Tensor:
    """AWQ's `qweight` int32 `[K, N / 8]` as `[N, K]`; `qzeros` `[K / 128, N / 8]` as `[N, K / 128]`."""
    found = _nibbles(qweight)
    values = torch.empty_like(found)
    values[..., list(_AWQ_ORDER)] = found
    return values.flatten(1).T.contiguous()


def gptq_values(qweight: Tensor) -> Tensor:
    """GPTQ's `qweight` int32 `[K / 8, N]` as `[N, K]`."""
    return _nibbles(qweight.T).flatten(1)


def gptq_zeros(qzeros: Tensor, *, less_one: bool) -> Tensor:
    """GPTQ's `qzeros` int32 `[K / 128, N / 8]` as `[N, K / 128]`. The first format stores them `less_one`."""
    return (_nibbles(qzeros).flatten(1) + int(less_one)).T.contiguous()


def packed_values(weight_packed: Tensor) -> Tensor:
    """compressed-tensors' `weight_packed` int32 `[N, K / 8]` as `[N, K]`: its numbers plus 8."""
    return _nibbles(weight_packed).flatten(1)


def _nibbles(words: Tensor) -> Tensor:
    """int32 `[..., M]` as uint8 `[..., M, 8]`, from the lowest bits on."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
