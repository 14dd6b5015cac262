"""Weights of four bits: MXFP4 of the OCP Microscaling Formats specification (2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from triton_ops.implementation import cdiv, tl, triton

GROUP = 32  # elements with one scale
BYTES = GROUP // 2

# What the codes 0 to 15 of an element (E2M1) mean.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Mxfp4:
    """Matrices `[..., columns, depth]`, their elements of four bits, with a scale for each GROUP along the depth.

    Attributes:
        blocks: uint8 `[..., columns, depth // GROUP, BYTES]`: element 2i in the low half of byte i, 2i + 1 in the
            high one, each a code of VALUES.
        scales: uint8 `[..., columns, depth // GROUP]` up to 240: s is the factor 2^(s - 127).
        in_words: blocks are `words_of` these, and rows of scales are filled up to words with zeros.
    """

    blocks: Tensor
    scales: Tensor
    in_words: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices."""
        return *self.blocks.shape[:-2], self.blocks.shape[-2] * GROUP

    def is_contiguous(self) -> bool:
        """Whether both parts are, and fit each other."""
        *rows, groups, size = self.blocks.shape
        fit = self.scales.shape == (*rows, scales_of(groups, self.in_words)) and size == BYTES
        return fit and self.blocks.is_contiguous() and self.scales.is_contiguous()

    def __getitem__(self, index: int) -> Mxfp4:
        """One of several matrices."""
        return replace(self, blocks=self.blocks[index], scales=self.scales[index])

    def as_words(self) -> Mxfp4:
        """The same matrices in words."""
        groups = self.blocks.shape[-2]
        return Mxfp4(words_of(self.blocks), pad(self.scales, (0, scales_of(groups, True) - groups)), True)

    def as_bytes(self) -> Mxfp4:
        """The same matrices as a checkpoint has them."""
        if not self.in_words:
            return self
        return Mxfp4(_bytes_of(self.blocks), self.scales[..., : self.blocks.shape[-2]])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The matrices in `dtype`: exact in float32 and bfloat16, rounded in float16 where a scale is so far from
        1 that its numbers end.
        """
        # Looked up by bytes, which takes a CPU a fraction of the time of single codes.
        pairs = torch.tensor(
            [(low, high) for high in VALUES for low in VALUES], dtype=torch.float32, device=self.blocks.device
        )
        stored = self.as_bytes()
        values = embedding(stored.blocks.int(), pairs).flatten(-2)
        factors = torch.ldexp(torch.ones_like(stored.scales, dtype=torch.float32), stored.scales.int() - 127)
        return values.mul_(factors.unsqueeze(-1)).flatten(-2).to(dtype)


# Where the four codes of a half of a word have their sign, and the lowest of their other bits: after one shift, or
# two, they are bits of a bfloat16.
_PLACES = ((15, 6), (12, 3), (13, 0), (14, 9))


def words_of(blocks: Tensor) -> Tensor:
    """Blocks `[..., BYTES]` in the order of a tensor core's threads, each of which has the elements of one word:
    word c has 8j + 2c in its lower half, and the next ones in its upper half, for each j below 4.
    """
    byte = torch.arange(256)
    halves = [
        [(code & 7) << low | (code >> 3) << sign for sign, low in _PLACES] for code in (byte & 15, byte >> 4)
    ]
    tables = [(lower | upper << 16).to(blocks.device) for lower, upper in zip(*halves, strict=True)]
    parts = blocks.view(*blocks.shape[:-1], 4, 4).int().unbind(-2)
    words = sum(table[part] for table, part in zip(tables, parts, strict=True))
    assert isinstance(words, Tensor)
    return words.to(torch.int32).view(torch.uint8)


def _bytes_of(words: Tensor) -> Tensor:
    """What `words_of` has made words of."""
    halves = words.contiguous().view(torch.int16).int()  # [..., word and half]
    codes = torch.stack([halves >> low & 7 | (halves >> sign & 1) << 3 for sign, low in _PLACES], -2)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(-2).to(torch.uint8)


def scales_of(groups: int, in_words: bool) -> int:
    """How many scales a row of so many groups has."""
    return cdiv(groups, 4) * 4 if in_words else groups


def scale_of(std: float) -> int:
    """The scale with which codes that are all alike often have about this standard deviation."""
    rms = math.sqrt(sum(value * value for value in VALUES) / len(VALUES))
    return 127 + round(math.log2(max(std, 2**-100) / rms))


@triton.jit
def dequantised_tile(blocks, scales, dtype: tl.constexpr):
    """The matrix `[columns, groups * GROUP]` in `dtype` of `blocks` uint8 `[columns, groups, BYTES]` and `scales`
    uint8 `[columns, groups]`.

    A code s e e m becomes the float16 with these bits at the ends of its fields, which is 2^14 times too small.
    """
    # Both halves of a byte, 16 bits apart.
    pair = blocks.to(tl.uint32) * 0x1001
    pair = ((pair << 9) & 0x0E000E00) | ((pair << 12) & 0x80008000)
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    # 2^(s - 127 + 14) by its bits: above 240, which no weights need, it is infinite.
    exponent = tl.minimum(scales.to(tl.int32) + 14, 255)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    values = tl.interleave(low, high).to(tl.float32) * factor[:, :, None]
    return tl.reshape(values.to(dtype), (values.shape[0], values.shape[1] * values.shape[2]))
