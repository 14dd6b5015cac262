"""The gate and up projections of a SwiGLU feed-forward layer (Shazeer, 2020) with its activation, in one kernel:
what two would write and read between them is twice as large as the result.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import Impl, runs_triton
from triton_ops.linear.tiles import check_tiles, launch_tiles
from triton_ops.tuning import TileConfig


def gated_linear(x: Tensor, weight: Tensor, config: TileConfig, *, impl: Impl = "auto") -> Tensor:
    """`silu_and_mul(x W^T)`, rounded where that rounds: `[..., N]` in x's dtype.

    Args:
        x: `[..., K]`, float16 or bfloat16; K a multiple of 8. Rows that are not contiguous, or do not begin at
            multiples of 16 bytes, are copied first.
        weight: gate | up, `[2 N, K]` in x's dtype, contiguous; N a multiple of 8.
        config: from `gated_linear_config`.

    Raises ValueError where shapes or dtypes disagree.
    """
    check_tiles(x, weight, parts=2)
    if runs_triton(impl, x.device):
        return launch_tiles(x, weight, config, parts=2)
    return silu_and_mul(linear(x, weight), impl="torch")
