"""Matrix products in Triton's interpreter as Hopper's tensor cores add them: in groups of 16 along the sum, one
after the other, each a sum of its own with what was added before (MMA-Sim, arXiv 2511.10909).

numpy's products, which the interpreter has otherwise, add in an order that depends on the shapes. These do not, so
whether a kernel's results depend on tiles and cuts shows here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

GROUP = 16


def _numbers(handle: Any) -> Any:
    """As float64; the interpreter keeps bfloat16 as the upper halves of float32."""
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right, total = _numbers(a), _numbers(b), d.data.astype(np.float32)
    for start in range(0, left.shape[1], GROUP):
        exact = total.astype(np.float64)
        for k in range(start, start + GROUP):
            exact += left[:, k, None] * right[None, k, :]
        total = exact.astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Within it, interpreted kernels multiply so."""
    builder = interpreter.InterpreterBuilder
    before = builder.create_dot
    builder.create_dot = _dot
    try:
        yield
    finally:
        builder.create_dot = before
