"""How the kernels that treat each row or element by itself go over their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triton_ops.implementation import cdiv, next_power_of_2, tl, triton

# Of a row that one program holds in its registers: 32768 elements of two bytes or 16384 of four. Models have up to
# 18432, and 16384 in what anyone would run in float32.
MAX_BYTES = 65536
# Rows up to this long are loaded together with what joins them; for longer ones the registers do not hold it all.
EARLY_BLOCK: tl.constexpr = 8192 if tl is None else tl.constexpr(8192)
ROW_TILE = 2048  # elements of a program of short rows
ROW_ELEMENTS = 16  # of a thread, where rows are held: two accesses of 16 bytes
BLOCK = 1024  # elements of a program that holds no row
NUM_WARPS = 4


def as_rows(x: Tensor) -> Tensor:
    """`x [..., size]` as `[rows, size]`, each row contiguous: a view, unless there is none."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def check_vector(name: str, vector: Tensor, x: Tensor) -> None:
    """Raise ValueError unless there is an element for each of a row of `x`, in its dtype."""
    if vector.shape != x.shape[-1:] or vector.dtype != x.dtype or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous [{x.shape[-1]}] in {x.dtype}, but is {[*vector.shape]} in {vector.dtype}"
        )


def check_residual(residual: Tensor, x: Tensor) -> None:
    """Raise ValueError unless the residual is of x's shape and dtype."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must be {[*x.shape]} in {x.dtype}, but is {[*residual.shape]} in {residual.dtype}"
        )


def check_parts(x: Tensor, residual: Tensor) -> None:
    """Raise ValueError unless `x` is float32 parts of what is added to the residual."""
    if x.shape[1:] != residual.shape or len(x) == 0 or x.dtype != torch.float32:
        raise ValueError(
            f"parts must be [P, {', '.join(map(str, residual.shape))}] in torch.float32, but are {[*x.shape]} in "
            f"{x.dtype}"
        )


def row_blocks(size: int, dtype: torch.dtype, parts: int = 0) -> tuple[int, int, int]:
    """For kernels that hold whole rows of `size` elements: the block that a row is padded to, the rows of a
    program (several where they are short), its warps. Raises ValueError where a row is too long.

    With `parts`, rows are the sums of so many each. Such batches are small: a program has one row, and threads
    enough to have all their loads under way at once.
    """
    if size * dtype.itemsize > MAX_BYTES:
        raise ValueError(f"rows of {size} elements of {dtype} exceed the kernel's limit of {MAX_BYTES} bytes")
    block = max(16, next_power_of_2(size))
    if parts:
        return block, 1, min(32, max(1, block * next_power_of_2(parts) // (32 * ROW_ELEMENTS)))
    rows = max(1, ROW_TILE // block)
    max_warps = 16 if block <= 16384 else 32
    return block, rows, min(max_warps, max(1, block * rows // (32 * ROW_ELEMENTS)))


def launch_gated(kernel: Any, x: Tensor, **constexprs: Any) -> Tensor:
    """Run a kernel over the blocks of the result, `[..., SIZE]` in x's dtype, of `x [..., 2 * SIZE]`."""
    if x.shape[-1] % 2:
        raise ValueError(f"gate | up must be of even size, but is of {x.shape[-1]}")
    return _launch_blocks(kernel, x, x.shape[-1] // 2, **constexprs)


def launch_each(kernel: Any, x: Tensor, **constexprs: Any) -> Tensor:
    """Run a kernel over the blocks of the result, of the shape and dtype of `x [..., SIZE]`."""
    return _launch_blocks(kernel, x, x.shape[-1], **constexprs)


def _launch_blocks(kernel: Any, x: Tensor, size: int, **constexprs: Any) -> Tensor:
    """Run `kernel(x_ptr, out_ptr, x_stride, SIZE, BLOCK, **constexprs)` for each block of the result's rows."""
    rows = as_rows(x)
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    block = min(BLOCK, max(16, next_power_of_2(size)))
    if out.numel():
        grid = (rows.shape[0] * cdiv(size, block),)
        kernel[grid](rows, out, rows.stride(0), SIZE=size, BLOCK=block, num_warps=NUM_WARPS, **constexprs)
    return out


@triton.jit
def row_and_columns(SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The row and the columns of a program of `_launch_blocks`."""
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return (program // num_blocks).to(tl.int64), program % num_blocks * BLOCK + tl.arange(0, BLOCK)
