"""Floats as integers of the same order, for bisection, and as wider floats."""

from __future__ import annotations

from triton_ops.implementation import INTERPRETED, tl, triton


@triton.jit
def key_of(x):
    """An int32 for each float of 16 or 32 bits, in the same order; both zeros are equal."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 15) & 0x7FFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(key == -1, 0, key)


@triton.jit
def float_of(key, dtype: tl.constexpr):
    """The float32 whose `key_of`, as `dtype`, is the int64 `key`."""
    if dtype.primitive_bitwidth == 16:
        bits = key ^ ((key >> 15) & 0x7FFF)
        value = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def widened(x):
    """Floats of 16 or 32 bits as float32."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        # Two at a time with an instruction each; the compiler takes three for both.
        code: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        bits = tl.inline_asm_elementwise(code, "=&r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2)
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide
