"""Split-K: a linear projection whose sums are cut into parts, for outputs too small to occupy a GPU.

`add_rms_norm` adds the parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import (
    FEW_ROWS,
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
from triton_ops.tuning import MAX_PREFETCHED, SPLIT_K_COLUMNS, SPLIT_K_WARPS, SplitKConfig


def split_k_linear(x: Tensor, weight: Tensor, config: SplitKConfig, *, impl: Impl = "auto") -> Tensor:
    """`x W^T` in parts: part p sums over elements `[p * part_depth, (p + 1) * part_depth)` of the rows of both.

    Args:
        x: `[M, K]`, float16 or bfloat16. Rows that are not contiguous are copied first.
        weight: `[N, K]` in x's dtype, contiguous; N a multiple of 64, K one of `config.depth`.
        config: from `split_k_config`.

    Returns:
        float32 `[P, M, N]`, P = K / part_depth rounded up: the sum over the first dimension is `x W^T`.

    Raises ValueError where shapes, dtypes or the config disagree.
    """
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    _check(x, weight, config)
    if not runs_triton(impl, x.device):
        cuts = (torch.split(wide, config.part_depth, 1) for wide in (x.float(), weight.float()))
        return torch.stack([x_part @ weight_part.T for x_part, weight_part in zip(*cuts, strict=True)])
    num_parts = cdiv(depth, config.part_depth)
    out = torch.empty(num_parts, num_rows, num_columns, dtype=torch.float32, device=x.device)
    if num_rows:
        rows = as_rows(x)
        _split_k_kernel[(num_columns // SPLIT_K_COLUMNS, num_parts, cdiv(num_rows, config.rows))](
            rows,
            weight,
            out,
            num_rows,
            rows.stride(0),
            num_columns,
            depth,
            config.part_depth,
            ROWS=config.rows,
            COLUMNS=SPLIT_K_COLUMNS,
            DEPTH=config.depth,
            STAGES=config.stages,
            num_warps=SPLIT_K_WARPS,
            PREFETCHES=num_rows <= FEW_ROWS and weight.nbytes <= MAX_PREFETCHED,
            **overlapped(x.device, num_rows),
        )
    return out


def _check(x: Tensor, weight: Tensor, config: SplitKConfig) -> None:
    num_columns, depth = weight.shape
    if x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x and weight must be float16 or bfloat16 both, but are {x.dtype} and {weight.dtype}")
    if x.shape[1] != depth or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous [N, {x.shape[1]}], but is {[*weight.shape]} with strides "
            f"{[*weight.stride()]}"
        )
    if num_columns % SPLIT_K_COLUMNS or depth % config.depth or config.part_depth % config.depth:
        raise ValueError(
            f"weight is {[*weight.shape]} and a part {config.part_depth} deep: there must be a multiple of "
            f"{SPLIT_K_COLUMNS} rows, and both depths must be multiples of {config.depth}"
        )


@triton.jit(do_not_specialize=["num_rows"])
def _split_k_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    num_columns,
    depth,
    part_depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program computes a tile of one part. The weight's tile, which always has 64 rows, is the first operand."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[:, None].to(tl.int64)
    part = tl.program_id(1)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    is_row = row < num_rows
    first = part * part_depth
    inner = first + tl.arange(0, DEPTH)[None, :]
    weights = weight_ptr + column * depth + inner
    xs = x_ptr + row * x_stride + inner
    if EARLY:
        gdc_launch_dependents()
        if PREFETCHES:
            prefetch(weight_ptr + column * depth + first, tl.minimum(part_depth, depth - first), DEPTH)
        gdc_wait()
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in tl.range(0, tl.minimum(part_depth, depth - first), DEPTH, num_stages=STAGES):
        weight = tl.load(weights + start)
        x = tl.load(xs + start, mask=is_row, other=0.0)
        total = tl.dot(weight, tl.trans(x), total)
    out = out_ptr + (part.to(tl.int64) * num_rows + row) * num_columns + tl.trans(column)
    tl.store(out, tl.trans(total), mask=is_row)
