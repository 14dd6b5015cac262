"""A linear projection of a few rows, which takes as long as its weights take to come: they are asked for while the
kernels before it still run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.activations.elementwise import as_rows
from triton_ops.activations.silu_and_mul import silu_and_mul, silu_times
from triton_ops.implementation import (
    Impl,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    overlapped,
    runs_triton,
    tl,
    triton,
)
from triton_ops.linear.prefetch import prefetch
from triton_ops.tuning import FEW_ROWS_WARPS, FewRowsConfig


def few_rows_linear(
    x: Tensor, weight: Tensor, config: FewRowsConfig, *, gated: bool = False, impl: Impl = "auto"
) -> Tensor:
    """`x W^T`, or `silu_and_mul(x W^T)` if `gated`, rounded where that rounds: in x's dtype.

    Args:
        x: `[M, K]`, float16 or bfloat16. Rows that are not contiguous are copied first.
        weight: `[N, K]`, or gate | up `[2 N, K]`, in x's dtype, contiguous; K a multiple of `config.depth`, N
            of `config.columns`.
        config: from `few_rows_config`.

    Returns `[M, N]`. Raises ValueError where shapes, dtypes or the config disagree.
    """
    num_columns = len(weight) // (2 if gated else 1)
    _check(x, weight, num_columns, config)
    if not runs_triton(impl, x.device):
        product = linear(x, weight)
        return silu_and_mul(product, impl="torch") if gated else product
    rows = as_rows(x)
    out = x.new_empty(len(rows), num_columns)
    if len(rows):
        _few_rows_kernel[(num_columns // config.columns, cdiv(len(rows), config.rows))](
            rows,
            weight,
            out,
            len(rows),
            rows.stride(0),
            num_columns,
            weight.shape[1],
            GATED=gated,
            ROWS=config.rows,
            COLUMNS=config.columns,
            DEPTH=config.depth,
            STAGES=config.stages,
            num_warps=FEW_ROWS_WARPS,
            **overlapped(x.device, len(rows)),
        )
    return out


def _check(x: Tensor, weight: Tensor, num_columns: int, config: FewRowsConfig) -> None:
    if x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x and weight must be float16 or bfloat16 both, but are {x.dtype} and {weight.dtype}")
    depth = weight.shape[1]
    if x.ndim != 2 or x.shape[1] != depth or not weight.is_contiguous():
        raise ValueError(
            f"x must be [M, K] and weight contiguous [N, K], but they are {[*x.shape]} and {[*weight.shape]} with "
            f"strides {[*weight.stride()]}"
        )
    if num_columns % config.columns or depth % config.depth:
        raise ValueError(
            f"weight is {[*weight.shape]}: there must be a multiple of {config.columns} columns and of "
            f"{config.depth} elements"
        )


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    num_columns,
    depth,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program computes `COLUMNS` of the output; the weights, of gate and up if GATED, are the first operand."""
    WIDTH: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    first = tl.program_id(0) * COLUMNS
    nth = tl.arange(0, WIDTH)[:, None]
    column = (first + nth % COLUMNS + nth // COLUMNS * num_columns).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    is_row = row < num_rows
    if EARLY:
        gdc_launch_dependents()
        prefetch(weight_ptr + column * depth, depth, DEPTH)
        gdc_wait()
    inner = tl.arange(0, DEPTH)[None, :]
    weights = weight_ptr + column * depth + inner
    xs = x_ptr + row * x_stride + inner
    total = tl.zeros((WIDTH, ROWS), tl.float32)
    for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
        weight = tl.load(weights + start)
        x = tl.load(xs + start, mask=is_row, other=0.0)
        total = tl.dot(weight, tl.trans(x), total)
    result = total.to(out_ptr.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (2, COLUMNS, ROWS)), (1, 2, 0)))
        result = silu_times(gate, up)
    out = out_ptr + row * num_columns + (first + tl.arange(0, COLUMNS))[None, :]
    tl.store(out, tl.trans(result), mask=is_row)
