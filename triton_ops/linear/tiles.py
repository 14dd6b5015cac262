"""Products of many rows, tile by tile, and what may be done with a tile before it is stored."""

# Tests: tests/triton_ops/linear/test_gated_linear.py, tests/triton_ops/linear/test_large_linear.py

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import TensorDescriptor, cdiv, gpu_of, tl, triton
from triton_ops.linear.tiles_hopper import launch_hopper
from triton_ops.tuning import TILE_GROUP, TILE_WARPS, TileConfig

_ALIGNMENT = 16  # bytes, of rows and their starts, as Hopper's tensor memory accelerator reads and writes them


def check_tiles(x: Tensor, weight: Tensor, parts: int) -> None:
    """Raise ValueError unless `x [..., K]` and `weight [parts * N, K]` can be multiplied by `launch_tiles`."""
    if x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x and weight must be float16 or bfloat16 both, but are {x.dtype} and {weight.dtype}")
    (num_outputs, depth), size = weight.shape, x.shape[-1]
    wrong = depth != size or depth % 8 or num_outputs % (8 * parts)
    if wrong or not weight.is_contiguous() or _is_unaligned(weight):
        rows = "N" if parts == 1 else f"{parts} N"
        raise ValueError(
            f"weight must be contiguous [{rows}, {size}], N and {size} multiples of 8, and begin at a multiple of "
            f"{_ALIGNMENT} bytes, but is {[*weight.shape]} with strides {[*weight.stride()]}"
        )


def launch_tiles(x: Tensor, weight: Tensor, config: TileConfig, parts: int) -> Tensor:
    """`x W^T` with one part, `silu_and_mul(x W^T)` with two, rounded as these are: `[..., N]` in x's dtype. Both
    were checked. Rows of x that are not contiguous, or begin off multiples of 16 bytes, are copied first.

    Descriptors are made here, and travel with the launch's arguments: a captured launch keeps them.
    """
    num_columns = len(weight) // parts
    out = x.new_empty(*x.shape[:-1], num_columns)
    if not out.numel():
        return out
    rows, results, weights = _aligned_rows(x), out.view(-1, num_columns), weight.view(parts, num_columns, -1)
    num_tiles = cdiv(len(rows), config.rows) * cdiv(num_columns, config.columns)
    num_programs = min(gpu_of(x.device).num_sms, num_tiles)
    if config.language == "gluon":
        launch_hopper(rows, weights, results, config, num_programs)
        return out
    _tiles_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(rows, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(weights, [parts, config.columns, config.depth]),
        TensorDescriptor.from_tensor(results, [config.rows, config.columns]),
        len(rows),
        num_columns,
        rows.shape[1],
        num_programs,
        PARTS=parts,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUP=TILE_GROUP,
        num_warps=TILE_WARPS,
        num_stages=config.stages,
    )
    return out


def _is_unaligned(rows: Tensor) -> bool:
    return bool(rows.data_ptr() % _ALIGNMENT or rows.stride(0) * rows.itemsize % _ALIGNMENT)


def _aligned_rows(x: Tensor) -> Tensor:
    rows = as_rows(x)
    if _is_unaligned(rows) or rows.stride(0) < rows.shape[1]:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _tiles_kernel(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    depth,
    num_programs,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program computes every `num_programs`th tile: `ROWS` of x times `COLUMNS` of all parts, in one product.
    What lies beyond the tensors is loaded as zeros, and not stored.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, num_programs):
        first = tile // (GROUP * column_tiles) * GROUP
        height = tl.minimum(row_tiles - first, GROUP)
        within = tile % (GROUP * column_tiles)
        row, column = (first + within % height) * ROWS, within // height * COLUMNS
        total = tl.zeros((ROWS, PARTS * COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            weights = weight.load([0, column, start]).reshape(PARTS * COLUMNS, DEPTH)
            total = tl.dot(x.load([row, start]), weights.T, total)
        if PARTS == 1:
            out.store([row, column], total.to(out.dtype))
        else:
            gate, up = total.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
            # Rounded as between a product and `silu_and_mul`.
            wide = gate.to(out.dtype).to(tl.float32)
            activated = (wide / (1.0 + tl.exp(-wide))).to(out.dtype)
            out.store([row, column], activated * up.to(out.dtype))
