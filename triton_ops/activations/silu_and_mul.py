"""The gated activation of SwiGLU feed-forward layers (Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from triton_ops.activations.elementwise import as_rows, launch_gated, row_and_columns
from triton_ops.activations.quantised_rows import BLOCK, QuantisedRows, e4m3_scale, finite_sizes
from triton_ops.e4m3 import to_e4m3
from triton_ops.implementation import Impl, cdiv, next_power_of_2, runs_triton, tl, triton
from triton_ops.tuning import E4M3_GROUPS, E4M3_ROW


def silu_and_mul(x: Tensor, *, deterministic: bool = False, impl: Impl = "auto") -> Tensor:
    """`silu(gate) * up` of `x [..., 2 * size]` = gate | up: `[..., size]` in x's dtype.

    `deterministic`: the bits of an element do not depend on its place. They do in torch's silu on a CPU, which
    computes the last elements of each thread's share in another way than the others; the kernel has no such rest.
    """
    if runs_triton(impl, x.device):
        return launch_gated(_silu_and_mul_kernel, x)
    gate, up = x.chunk(2, dim=-1)
    return (_silu_alike(gate) if deterministic else silu(gate)) * up


def quantised_silu_and_mul(x: Tensor, *, groups: bool, impl: Impl = "auto") -> QuantisedRows:
    """`silu_and_mul` of `x [num_tokens, 2 * size]` as `quantise_rows` quantises it, but in the kernel that makes
    it.
    """
    if not runs_triton(impl, x.device):
        return QuantisedRows.of(silu_and_mul(x, impl="torch"), groups=groups, impl="torch")
    rows, (num_rows, size) = as_rows(x), (len(x), x.shape[-1] // 2)
    out = QuantisedRows.empty(num_rows, size, x, groups=groups)
    if num_rows:
        kernel, most = (_quantised_groups_kernel, E4M3_GROUPS) if groups else (_quantised_rows_kernel, E4M3_ROW)
        block = min(most.size, max(BLOCK, next_power_of_2(size)))
        kernel[(num_rows * (cdiv(size, block) if groups else 1),)](
            rows,
            out.codes,
            out.scale,
            rows.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, most.num_warps * block // most.size),
        )
    return out


def _silu_alike(gate: Tensor) -> Tensor:
    """`silu(gate)`, of steps that torch computes alike at all places."""
    wide = gate.float()
    return (wide / (-wide).exp_().add_(1.0)).to(gate.dtype)


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row, col = row_and_columns(SIZE, BLOCK, EARLY)
    mask = col < SIZE
    gate = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + col, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + col, silu_times(gate, up), mask=mask)


@triton.jit
def silu_times(gate, up):
    """`silu(gate) * up` in their dtype."""
    wide = gate.to(tl.float32)
    # Rounded before it multiplies, as in torch.
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def _activated(x_ptr, column, SIZE: tl.constexpr):
    """Of a row, at some columns; 0 beyond the last."""
    gate = tl.load(x_ptr + column, mask=column < SIZE, other=0.0)
    return silu_times(gate, tl.load(x_ptr + SIZE + column, mask=column < SIZE, other=0.0))


@triton.jit
def _quantised_rows_kernel(x_ptr, codes_ptr, scale_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program is a row. What does not fit its registers is computed twice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    activated = _activated(x_ptr + row * x_stride, column, SIZE)
    largest = finite_sizes(activated)
    for start in range(BLOCK, SIZE, BLOCK):
        largest = tl.maximum(largest, finite_sizes(_activated(x_ptr + row * x_stride, start + column, SIZE)))
    scale = e4m3_scale(tl.max(largest, axis=0))
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * SIZE + column, to_e4m3(activated, scale), mask=column < SIZE)
    for start in range(BLOCK, SIZE, BLOCK):
        rest = _activated(x_ptr + row * x_stride, start + column, SIZE)
        tl.store(codes_ptr + row * SIZE + start + column, to_e4m3(rest, scale), mask=start + column < SIZE)


@triton.jit
def _quantised_groups_kernel(x_ptr, codes_ptr, scale_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program is some groups of a row."""
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    num_groups: tl.constexpr = (SIZE + 127) // 128
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    group = tl.program_id(0) % num_blocks * (BLOCK // 128) + tl.arange(0, BLOCK // 128)[:, None]
    column = group * 128 + tl.arange(0, 128)[None, :]
    activated = _activated(x_ptr + row * x_stride, column, SIZE)
    scale = e4m3_scale(tl.max(finite_sizes(activated), axis=1, keep_dims=True))
    tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)
    tl.store(codes_ptr + row * SIZE + column, to_e4m3(activated, scale), mask=column < SIZE)
