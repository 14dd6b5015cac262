"""Kernels with known faults: what the compile test must find in one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.support.kernel_cases import KernelCase
from triton_ops.implementation import tl, triton


@triton.jit
def product(a, b, out, steps, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(steps):
        x = tl.load(a + (step * ROWS + rows)[:, None] * COLS + cols[None, :])
        y = tl.load(b + (step * COLS + cols)[:, None] * COLS + cols[None, :])
        total = tl.dot(x, y, total)
    tl.store(out + rows[:, None] * COLS + cols[None, :], total.to(out.dtype.element_ty))


@triton.jit
def sums(a, out, SIZE: tl.constexpr):
    cols = tl.arange(0, SIZE)
    x = tl.load(a + cols)
    tl.store(out + cols, tl.cumsum(x) + tl.sum(x) + x)


@triton.jit
def undefined(a):
    tl.store(a, tl.no_such_operation(1))


def probe_cases() -> Iterator[KernelCase]:
    """One kernel without a fault, at two sizes, and one kernel with each fault."""

    def case(op: object, name: str, *arguments: int, wgmma: bool = False, **keywords: int) -> KernelCase:
        call = partial(_launch, op, arguments, keywords)
        return KernelCase(op, name, call, wgmma=wgmma)  # type: ignore[arg-type]

    yield case(product, "64 rows", 3, 32, ROWS=64, COLS=64, wgmma=True)
    yield case(product, "64 rows again", 3, 48, ROWS=64, COLS=64, wgmma=True)
    yield case(product, "16 rows", 3, 32, ROWS=16, COLS=64, wgmma=True)
    yield case(product, "too many stages", 3, 32, ROWS=128, COLS=128, num_stages=6, num_warps=8)
    yield case(sums, "too few registers", 2, SIZE=8192, num_warps=1, maxnreg=32)
    yield case(undefined, "undefined", 1)


def _launch(op: object, arguments: tuple[int, ...], keywords: dict[str, int]) -> None:
    """The first argument is the number of pointers."""
    buffer = torch.empty(1024, 128, dtype=torch.bfloat16)
    op[lambda bound: (1,)](*[buffer] * arguments[0], *arguments[1:], **keywords)  # type: ignore[index]
