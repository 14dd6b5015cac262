"""The square of a ReLU (So et al., Primer, 2021), of feed-forward layers without gates."""

from __future__ import annotations

from torch import Tensor

from triton_ops.activations.elementwise import launch_each, row_and_columns
from triton_ops.implementation import Impl, runs_triton, tl, triton


def squared_relu(x: Tensor, *, deterministic: bool = False, impl: Impl = "auto") -> Tensor:
    """`max(x, 0)^2`, in x's shape and dtype. It is rounded once, so that `deterministic` changes nothing."""
    if runs_triton(impl, x.device):
        return launch_each(_squared_relu_kernel, x)
    return x.relu().square_()


@triton.jit
def _squared_relu_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + col, tl.where(x < 0.0, 0.0, x * x), mask=mask)  # NaN is not below 0
