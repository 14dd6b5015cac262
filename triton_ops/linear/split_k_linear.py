"""A linear projection whose sums are cut into parts, for outputs too small to occupy a GPU otherwise (split-K; the
addition is left to `add_rms_norm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import GPU, Impl, cdiv, runs_triton, tl, triton

COLUMNS = 64  # of the output a program: the rows of the instruction (wgmma), which a small batch would not fill
NUM_WARPS = 4
MAX_PARTS = 8  # reading them must stay cheap beside the weight


@dataclass(frozen=True)
class SplitKConfig:
    """How a product is cut.

    Attributes:
        rows: of x a program, a power of two from 16 on.
        depth: elements of the sum that are loaded at a time, a power of two from 16 on.
        stages: loads under way at a time.
        part_depth: elements of the sum a part, a multiple of `depth`; the last part may have fewer.
    """

    rows: int
    depth: int
    stages: int
    part_depth: int


@dataclass(frozen=True)
class _Tile:
    """`max_programs`: that an H200 runs at a time, about; more of them would wait for others."""

    rows: int
    depth: int
    stages: int
    max_programs: int


# The fastest of those measured on an H200 in bf16, by the rows that x has at most: outputs of 1024 columns (sums
# of 2048 and 3072), of 4096 (sums of 4096), and of 4096 over deep sums (14336). Sums of 1024 gained little or
# nothing, nor did 256 rows of 4096 columns.
_FEW_COLUMNS = {
    16: _Tile(16, 128, 5, 192),
    32: _Tile(32, 64, 5, 192),
    64: _Tile(64, 64, 5, 192),
    128: _Tile(64, 64, 5, 192),
    256: _Tile(128, 64, 4, 192),
}
_MANY_COLUMNS = {
    16: _Tile(16, 128, 5, 192),
    32: _Tile(32, 64, 5, 256),
    64: _Tile(64, 64, 5, 256),
    128: _Tile(128, 64, 4, 256),
}
_DEEP = {
    16: _Tile(16, 128, 3, 256),
    32: _Tile(32, 128, 5, 132),
    64: _Tile(64, 128, 5, 132),
    128: _Tile(128, 64, 4, 256),
}


@lru_cache(maxsize=4096)
def split_k_config(
    gpu: GPU, num_rows: int, num_columns: int, depth: int, dtype: torch.dtype
) -> SplitKConfig | None:
    """How to cut the product of `[num_rows, depth]` and `[num_columns, depth]` in `dtype`; None where
    `torch.nn.functional.linear` is as fast, or was not compared.
    """
    if gpu.capability != 90 or dtype not in (torch.float16, torch.bfloat16):
        return None
    if not (768 <= num_columns <= 4096 and depth >= 2048) or num_columns % COLUMNS:
        return None
    tiles = _FEW_COLUMNS if num_columns <= 2048 else _MANY_COLUMNS if depth <= 8192 else _DEEP
    max_rows = 256 if num_columns <= 1024 else 128
    if not 1 <= num_rows <= max_rows:
        return None
    tile = tiles[min(rows for rows in tiles if num_rows <= rows)]
    if depth % tile.depth:
        return None
    num_tiles = num_columns // COLUMNS * -(-num_rows // tile.rows)
    parts = min(MAX_PARTS, 1 << (tile.max_programs // num_tiles).bit_length() - 1)
    part_depth = -(-depth // (parts * tile.depth)) * tile.depth
    return SplitKConfig(tile.rows, tile.depth, tile.stages, part_depth)


def split_k_linear(x: Tensor, weight: Tensor, config: SplitKConfig, *, impl: Impl = "auto") -> Tensor:
    """`x W^T` in parts: part p sums over elements `[p * part_depth, (p + 1) * part_depth)` of the rows of both.

    Args:
        x: `[M, K]`, float16 or bfloat16. Rows that are not contiguous are copied first.
        weight: `[N, K]` in x's dtype, contiguous; N a multiple of 64, K one of `config.depth`.
        config: of `split_k_config`.

    Returns:
        float32 `[P, M, N]`, P = K / part_depth rounded up: what adds up to `x W^T` over the first dimension.

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
        _split_k_kernel[(num_columns // COLUMNS, num_parts, cdiv(num_rows, config.rows))](
            rows,
            weight,
            out,
            num_rows,
            rows.stride(0),
            num_columns,
            depth,
            config.part_depth,
            ROWS=config.rows,
            COLUMNS=COLUMNS,
            DEPTH=config.depth,
            STAGES=config.stages,
            num_warps=NUM_WARPS,
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
    if num_columns % COLUMNS or depth % config.depth or config.part_depth % config.depth:
        raise ValueError(
            f"weight is {[*weight.shape]} and a part {config.part_depth} deep: there must be a multiple of "
            f"{COLUMNS} rows, and both depths must be multiples of {config.depth}"
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
):
    """A tile of one part a program. The weight's tile is the first operand: it always has 64 rows."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[:, None].to(tl.int64)
    part = tl.program_id(1)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    is_row = row < num_rows
    first = part * part_depth
    inner = first + tl.arange(0, DEPTH)[None, :]
    weights = weight_ptr + column * depth + inner
    xs = x_ptr + row * x_stride + inner
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in tl.range(0, tl.minimum(part_depth, depth - first), DEPTH, num_stages=STAGES):
        weight = tl.load(weights + start)
        x = tl.load(xs + start, mask=is_row, other=0.0)
        total = tl.dot(weight, tl.trans(x), total)
    out = out_ptr + (part.to(tl.int64) * num_rows + row) * num_columns + tl.trans(column)
    tl.store(out, tl.trans(total), mask=is_row)
