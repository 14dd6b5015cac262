"""Root mean square norm (Zhang and Sennrich, 2019), alone or after the addition of a residual."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows, check_parts, check_residual, check_vector
from triton_ops.activations.quantised_rows import BLOCK as GROUP
from triton_ops.activations.quantised_rows import QuantisedRows, e4m3_scale, finite_sizes
from triton_ops.e4m3 import to_e4m3
from triton_ops.implementation import (
    Impl,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    overlapped,
    runs_triton,
    tl,
    triton,
)
from triton_ops.tuning import EARLY_BLOCK, row_blocks


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float | None = None, impl: Impl = "auto") -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    `x` is `[..., size]` in any float dtype, `weight` `[size]` in the same. The result is normalised in float32,
    rounded to x's dtype, then multiplied by the weight: the order of transformers, with which models were trained.
    With an `offset`, it is multiplied by `offset + weight` in float32, before it is rounded: `offset` is 0 in
    OLMo 2 and 1 in Gemma, whose weights are centred on 0.
    """
    if runs_triton(impl, x.device):
        return _tensors(_launch(x, None, weight, eps, offset))[0]
    return normed_by(x.float().square().mean(-1, keepdim=True), x, weight, eps, offset=offset)


def normed_by(mean: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float | None = None) -> Tensor:
    """`rms_norm` where the `mean` of squares is known: float32 `[..., 1]`."""
    normed = x.float() * torch.rsqrt(mean + eps)
    if offset is None:
        return weight * normed.to(x.dtype)
    return (normed * (offset + weight.float())).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float | None = None,
    before: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)` and the sum, which is the next residual; both `[..., size]` in residual's dtype.

    `x` is `[..., size]` in that dtype or, without an `offset`, from `split_k_linear`, its parts float32
    `[P, ..., size]`: they are added in their order and rounded to that dtype. With a weight `before`, the sum is
    `rms_norm(x, before) + residual`, as between Gemma's attention and feed-forward.
    """
    in_parts = offset is None and x.dim() > residual.dim()
    if runs_triton(impl, x.device):
        return _tensors(_launch(x, residual, weight, eps, offset, before=before, in_parts=in_parts))
    if in_parts:
        x = reduce(torch.add, x).to(residual.dtype)
    if before is not None:
        x = rms_norm(x, before, eps, offset=offset, impl="torch")
    residual = x + residual
    return rms_norm(residual, weight, eps, offset=offset, impl="torch"), residual


def quantised_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    groups: bool,
    offset: float | None = None,
    impl: Impl = "auto",
) -> tuple[QuantisedRows, Tensor]:
    """`add_rms_norm`, or without a residual `rms_norm` and x, of `[num_tokens, size]`: the norm as `quantise_rows`
    quantises it, but in the kernel that makes it: to the bit, but for the order of the norm's sum.
    """
    if runs_triton(impl, x.device) and not (groups and x.shape[-1] < GROUP):
        in_parts = residual is not None and offset is None and x.dim() > residual.dim()
        normed, total = _launch(x, residual, weight, eps, offset, in_parts=in_parts, groups=groups)
        assert isinstance(normed, QuantisedRows)
        return normed, total
    if residual is None:
        whole, total = rms_norm(x, weight, eps, offset=offset, impl=impl), x
    else:
        whole, total = add_rms_norm(x, residual, weight, eps, offset=offset, impl=impl)
    return QuantisedRows.of(whole, groups=groups, impl=impl), total


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float | None = None, impl: Impl = "auto"
) -> Tensor:
    """`rms_norm(x) + residual`, as after OLMo 2's attention and feed-forward."""
    if runs_triton(impl, x.device):
        return _launch(x, residual, None, eps, offset, before=weight)[1]
    return rms_norm(x, weight, eps, offset=offset, impl="torch") + residual


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float | None,
    *,
    before: Tensor | None = None,
    in_parts: bool = False,
    groups: bool | None = None,
) -> tuple[Tensor | QuantisedRows, Tensor]:
    """The kernel's norm of `x`, or of `x + residual`, and that sum (x itself without a residual).

    With a weight `before`, x is normed by it before it is added. Without `weight` both results are the sum. With
    `in_parts`, x is the parts of `add_rms_norm`. With `groups` the norm is quantised as `quantise_rows` does it.
    Rows that do not lie a common stride apart are copied first.
    Raises ValueError where shapes or dtypes disagree.
    """
    size, rows, like, parts = x.shape[-1], as_rows(x), x, 0
    if in_parts:
        assert residual is not None
        check_parts(x, residual)
        like, parts = residual, len(x)
    for name, vector in (("weight", weight), ("before", before)):
        if vector is not None:
            check_vector(name, vector, like)
    num_rows = like.numel() // size
    normed: Tensor | QuantisedRows | None = None
    others = total = None
    if groups is not None:
        normed = QuantisedRows.empty(num_rows, size, like, groups=groups)
    elif weight is not None:
        normed = torch.empty_like(like, memory_format=torch.contiguous_format)
    if residual is not None:
        check_residual(residual, like)
        others, total = as_rows(residual), torch.empty_like(like, memory_format=torch.contiguous_format)
    if num_rows:
        block, block_rows, num_warps = row_blocks(size, like.dtype, parts)
        _rms_norm_kernel[(cdiv(num_rows, block_rows),)](
            rows,
            others,
            before,
            weight,
            normed.codes if isinstance(normed, QuantisedRows) else normed,
            normed.scale if isinstance(normed, QuantisedRows) else None,
            total,
            num_rows,
            rows.stride(0),
            0 if others is None else others.stride(0),
            eps,
            PARTS=parts,
            OFFSET=offset,
            GROUPS=bool(groups),
            SIZE=size,
            BLOCK=block,
            ROWS=block_rows,
            num_warps=num_warps,
            **overlapped(x.device, num_rows),
        )
    total = x if total is None else total
    return total if normed is None else normed, total


def _tensors(results: tuple[Tensor | QuantisedRows, Tensor]) -> tuple[Tensor, Tensor]:
    normed, total = results
    assert isinstance(normed, Tensor)
    return normed, total


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    before_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    sum_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    first_row = tl.program_id(0) * ROWS
    row = (first_row + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (col < SIZE)
    # A pointer for each row: weights are loaded in the rows' layout, and nothing moves between threads.
    same = tl.zeros_like(row) + col
    early: tl.constexpr = BLOCK <= EARLY_BLOCK
    if early and weight_ptr is not None:
        weight = tl.load(weight_ptr + same, mask=mask, other=0.0)
    if EARLY:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + (row + part * num_rows) * x_stride + col, mask=mask, other=0.0)
        x = x.to(residual_ptr.dtype.element_ty)  # as an uncut product
    dtype = x.dtype
    if early and residual_ptr is not None:
        other = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0)
    if before_ptr is not None:
        if early:
            before = tl.load(before_ptr + same, mask=mask, other=0.0)
        scale = row_scale(x, eps, SIZE)
        if not early:
            before = tl.load(before_ptr + same, mask=mask, other=0.0)
        x = weighted(x.to(tl.float32) * scale, before, dtype, OFFSET)
    if residual_ptr is not None:
        if not early:
            other = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0)
        # Rounded before it is normed, as the next layer adds to this sum.
        x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * SIZE + col, x, mask=mask)
    if weight_ptr is not None:
        scale = row_scale(x, eps, SIZE)
        if not early:
            weight = tl.load(weight_ptr + same, mask=mask, other=0.0)
        normed = weighted(x.to(tl.float32) * scale, weight, dtype, OFFSET)
        store_norm(normed, out_ptr, scale_ptr, first_row, num_rows, GROUPS, SIZE, BLOCK, ROWS)


@triton.jit
def store_norm(
    normed,
    out_ptr,
    scale_ptr,
    first_row,
    num_rows,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows `[ROWS, BLOCK]` from `first_row` on, with a place for scales as `quantise_rows` quantises them."""
    row = (first_row + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (col < SIZE)
    if scale_ptr is None:
        tl.store(out_ptr + row * SIZE + col, normed, mask=mask)
    elif GROUPS:
        grouped = tl.reshape(normed, (ROWS, BLOCK // 128, 128))
        scales = e4m3_scale(tl.max(finite_sizes(grouped), axis=2, keep_dims=True))
        nth_row = (first_row + tl.arange(0, ROWS))[:, None, None].to(tl.int64)
        group = tl.arange(0, BLOCK // 128)[None, :, None]
        column = group * 128 + tl.arange(0, 128)[None, None, :]
        num_groups: tl.constexpr = (SIZE + 127) // 128
        is_row = nth_row < num_rows
        tl.store(scale_ptr + nth_row * num_groups + group, scales, mask=is_row & (group < num_groups))
        tl.store(out_ptr + nth_row * SIZE + column, to_e4m3(grouped, scales), mask=is_row & (column < SIZE))
    else:
        scales = e4m3_scale(tl.max(finite_sizes(normed), axis=1, keep_dims=True))
        tl.store(scale_ptr + row, scales, mask=row < num_rows)
        tl.store(out_ptr + row * SIZE + col, to_e4m3(normed, scales), mask=mask)


@triton.jit
def row_scale(x, eps, SIZE: tl.constexpr):
    """The factors that norm the rows."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE + eps)


@triton.jit
def weighted(normed, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """`normed` in float32 times the weight, rounded as in `rms_norm`."""
    weight = weight.to(tl.float32)
    return (normed.to(dtype).to(tl.float32) * weight if OFFSET is None else normed * (weight + OFFSET)).to(dtype)
