"""What the tensors of a checkpoint in 4 bits fill: a weight held in 4 bits, or one in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from layers.int4_formats import IN_A_WORD, Words, awq_values, gptq_values, gptq_zeros, packed_values
from layers.place import Filled, Place
from triton_ops.implementation import cdiv
from triton_ops.linear.int4_linear import GROUP, pack_int4

PIECE_ROWS = 1024  # of a weight that is unpacked at once: bounds the memory
MIDDLE = 8  # stands for 0 where no zeros are stored


def held_int4_places(
    name: str, packed: Tensor, scales: Tensor, zeros: Tensor, words: Words | None
) -> Iterator[tuple[str, Place]]:
    """The tensors of the layer `name` in a checkpoint, where its weight is held in 4 bits: (tensor name, place).

    They fill `packed`, `scales` and `zeros` as `int4_linear` takes them, in any order. Without `words` the
    checkpoint is not quantised: numbers are rounded to the nearest, with the middle as zero.
    """
    num_rows, depth = len(packed), 2 * packed.shape[1]
    if words is None:
        fill = partial(_quantise, packed, scales, zeros)
        yield f"{name}.weight", Filled(torch.Size([num_rows, depth]), torch.float32, fill)
        return

    def take_values(stored: Tensor) -> None:
        for rows, values in _pieces(stored, words, num_rows, depth, packed.device):
            packed[rows].copy_(pack_int4(values))

    def take_zeros(stored: Tensor) -> None:
        zeros.copy_(_zeros(stored, words, num_rows))

    if words is Words.COMPRESSED:

        def take_all(stored: Tensor) -> None:
            take_values(stored)
            zeros.fill_(MIDDLE)

        yield f"{name}.weight_packed", _words_place(words, num_rows, depth, take_all)
        yield f"{name}.weight_scale", scales
    else:
        yield f"{name}.qweight", _words_place(words, num_rows, depth, take_values)
        yield f"{name}.qzeros", _zeros_place(num_rows, depth, take_zeros)
        yield f"{name}.scales", scales.T


def plain_int4_places(name: str, weight: Tensor, words: Words) -> Iterator[tuple[str, Place]]:
    """The same where `weight` `[N, K]` is in the model's dtype: dequantised, as soon as all tensors have come."""
    num_rows, depth = weight.shape
    stored = _StoredGroups(weight, words)
    groups = cdiv(depth, GROUP)
    if words is Words.COMPRESSED:
        yield f"{name}.weight_packed", _words_place(words, num_rows, depth, stored.take_words)
        shape = torch.Size([num_rows, groups])
        yield f"{name}.weight_scale", Filled(shape, torch.float32, stored.take_scales)
    else:
        yield f"{name}.qweight", _words_place(words, num_rows, depth, stored.take_words)
        yield f"{name}.qzeros", _zeros_place(num_rows, depth, stored.take_zeros)
        shape = torch.Size([groups, num_rows])
        yield f"{name}.scales", Filled(shape, torch.float32, lambda scales: stored.take_scales(scales.T))


class _StoredGroups:
    """Stored words, zeros and scales, which come in any order: all together fill `out`."""

    def __init__(self, out: Tensor, words: Words) -> None:
        self._out, self._words = out, words
        self._values: Tensor | None = None
        self._zeros: Tensor | None = None
        self._scales: Tensor | None = None

    def take_words(self, stored: Tensor) -> None:
        self._values = stored
        self._fill()

    def take_zeros(self, stored: Tensor) -> None:
        self._zeros = _zeros(stored, self._words, len(self._out))
        self._fill()

    def take_scales(self, scales: Tensor) -> None:
        self._scales = scales
        self._fill()

    def _fill(self) -> None:
        if self._values is None or self._scales is None:
            return
        zeros = self._zeros
        if zeros is None:
            if self._words is not Words.COMPRESSED:
                return
            zeros = torch.full_like(self._scales, MIDDLE, dtype=torch.uint8)
        out, (num_rows, depth) = self._out, self._out.shape
        scales = self._scales.to(out.device, out.dtype).float()  # rounded as where they are held
        zeros = zeros.to(out.device).float()
        for rows, values in _pieces(self._values, self._words, num_rows, depth, out.device):
            distance = values.float() - _spread(zeros[rows], depth)
            out[rows].copy_(distance.mul_(_spread(scales[rows], depth)))
        self._values = self._zeros = self._scales = None


def _spread(groups: Tensor, depth: int) -> Tensor:
    """`[N, K / 128]` for each element."""
    return groups.repeat_interleave(GROUP, 1)[:, :depth]


def _words_place(words: Words, num_rows: int, depth: int, fill: Callable[[Tensor], object]) -> Place:
    shape = {
        Words.AWQ: (depth, cdiv(num_rows, IN_A_WORD)),
        Words.COMPRESSED: (num_rows, cdiv(depth, IN_A_WORD)),
    }.get(words, (cdiv(depth, IN_A_WORD), num_rows))
    return Filled(torch.Size(shape), torch.int32, fill)


def _zeros_place(num_rows: int, depth: int, fill: Callable[[Tensor], object]) -> Place:
    return Filled(torch.Size([cdiv(depth, GROUP), cdiv(num_rows, IN_A_WORD)]), torch.int32, fill)


def _zeros(stored: Tensor, words: Words, num_rows: int) -> Tensor:
    """`qzeros` as uint8 `[N, K / 128]`."""
    found = awq_values(stored) if words is Words.AWQ else gptq_zeros(stored, less_one=words is Words.GPTQ)
    return found[:num_rows]


def _pieces(
    stored: Tensor, words: Words, num_rows: int, depth: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Stored words as numbers uint8 `[rows, K]` on `device`, some rows at a time."""
    for start in range(0, num_rows, PIECE_ROWS):
        rows = slice(start, min(start + PIECE_ROWS, num_rows))
        if words is Words.AWQ:
            columns = slice(start // IN_A_WORD, cdiv(rows.stop, IN_A_WORD))
            values = awq_values(stored[:, columns].to(device))
        elif words is Words.COMPRESSED:
            values = packed_values(stored[rows].to(device))
        else:
            values = gptq_values(stored[:, rows].to(device))
        yield rows, values[: rows.stop - start, :depth]


def _quantise(packed: Tensor, scales: Tensor, zeros: Tensor, source: Tensor) -> None:
    """Fill all three with the nearest numbers to `source` `[N, K]`."""
    zeros.fill_(MIDDLE)
    for start in range(0, len(source), PIECE_ROWS):
        rows = slice(start, start + PIECE_ROWS)
        piece = source[rows].to(packed.device).float()
        groups = piece.view(len(piece), -1, GROUP)
        scales[rows].copy_(groups.abs().amax(2) / (MIDDLE - 1))
        steps = groups / scales[rows].float().clamp_min(torch.finfo(scales.dtype).tiny).unsqueeze(2)
        values = steps.round().add(MIDDLE).clamp(0, 15).to(torch.uint8)
        packed[rows].copy_(pack_int4(values.flatten(1)))
