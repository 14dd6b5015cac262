"""Probabilities of tokens as integers, whose sums are exact in any order and under every parallel scan.

A token's mass is `2^((logit - anchor) * log2(e) / temperature)`, computed in float32 and rounded to units of
2^-38; the anchor is the greatest logit of its row, or of its block of the vocabulary. 38 bits are two halves of
19, so that a kernel adds the masses of a block of 2^12 tokens in two sums of 32 bits.

The reference and the kernel subtract, multiply and round equally, bit for bit. exp2 is not defined to the last
bit: on a GPU both use its instruction; on a CPU and in Triton's interpreter both round float64's to float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import INTERPRETED, tl, triton

UNIT_BITS = 38
BLOCK = 4096  # tokens that share an anchor; a part of the draw's definition, not a tuning parameter
LOG2_E = 1.4426950408889634
MAX_SCALE = 2.0**126  # of temperatures near 0: infinity times 0 would be NaN

# Adding 1.5 * 2^23 to a float32 rounds it to an integer, which is in the sum's low bits; adding 1.5 * 2^4 rounds
# it to units of 2^-19.
_ROUNDER: tl.constexpr = 12582912.0 if tl is None else tl.constexpr(12582912.0)
_ROUNDER_BITS: tl.constexpr = 0x4B400000 if tl is None else tl.constexpr(0x4B400000)
_FINE_ROUNDER: tl.constexpr = 24.0 if tl is None else tl.constexpr(24.0)
_FINE_ROUNDER_BITS: tl.constexpr = 0x41C00000 if tl is None else tl.constexpr(0x41C00000)
_HALF_UNIT: tl.constexpr = 2.0**19 if tl is None else tl.constexpr(2.0**19)
_LOG2_E: tl.constexpr = LOG2_E if tl is None else tl.constexpr(LOG2_E)
_MAX_SCALE: tl.constexpr = MAX_SCALE if tl is None else tl.constexpr(MAX_SCALE)


def exponent_scale(temperatures: Tensor) -> Tensor:
    """`log2(e) / temperature`, with 1 in place of temperature 0: float32 `[R]`."""
    # A number divided by a tensor would be rounded twice, by way of the reciprocal.
    scale = torch.full_like(temperatures, LOG2_E) / torch.where(temperatures > 0.0, temperatures, 1.0)
    return scale.clamp_(max=MAX_SCALE)


def relative_exp2(logits: Tensor, anchor: Tensor, scale: Tensor) -> Tensor:
    """`2^((logits - anchor) * scale)`, all float32."""
    exponent = (logits - anchor) * scale
    return exponent.exp2() if exponent.is_cuda else exponent.double().exp2().float()


def token_mass(logits: Tensor, anchor: Tensor, scale: Tensor) -> Tensor:
    """The masses of float32 `logits` relative to `anchor`, int64; 0 for NaN, and where both are -inf."""
    relative = relative_exp2(logits, anchor, scale).double()
    return relative.mul_(2.0**UNIT_BITS).round_().nan_to_num_(nan=0.0).long()


@triton.jit
def load_scale(temperatures_ptr, row):
    """`exponent_scale` of a row, and its temperature."""
    temperature = tl.load(temperatures_ptr + row)
    scale = tl.div_rn(tl.full((), _LOG2_E, tl.float32), tl.where(temperature > 0.0, temperature, 1.0))
    return tl.minimum(scale, _MAX_SCALE), temperature


@triton.jit
def exp2_alike(exponent):
    """2^x as in `relative_exp2`, except that results below 2^-126 may be 0: they have no mass anyway."""
    if INTERPRETED:
        result = tl.exp2(exponent.to(tl.float64)).to(tl.float32)
    else:
        # tl.exp2 would scale its argument and its result for such results.
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _half_bits(relative):
    """Both halves of masses as in `mass_halves`, but with the bits of their rounders added."""
    # Products by powers of 2 and differences of integers are exact. The second sum rounds once, whether the
    # product is fused into it or not.
    shifted = relative * _HALF_UNIT
    upper = shifted + _ROUNDER
    lower = shifted + (_ROUNDER + _FINE_ROUNDER - upper)
    return upper.to(tl.uint32, bitcast=True), lower.to(tl.int32, bitcast=True)


@triton.jit
def mass_halves(relative):
    """The upper halves of masses, uint32, and the lower ones, int32: mass = upper * 2^19 + lower. A lower half may
    be negative. 2^12 of either add up without overflow.
    """
    upper, lower = _half_bits(relative)
    return upper - _ROUNDER_BITS, lower - _FINE_ROUNDER_BITS


@triton.jit
def sum_masses(relative):
    """The mass of a tile, int64, of 2^10 to 2^12 tokens in a power of two."""
    # For 2^10 tokens or more, the rounders' bits add up to a multiple of 2^32: the sums wrap around it.
    tl.static_assert(relative.numel % 1024 == 0)
    if INTERPRETED:  # whose sums do not wrap around
        upper, lower = mass_halves(relative)
    else:
        upper, lower = _half_bits(relative)
    return join_halves(tl.sum(upper, axis=0), tl.sum(lower, axis=0))


@triton.jit
def join_halves(upper, lower):
    """The int64 mass of two halves, or of sums of halves."""
    return upper.to(tl.int64) * 524288 + lower.to(tl.int64)  # 2^19


@triton.jit
def share_of_mass(p, total):
    """`p * total` rounded up, and at least 1: the likeliest token is part of every share."""
    share = p.to(tl.float64) * total.to(tl.float64)
    wanted = share.to(tl.int64)
    return tl.maximum(wanted + (wanted.to(tl.float64) < share).to(tl.int64), 1)
