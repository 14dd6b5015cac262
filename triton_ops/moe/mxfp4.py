"""Weights of four bits: MXFP4 of the OCP Microscaling Formats specification (2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from triton_ops.implementation import tl, triton

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
    """

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices."""
        return *self.blocks.shape[:-2], self.blocks.shape[-2] * GROUP

    def is_contiguous(self) -> bool:
        """Whether both parts are, and fit each other."""
        fit = self.scales.shape == self.blocks.shape[:-1] and self.blocks.shape[-1] == BYTES
        return fit and self.blocks.is_contiguous() and self.scales.is_contiguous()

    def __getitem__(self, index: int) -> Mxfp4:
        """One of several matrices."""
        return Mxfp4(self.blocks[index], self.scales[index])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The matrices in `dtype`: exact in float32 and bfloat16, rounded in float16 where a scale is so far from
        1 that its numbers end.
        """
        # Looked up by bytes, which takes a CPU a fraction of the time of single codes.
        pairs = torch.tensor(
            [(low, high) for high in VALUES for low in VALUES], dtype=torch.float32, device=self.blocks.device
        )
        values = embedding(self.blocks.int(), pairs).flatten(-2)
        factors = torch.ldexp(torch.ones_like(self.scales, dtype=torch.float32), self.scales.int() - 127)
        return values.mul_(factors.unsqueeze(-1)).flatten(-2).to(dtype)


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
