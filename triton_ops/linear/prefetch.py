"""Weights on their way to the L2 cache while the kernels before a product still run."""

from __future__ import annotations

from triton_ops.implementation import tl, triton

_LINE: tl.constexpr = 64 if tl is None else tl.constexpr(64)  # elements of 16 bits


@triton.jit
def prefetch(rows, depth, DEPTH: tl.constexpr):
    """Ask for the first `depth` elements of 16 bits at each of `rows` (pointers `[R, 1]`), `DEPTH` at a time, and
    do not wait for them.
    """
    LINES: tl.constexpr = (DEPTH + _LINE - 1) // _LINE
    line = tl.arange(0, LINES)[None, :] * _LINE
    for start in range(0, depth, DEPTH):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(rows + start + line).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
