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
from triton_ops.tuning import GATED_GROUP, GATED_WARPS, GatedLinearConfig

_ALIGNMENT = 16  # bytes, of rows and their starts, as Hopper's tensor memory accelerator reads and writes them


def gated_linear(x: Tensor, weight: Tensor, config: GatedLinearConfig, *, impl: Impl = "auto") -> Tensor:
    """`silu_and_mul(x W^T)`, rounded where that rounds: `[..., N]` in x's dtype.

    Args:
        x: `[..., K]`, float16 or bfloat16; K a multiple of 8. Rows that are not contiguous, or do not begin at
            multiples of 16 bytes, are copied first.
        weight: gate | up, `[2 N, K]` in x's dtype, contiguous; N a multiple of 8.
        config: from `gated_linear_config`.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, weight)
    if not runs_triton(impl, x.device):
        return silu_and_mul(linear(x, weight), impl="torch")
    out = x.new_empty(*x.shape[:-1], len(weight) // 2)
    if out.numel():
        launch = launch_hopper if config.language == "gluon" else _launch
        rows, results = _aligned_rows(x), out.view(-1, out.shape[-1])
        launch(rows, weight, results, config, gpu_of(x.device).num_sms)
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x and weight must be float16 or bfloat16 both, but are {x.dtype} and {weight.dtype}")
    (num_outputs, depth), size = weight.shape, x.shape[-1]
    if depth != size or num_outputs % 16 or depth % 8 or not weight.is_contiguous() or _is_unaligned(weight):
        raise ValueError(
            f"weight must be contiguous [2 N, {size}], N and {size} multiples of 8, and begin at a multiple of "
            f"{_ALIGNMENT} bytes, but is {[*weight.shape]} with strides {[*weight.stride()]}"
        )


def _is_unaligned(rows: Tensor) -> bool:
    return bool(rows.data_ptr() % _ALIGNMENT or rows.stride(0) * rows.itemsize % _ALIGNMENT)


def _aligned_rows(x: Tensor) -> Tensor:
    rows = as_rows(x)
    if _is_unaligned(rows) or rows.stride(0) < rows.shape[1]:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def _launch(x: Tensor, weight: Tensor, out: Tensor, config: GatedLinearConfig, num_sms: int) -> None:
    (num_rows, depth), num_columns = x.shape, out.shape[1]
    num_programs = min(num_sms, cdiv(num_rows, config.rows) * cdiv(num_columns, config.columns))
    both = weight.view(2, num_columns, depth)
    _gated_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(both, [2, config.columns, config.depth]),
        TensorDescriptor.from_tensor(out, [config.rows, config.columns]),
        num_rows,
        num_columns,
        depth,
        num_programs,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUP=GATED_GROUP,
        num_warps=GATED_WARPS,
        num_stages=config.stages,
    )


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
    """A program computes every `num_programs`th tile: `ROWS` of x times `COLUMNS` of gate and up, in one product.
    What lies beyond the tensors is loaded as zeros, and not stored.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, num_programs):
        first = tile // (GROUP * column_tiles) * GROUP
        height = tl.minimum(row_tiles - first, GROUP)
        within = tile % (GROUP * column_tiles)
        row, column = (first + within % height) * ROWS, within // height * COLUMNS
        total = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            both = weight.load([0, column, start]).reshape(2 * COLUMNS, DEPTH)
            total = tl.dot(x.load([row, start]), both.T, total)
        gate, up = total.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
        # Rounded as between a product and `silu_and_mul`.
        wide = gate.to(out.dtype).to(tl.float32)
        activated = (wide / (1.0 + tl.exp(-wide))).to(out.dtype)
        out.store([row, column], activated * up.to(out.dtype))
