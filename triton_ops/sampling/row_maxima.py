"""The greatest elements of chunks of rows, from which finiteness, greedy choices and thresholds are found."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import INTERPRETED, cdiv, next_power_of_2, tl, triton
from triton_ops.sampling.token_mass import BLOCK
from triton_ops.tuning import CHUNK_MAXIMA_WARPS

CHUNK = 256  # elements with one maximum
TILE = BLOCK  # elements of a program: draws need the chunks of a block together


def chunk_maxima(rows: Tensor) -> Tensor:
    """The greatest of every CHUNK elements of `rows [R, N]`, each contiguous, by a kernel: float32 `[R, chunks]`;
    NaN where one is NaN. The chunks fill whole tiles; elements beyond N count as -inf.
    """
    num_rows, size = rows.shape
    num_tiles = cdiv(size, TILE)
    maxima = torch.empty(num_rows, num_tiles * (TILE // CHUNK), dtype=torch.float32, device=rows.device)
    if num_rows:
        _chunk_maxima_kernel[(num_rows * num_tiles,)](
            rows, maxima, rows.stride(0), SIZE=size, CHUNK=CHUNK, TILE=TILE, num_warps=CHUNK_MAXIMA_WARPS
        )
    return maxima


@triton.jit
def _greater(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest(x, axis: tl.constexpr):
    """The maximum along an axis; NaN where there is one, as in torch."""
    if INTERPRETED:  # where a reduction by a custom function takes seconds
        found = tl.max(x, axis) + tl.sum(tl.where(x == x, 0.0, x), axis)
    else:
        found = tl.reduce(x, axis, _greater)
    return found


@triton.jit
def _chunk_maxima_kernel(x_ptr, maxima_ptr, x_stride, SIZE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    num_tiles: tl.constexpr = (SIZE + TILE - 1) // TILE
    chunks: tl.constexpr = TILE // CHUNK
    program = tl.program_id(0)
    row, tile = (program // num_tiles).to(tl.int64), program % num_tiles
    chunk = tl.arange(0, chunks)
    col = tile * TILE + chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(x_ptr + row * x_stride + col, mask=col < SIZE, other=-float("inf")).to(tl.float32)
    maxima = greatest(x, 1)
    tl.store(maxima_ptr + (row * num_tiles + tile) * chunks + chunk, maxima)


@triton.jit
def _finite_kernel(maxima_ptr, finite_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    maxima = tl.load(maxima_ptr + row * COUNT + index, mask=index < COUNT, other=-float("inf"))
    tl.store(finite_ptr + row, tl.abs(greatest(maxima, 0)) < float("inf"))


def finite_of(maxima: Tensor) -> Tensor:
    """Bool `[R]`: whether the greatest of each row of `maxima [R, N]` is finite. By a kernel."""
    num_rows, count = maxima.shape
    finite = torch.empty(num_rows, dtype=torch.bool, device=maxima.device)
    if num_rows:
        _finite_kernel[(num_rows,)](
            maxima, finite, COUNT=count, BLOCK=next_power_of_2(count), num_warps=CHUNK_MAXIMA_WARPS
        )
    return finite
