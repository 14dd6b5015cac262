"""A linear projection of many rows, for shapes at which it is faster than cuBLAS."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from triton_ops.implementation import Impl, runs_triton
from triton_ops.linear.tiles import check_tiles, launch_tiles
from triton_ops.tuning import TileConfig


def large_linear(x: Tensor, weight: Tensor, config: TileConfig, *, impl: Impl = "auto") -> Tensor:
    """`x W^T`, summed in float32 and rounded once: `[..., N]` in x's dtype.

    Args:
        x: `[..., K]`, float16 or bfloat16; K a multiple of 8. Rows that are not contiguous, or do not begin at
            multiples of 16 bytes, are copied first.
        weight: `[N, K]` in x's dtype, contiguous; N a multiple of 8.
        config: from `large_linear_config`.

    Raises ValueError where shapes or dtypes disagree.
    """
    check_tiles(x, weight, parts=1)
    if runs_triton(impl, x.device):
        return launch_tiles(x, weight, config, parts=1)
    return linear(x, weight)
