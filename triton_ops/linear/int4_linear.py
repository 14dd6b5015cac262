"""A linear projection whose weight has 4 bits an element, in groups with a scale and a zero each.

AWQ (Lin et al., 2023) and GPTQ (Frantar et al., 2022) store weights so. Here a group's bytes lie in their rows and
have its first half in their low bits, its second half in their high ones: a tile of bytes is two tiles of weights,
without shuffling.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, cdiv, runs_triton, tl, triton
from triton_ops.tuning import INT4_ROWS, MAX_INT4_ROWS, int4_linear_config

GROUP = 128  # elements of a row that share a scale and a zero
_HALF = GROUP // 2


def pack_int4(values: Tensor) -> Tensor:
    """Numbers 0 to 15, uint8 `[N, K]`, K a multiple of 128, as uint8 `[N, K / 2]`: byte i of a group's 64 holds
    its element i in the low bits and element 64 + i in the high ones.
    """
    low, high = values.reshape(len(values), -1, 2, _HALF).unbind(2)
    packed: Tensor = low | high << 4
    return packed.flatten(1)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`."""
    groups = packed.view(len(packed), -1, _HALF)
    return torch.stack([groups & 15, groups >> 4], 2).flatten(1)


def dequantized_int4(packed: Tensor, scales: Tensor, zeros: Tensor, *, impl: Impl = "auto") -> Tensor:
    """The weight `[N, K]` of `int4_linear`, in the dtype of `scales`: computed in float32 and rounded once."""
    if runs_triton(impl, packed.device):
        out = scales.new_empty(len(packed), 2 * packed.shape[1])
        rows = INT4_ROWS.size
        _dequantize_kernel[(cdiv(len(packed), rows), scales.shape[1])](
            packed, scales, zeros, out, len(packed), DEPTH=out.shape[1], ROWS=rows, num_warps=INT4_ROWS.num_warps
        )
        return out
    values = unpack_int4(packed).view(len(packed), -1, GROUP).float()
    weight: Tensor = (values - zeros.float().unsqueeze(2)) * scales.float().unsqueeze(2)
    return weight.flatten(1).to(scales.dtype)


def int4_linear(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None, *, impl: Impl = "auto"
) -> Tensor:
    """`x W^T + b`, summed in float32 and rounded once: `[..., N]` in x's dtype. W is `dequantized_int4`.

    Args:
        x: `[..., K]`, float16 or bfloat16; K a multiple of 128.
        packed: uint8 `[N, K / 2]`, from `pack_int4`, contiguous.
        scales: `[N, K / 128]` in x's dtype, contiguous.
        zeros: uint8 `[N, K / 128]`, contiguous: the number that stands for 0.
        bias: `[N]` in x's dtype, contiguous; None: 0.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, packed, scales, zeros, bias)
    if not runs_triton(impl, x.device):
        return linear(x, dequantized_int4(packed, scales, zeros, impl="torch"), bias)
    rows, num_columns = as_rows(x), len(packed)
    if len(rows) > MAX_INT4_ROWS:  # unpacking the weight once takes less than for each tile of rows
        return linear(x, dequantized_int4(packed, scales, zeros, impl="triton"), bias)
    out = x.new_empty(*x.shape[:-1], num_columns)
    if out.numel():
        config = int4_linear_config(len(rows))
        _int4_linear_kernel[(cdiv(num_columns, config.columns), cdiv(len(rows), config.rows))](
            rows,
            packed,
            scales,
            zeros,
            bias,
            out,
            len(rows),
            rows.stride(0),
            NUM_COLUMNS=num_columns,
            DEPTH=x.shape[-1],
            ROWS=config.rows,
            COLUMNS=config.columns,
            STAGES=config.stages,
            num_warps=config.num_warps,
        )
    return out


def _check(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None) -> None:
    depth, num_columns = x.shape[-1], len(packed)
    groups = num_columns, depth // GROUP
    if (
        depth % GROUP
        or packed.shape != (num_columns, depth // 2)
        or scales.shape != groups
        or zeros.shape != groups
    ):
        shapes = f"x is {[*x.shape]}, packed {[*packed.shape]}, scales {[*scales.shape]}, zeros {[*zeros.shape]}"
        wanted = f"for x [..., K] they must be [N, K / 2], [N, K / {GROUP}] and the same, K a multiple of {GROUP}"
        raise ValueError(f"{shapes}; {wanted}")
    if bias is not None and bias.shape != (num_columns,):
        raise ValueError(f"bias is {[*bias.shape]}; it must be [{num_columns}]")
    floats = [x, scales, *([] if bias is None else [bias])]
    if {each.dtype for each in floats} - {x.dtype} or {packed.dtype, zeros.dtype} != {torch.uint8}:
        given = ", ".join(str(each.dtype) for each in (*floats, packed, zeros))
        raise ValueError(f"x, scales and bias must have one dtype, packed and zeros be uint8; they are {given}")
    if not all(each.is_contiguous() for each in (packed, *floats[1:], zeros)):
        raise ValueError("packed, scales, zeros and bias must be contiguous")


@triton.jit(do_not_specialize=["num_rows"])
def _int4_linear_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    NUM_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program computes a tile. The weight's tile is the first operand: a tensor core takes it from registers."""
    HALF: tl.constexpr = 64
    dtype = x_ptr.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < NUM_COLUMNS
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < num_rows
    inner = tl.arange(0, HALF)
    packed_at = packed_ptr + column[:, None].to(tl.int64) * (DEPTH // 2) + inner[None, :]
    x_at = x_ptr + row[None, :] * x_stride + inner[:, None]
    group_at = column.to(tl.int64) * (DEPTH // 128)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for group in tl.range(0, DEPTH // 128, num_stages=STAGES):
        both = tl.load(packed_at + group * HALF, mask=is_column[:, None], other=0)
        scale = tl.load(scales_ptr + group_at + group, mask=is_column, other=0.0).to(tl.float32)[:, None]
        zero = tl.load(zeros_ptr + group_at + group, mask=is_column, other=0).to(tl.float32)[:, None]
        first = tl.load(x_at + group * 128, mask=is_row[None, :], other=0.0)
        second = tl.load(x_at + group * 128 + HALF, mask=is_row[None, :], other=0.0)
        low = (((both & 15).to(tl.float32) - zero) * scale).to(dtype)
        high = (((both >> 4).to(tl.float32) - zero) * scale).to(dtype)
        total = tl.dot(low, first, total)
        total = tl.dot(high, second, total)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + row[:, None] * NUM_COLUMNS + column[None, :]
    tl.store(out_at, tl.trans(total).to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _dequantize_kernel(
    packed_ptr, scales_ptr, zeros_ptr, out_ptr, num_rows, DEPTH: tl.constexpr, ROWS: tl.constexpr
):
    """A program writes a group of some rows."""
    HALF: tl.constexpr = 64
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < num_rows
    group = tl.program_id(1)
    byte = tl.arange(0, HALF)[None, :]
    both = tl.load(packed_ptr + row[:, None] * (DEPTH // 2) + group * HALF + byte, mask=is_row[:, None], other=0)
    at = row * (DEPTH // 128) + group
    scale = tl.load(scales_ptr + at, mask=is_row, other=0.0).to(tl.float32)[:, None]
    zero = tl.load(zeros_ptr + at, mask=is_row, other=0).to(tl.float32)[:, None]
    out = out_ptr + row[:, None] * DEPTH + group * 128 + byte
    dtype = out_ptr.dtype.element_ty
    tl.store(out, (((both & 15).to(tl.float32) - zero) * scale).to(dtype), mask=is_row[:, None])
    tl.store(out + HALF, (((both >> 4).to(tl.float32) - zero) * scale).to(dtype), mask=is_row[:, None])
