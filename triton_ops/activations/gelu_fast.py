"""The activation `gelu_fast`: GELU (Hendrycks and Gimpel, 2016) by tanh, with sqrt(2 / pi) to ten digits.

No model here uses it yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import launch_each, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton


def gelu_fast(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`x / 2 * (1 + tanh(0.7978845608 * x * (1 + 0.044715 * x^2)))`, in x's shape and dtype.

    It is computed in float32 and rounded once.
    """
    if runs_triton(impl, x.device):
        return launch_each(_gelu_fast_kernel, x)
    wide = x.float()
    return (0.5 * wide * (1.0 + torch.tanh(0.7978845608 * wide * (1.0 + 0.044715 * wide * wide)))).to(x.dtype)


@triton.jit
def _gelu_fast_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), which neither cancels nor overflows.
    inner = 0.7978845608 * wide * (1.0 + 0.044715 * wide * wide)
    tl.store(out_ptr + row * SIZE + col, (wide / (1.0 + tl.exp(-2.0 * inner))).to(x.dtype), mask=mask)
