"""Rows in e4m3, 8 bits a number, with scales in float32, of a row or of groups of 128 of its elements: what
products with weights in e4m3 read. Norms and activations make such rows, too, with functions of the kernels here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from triton_ops.activations.elementwise import as_rows
from triton_ops.e4m3 import E4M3, E4M3_MAX, to_e4m3
from triton_ops.implementation import Impl, cdiv, next_power_of_2, runs_triton, tl, triton
from triton_ops.tuning import E4M3_GROUPS, E4M3_ROW

BLOCK = 128  # of a row's elements, and of a weight's rows and columns, that have a scale in common
# Of a row or group whose largest number is smaller, all zeros among them, the scale is as if that were it.
SMALLEST_MAX = 2.0**-64


@dataclass(frozen=True)
class QuantisedRows:
    """`x [M, K]` as `quantise_rows` has it.

    Attributes:
        codes: e4m3 `[M, K]`.
        scale: float32 `[M, 1]`, or of groups `[M, K / 128]` rounded up.
        dtype: x's, and that of its products.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, *, groups: bool, impl: Impl = "auto") -> QuantisedRows:
        return cls(*quantise_rows(x, groups=groups, impl=impl), x.dtype)

    @classmethod
    def empty(cls, num_rows: int, depth: int, like: Tensor, *, groups: bool) -> QuantisedRows:
        """To be written, for rows in the dtype of `like` and on its device."""
        codes = torch.empty(num_rows, depth, dtype=E4M3, device=like.device)
        num_scales = cdiv(depth, BLOCK) if groups else 1
        return cls(codes, torch.empty(num_rows, num_scales, dtype=torch.float32, device=like.device), like.dtype)

    @property
    def in_groups(self) -> bool:
        return self.scale.shape[1] > 1

    @property
    def words(self) -> str:
        return "in groups" if self.in_groups else "by row"


def scale_of(largest: Tensor) -> Tensor:
    """Scales of what has these largest absolute values."""
    # By a tensor: a GPU would multiply by the reciprocal of a number, which is not always the same.
    return largest.clamp_min(SMALLEST_MAX) / torch.full_like(largest, E4M3_MAX)


def codes_of(wide: Tensor, scale: Tensor) -> Tensor:
    """float32 in e4m3, by scales that broadcast."""
    codes = (wide / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return codes.masked_fill_(~wide.isfinite(), torch.nan).to(E4M3)


def quantise_rows(x: Tensor, *, groups: bool, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """`x [M, K]`, any float, in e4m3, and float32 scales: `[M, 1]` of rows, or with `groups` `[M, K / 128]`
    rounded up. A scale is the largest finite absolute value over 448; numbers that are not finite become NaN.
    """
    num_rows, depth = x.shape
    if not runs_triton(impl, x.device):
        wide = x.float()
        sizes = wide.abs().masked_fill_(~wide.isfinite(), 0.0)
        if not groups:
            scale = scale_of(sizes.amax(1, keepdim=True))
            return codes_of(wide, scale), scale
        scale = scale_of(pad(sizes, (0, -depth % BLOCK)).view(num_rows, cdiv(depth, BLOCK), BLOCK).amax(2))
        return codes_of(wide, spread_groups(scale, depth)), scale
    rows = as_rows(x)
    codes = torch.empty(num_rows, depth, dtype=E4M3, device=x.device)
    scale = torch.empty(num_rows, cdiv(depth, BLOCK) if groups else 1, dtype=torch.float32, device=x.device)
    if num_rows:
        kernel, most = (_quantise_groups_kernel, E4M3_GROUPS) if groups else (_quantise_rows_kernel, E4M3_ROW)
        block = min(most.size, max(BLOCK, next_power_of_2(depth)))
        kernel[(num_rows * (cdiv(depth, block) if groups else 1),)](
            rows,
            codes,
            scale,
            rows.stride(0),
            SIZE=depth,
            BLOCK=block,
            num_warps=max(1, most.num_warps * block // most.size),
        )
    return codes, scale


def spread_groups(scale: Tensor, depth: int) -> Tensor:
    """Scales of groups for each element."""
    return scale.repeat_interleave(BLOCK, 1)[:, :depth]


@triton.jit
def _quantise_rows_kernel(x_ptr, codes_ptr, scale_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program quantises a row. What does not fit its registers is read twice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < SIZE, other=0.0)
    largest = finite_sizes(x)
    for start in range(BLOCK, SIZE, BLOCK):
        rest = tl.load(x_ptr + row * x_stride + start + column, mask=start + column < SIZE, other=0.0)
        largest = tl.maximum(largest, finite_sizes(rest))
    scale = e4m3_scale(tl.max(largest, axis=0))
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * SIZE + column, to_e4m3(x, scale), mask=column < SIZE)
    for start in range(BLOCK, SIZE, BLOCK):
        rest = tl.load(x_ptr + row * x_stride + start + column, mask=start + column < SIZE, other=0.0)
        tl.store(codes_ptr + row * SIZE + start + column, to_e4m3(rest, scale), mask=start + column < SIZE)


@triton.jit
def _quantise_groups_kernel(x_ptr, codes_ptr, scale_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program quantises some groups of a row."""
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    num_groups: tl.constexpr = (SIZE + 127) // 128
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    group = tl.program_id(0) % num_blocks * (BLOCK // 128) + tl.arange(0, BLOCK // 128)[:, None]
    column = group * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=column < SIZE, other=0.0)
    scale = e4m3_scale(tl.max(finite_sizes(x), axis=1, keep_dims=True))
    tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)
    tl.store(codes_ptr + row * SIZE + column, to_e4m3(x, scale), mask=column < SIZE)


@triton.jit
def finite_sizes(x):
    """Absolute values in float32, 0 of what is not finite."""
    size = tl.abs(x.to(tl.float32))
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def e4m3_scale(largest):
    """`scale_of` of a tile."""
    return tl.div_rn(tl.maximum(largest, 5.421010862427522e-20), tl.full(largest.shape, 448.0, tl.float32))
