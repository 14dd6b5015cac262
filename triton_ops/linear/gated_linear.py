"""The gate and up projections of a SwiGLU feed-forward layer (Shazeer, 2020) with its activation, in one kernel:
what two would write and read between them is twice as large as the result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.activations.elementwise import as_rows
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import Impl, TensorDescriptor, cdiv, gpu_of, runs_triton, tl, triton
from triton_ops.linear.gated_linear_hopper import launch_hopper
from triton_ops.tuning import TILE_GROUP, TILE_WARPS, TileConfig

_ALIGNMENT = 16  # bytes, of rows and their starts, as Hopper's tensor memory accelerator reads and writes them


def gated_linear(x: Tensor, weight: Tensor, config: TileConfig, *, impl: Impl = "auto") -> Tensor:
    """`silu_and_mul(x W^T)`, rounded where that rounds: `[..., N]` in x's dtype.

    Args:
        x: `[..., K]`, float16 or bfloat16; K a multiple of 8. Rows that are not contiguous, or do not begin at
            multiples of 16 bytes, are copied first.
        weight: gate | up, `[2 N, K]` in x's dtype, contiguous; N a multiple of 8.
        config: from `gated_linear_config`.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, weight)
    if runs_triton(impl, x.device):
        return _launch(x, weight, config)
    return silu_and_mul(linear(x, weight), impl="torch")


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x and weight must be float16 or bfloat16 both, but are {x.dtype} and {weight.dtype}")
    (num_outputs, depth), size = weight.shape, x.shape[-1]
    wrong = depth != size or depth % 8 or num_outputs % 16
    if wrong or not weight.is_contiguous() or _is_unaligned(weight):
        raise ValueError(
            f"weight must be contiguous [2 N, {size}], N and {size} multiples of 8, and begin at a multiple of "
            f"{_ALIGNMENT} bytes, but is {[*weight.shape]} with strides {[*weight.stride()]}"
        )


def _launch(x: Tensor, weight: Tensor, config: TileConfig) -> Tensor:
    """Descriptors are made here, and travel with the launch's arguments: a captured launch keeps them."""
    num_columns = len(weight) // 2
    out = x.new_empty(*x.shape[:-1], num_columns)
    if not out.numel():
        return out
    rows, results, weights = _aligned_rows(x), out.view(-1, num_columns), weight.view(2, num_columns, -1)
    num_tiles = cdiv(len(rows), config.rows) * cdiv(num_columns, config.columns)
    num_programs = min(gpu_of(x.device).num_sms, num_tiles)
    if config.language == "gluon":
        launch_hopper(rows, weights, results, config, num_programs)
        return out
    _gated_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(rows, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(weights, [2, config.columns, config.depth]),
        TensorDescriptor.from_tensor(results, [config.rows, config.columns]),
        len(rows),
        num_columns,
        rows.shape[1],
        num_programs,
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
def _gated_kernel(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    depth,
    num_programs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program computes every `num_programs`th tile: `ROWS` of x times `COLUMNS` of gate and of up, in one
    product. What lies beyond the tensors is loaded as zeros, and not stored.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, num_programs):
        first = tile // (GROUP * column_tiles) * GROUP
        height = tl.minimum(row_tiles - first, GROUP)
        within = tile % (GROUP * column_tiles)
        row, column = (first + within % height) * ROWS, within // height * COLUMNS
        total = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            weights = weight.load([0, column, start]).reshape(2 * COLUMNS, DEPTH)
            total = tl.dot(x.load([row, start]), weights.T, total)
        gate, up = total.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
        # Rounded as between a product and `silu_and_mul`.
        wide = gate.to(out.dtype).to(tl.float32)
        activated = (wide / (1.0 + tl.exp(-wide))).to(out.dtype)
        out.store([row, column], activated * up.to(out.dtype))
