"""How kernels of single rows or elements walk over their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triton_ops.implementation import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    overlapped,
    tl,
    triton,
)
from triton_ops.tuning import ELEMENTWISE


def as_rows(x: Tensor) -> Tensor:
    """`x [..., size]` as `[rows, size]`, each row contiguous: a view, unless there is none."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def check_vector(name: str, vector: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `vector` has as many elements as a row of `x`, in its dtype."""
    if vector.shape != x.shape[-1:] or vector.dtype != x.dtype or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous [{x.shape[-1]}] in {x.dtype}, but is {[*vector.shape]} in {vector.dtype}"
        )


def check_residual(residual: Tensor, x: Tensor) -> None:
    """Raise ValueError unless the residual has x's shape and dtype."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must be {[*x.shape]} in {x.dtype}, but is {[*residual.shape]} in {residual.dtype}"
        )


def check_parts(x: Tensor, residual: Tensor) -> None:
    """Raise ValueError unless `x` holds float32 parts of a tensor of the residual's shape."""
    if x.shape[1:] != residual.shape or len(x) == 0 or x.dtype != torch.float32:
        raise ValueError(
            f"parts must be [P, {', '.join(map(str, residual.shape))}] in torch.float32, but are {[*x.shape]} in "
            f"{x.dtype}"
        )


def launch_gated(kernel: Any, x: Tensor, **constexprs: Any) -> Tensor:
    """Run a kernel from `x [..., 2 * SIZE]` to `[..., SIZE]` in x's dtype, block by block."""
    if x.shape[-1] % 2:
        raise ValueError(f"gate | up must be of even size, but is of {x.shape[-1]}")
    return _launch_blocks(kernel, x, x.shape[-1] // 2, **constexprs)


def launch_each(kernel: Any, x: Tensor, **constexprs: Any) -> Tensor:
    """Run a kernel from `x [..., SIZE]` to a tensor of the same shape and dtype, block by block."""
    return _launch_blocks(kernel, x, x.shape[-1], **constexprs)


def _launch_blocks(kernel: Any, x: Tensor, size: int, **constexprs: Any) -> Tensor:
    """Run `kernel(x_ptr, out_ptr, x_stride, SIZE, BLOCK, EARLY, **constexprs)` for each block of the result."""
    rows = as_rows(x)
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    block = min(ELEMENTWISE.size, max(16, next_power_of_2(size)))
    if out.numel():
        early = overlapped(x.device, len(rows))
        grid = (rows.shape[0] * cdiv(size, block),)
        kernel[grid](
            rows,
            out,
            rows.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=ELEMENTWISE.num_warps,
            **early,
            **constexprs,
        )
    return out


@triton.jit
def row_and_columns(SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The row and the columns of a program of `_launch_blocks`, once they can be read."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return (program // num_blocks).to(tl.int64), program % num_blocks * BLOCK + tl.arange(0, BLOCK)
