"""e4m3, an 8-bit float, of weights, of what they multiply and of a quantised pool.

It has 4 bits of exponent and 3 of mantissa, numbers up to 448, NaN, and no infinity (Micikevicius et al., 2022). A
head's values are stored divided by the head's scale, a power of two, so that both ways are exact.
"""

# Tests: tests/triton_ops/kv/test_qk_norm_rope_store.py, tests/triton_ops/activations/test_quantised_rows.py

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import INTERPRETED, tl, triton

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FLOAT16_MAX = 65504.0
# GPUs from compute capability 8.9 on convert to and from e4m3; Triton compiles for these alone.
FIRST_CAPABILITY = 89


def check_scales(k_scale: Tensor | None, v_scale: Tensor | None, num_kv_heads: int) -> None:
    """Raise ValueError unless both are contiguous float32 `[num_kv_heads]`, or None."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (
            scale.shape != (num_kv_heads,) or scale.dtype != torch.float32 or not scale.is_contiguous()
        ):
            raise ValueError(f"{name} must be contiguous float32 [{num_kv_heads}]")


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """`x [..., num_kv_heads, head_dim]` divided by `scale [num_kv_heads]`, in e4m3.

    It rounds to nearest even and saturates at 448. Infinities and NaN become NaN, so that they are still found.
    """
    scaled = (x.float() / scale.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.masked_fill_(~x.isfinite(), torch.nan).to(E4M3)


def in_float16(x: Tensor) -> Tensor:
    """x in float16, which holds all of e4m3 and the mantissa of bfloat16. Finite numbers saturate; infinities and
    NaN stay.
    """
    return torch.where(x.isfinite(), x.float().clamp(-FLOAT16_MAX, FLOAT16_MAX), x).half()


def slots_of(buffer: Tensor, slots: Tensor, scale: Tensor | None) -> Tensor:
    """The contents of slots int32 or int64 `[n]` of a buffer `[num_slots, num_kv_heads, head_dim]`, in float32,
    times `scale [num_kv_heads]`, if there is one.
    """
    gathered = buffer.view(_movable(buffer.dtype)).index_select(0, slots).view(buffer.dtype).float()
    return gathered if scale is None else gathered.mul_(scale.unsqueeze(-1))


def put_slots(buffer: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write `values [n, num_kv_heads, head_dim]`, in the buffer's dtype, to the slots int64 `[n]` of a buffer."""
    movable = _movable(buffer.dtype)
    buffer.view(movable).index_copy_(0, slots, values.view(movable))


def _movable(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size that torch can gather and scatter."""
    return torch.uint8 if dtype == E4M3 else dtype


# --- in kernels ---


@triton.jit
def to_e4m3(x, scale):
    """`quantise` of a tile."""
    finite = tl.abs(x.to(tl.float32)) < float("inf")
    scaled = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -448.0, 448.0)
    return tl.where(finite, scaled, float("nan")).to(tl.float8e4nv)


@triton.jit
def to_float16(x):
    """`in_float16` of a tile."""
    wide = x.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), tl.clamp(wide, -65504.0, 65504.0), wide).to(tl.float16)


@triton.jit
def from_pairs(x):
    """The lower and the upper bytes of a tile of int16, as e4m3, in float16: the even and the odd elements of
    heads.

    So tl.dot gets them without loads of single bytes: its fragments hold two rows of a tile side by side, and a
    multiprocessor transposes elements of 16 bits while it loads them, not of 8.
    """
    if INTERPRETED:
        even = (x & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (x >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Two elements in a register: the two lower bytes are converted at once, then the two upper ones.
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 lower, upper;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {lower, upper}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even, odd
