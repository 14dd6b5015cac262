"""The activation of GPT-2's feed-forward layers: GELU (Hendrycks and Gimpel, 2016) by tanh.

No model here uses it yet.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu

from triton_ops.activations.elementwise import launch_each, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton


def gelu_new(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`, in x's shape and dtype.

    It is computed in float32 and rounded once.
    """
    if runs_triton(impl, x.device):
        return launch_each(_gelu_new_kernel, x)
    return gelu(x, approximate="tanh")


@triton.jit
def _gelu_new_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), which neither cancels nor overflows.
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    tl.store(out_ptr + row * SIZE + col, (wide / (1.0 + tl.exp(-2.0 * inner))).to(x.dtype), mask=mask)
