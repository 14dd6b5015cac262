"""Root mean square norm whose result, or whose input, is gated, of heads."""

from __future__ import annotations

import torch
from torch import Tensor

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
from triton_ops.norms.rms_norm import rms_norm, row_scale, weighted
from triton_ops.tuning import row_blocks


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gate_first: bool = False,
    mean: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`rms_norm(x, weight) * silu(gate)` of heads, over the last dimension: `[T, H, D]` in x's dtype, contiguous.
    With `gate_first` it is `rms_norm(x * silu(gate), weight)`. Then the `mean` of squares may be given, float32
    `[T, H]`: of heads of which x has a part.

    `x` and `gate` are `[T, H, D]` in any float dtype, elements of a head side by side, `weight` is `[D]` in the
    same, or `[H * D]`. The order is that of transformers: normed in float32, rounded, multiplied by the weight and
    rounded, multiplied by `silu(gate)` in float32, rounded; or multiplied by `silu(gate)` in float32 first.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, gate)
    _check_weight(x, weight)
    if mean is not None and not (gate_first and mean.shape == x.shape[:2] and mean.dtype == torch.float32):
        raise ValueError(
            f"mean must be {[*x.shape[:2]]} in torch.float32, with gate_first, but is {[*mean.shape]} in "
            f"{mean.dtype}"
        )
    if runs_triton(impl, x.device):
        return _launch(x, gate, weight, eps, gate_first, mean)
    factors = weight.view(-1, x.shape[2])
    if not gate_first:
        return (rms_norm(x, factors, eps, impl="torch").float() * _silu(gate)).to(x.dtype).contiguous()
    gated = x.float() * _silu(gate)
    means = gated.square().mean(-1, keepdim=True) if mean is None else mean.unsqueeze(-1)
    return factors * (gated * torch.rsqrt(means + eps)).to(x.dtype)


def gated_squares(x: Tensor, gate: Tensor, size: int, *, impl: Impl = "auto") -> Tensor:
    """The squares of `x * silu(gate)` of each head, added and divided by `size`: float32 `[T, H]`. Where x has a
    part of heads of so many elements, it is what that adds to the mean that `gated_rms_norm` takes.

    `x` and `gate` are as there. Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, gate)
    if runs_triton(impl, x.device):
        return _launch_squares(x, gate, size)
    return (x.float() * _silu(gate)).square().sum(-1) / size


def _silu(gate: Tensor) -> Tensor:
    wide = gate.float()
    return wide / (-wide).exp().add_(1.0)


def _check(x: Tensor, gate: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must be [T, H, D], but is {[*x.shape]}")
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(f"gate must be {[*x.shape]} in {x.dtype}, but is {[*gate.shape]} in {gate.dtype}")
    for name, heads in (("x", x), ("gate", gate)):
        if heads.numel() and heads.stride(2) != 1:
            raise ValueError(
                f"elements of {name}'s heads must lie side by side, but have a stride of {heads.stride(2)}"
            )


def _check_weight(x: Tensor, weight: Tensor) -> None:
    sizes = x.shape[2], x.shape[1] * x.shape[2]
    if weight.dim() != 1 or len(weight) not in sizes or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous [{sizes[0]}] or [{sizes[1]}] in {x.dtype}, but is {[*weight.shape]} in "
            f"{weight.dtype}"
        )


# --- the kernels ---


def _launch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool, mean: Tensor | None) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_tokens, num_heads, size = x.shape
    if out.numel() == 0:
        return out
    block, block_rows, num_warps = row_blocks(size, x.dtype)
    _gated_rms_norm_kernel[(cdiv(num_tokens * num_heads, block_rows),)](
        x,
        gate,
        weight,
        mean,
        out,
        num_tokens * num_heads,
        num_heads,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        *((0, 0) if mean is None else mean.stride()),
        eps,
        SIZE=size,
        OWN_WEIGHTS=len(weight) != size,
        GATE_FIRST=gate_first,
        BLOCK=block,
        ROWS=block_rows,
        num_warps=num_warps,
        **overlapped(x.device, num_tokens),
    )
    return out


def _launch_squares(x: Tensor, gate: Tensor, size: int) -> Tensor:
    num_tokens, num_heads, own_size = x.shape
    out = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    block, block_rows, num_warps = row_blocks(own_size, x.dtype)
    _gated_squares_kernel[(cdiv(num_tokens * num_heads, block_rows),)](
        x,
        gate,
        out,
        num_tokens * num_heads,
        num_heads,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        1.0 / size,
        SIZE=own_size,
        BLOCK=block,
        ROWS=block_rows,
        num_warps=num_warps,
        **overlapped(x.device, num_tokens),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x, gate, weight, mean, out, num_rows, num_heads, x_stride, x_head_stride, gate_stride, gate_head_stride,
    mean_stride, mean_head_stride, eps, SIZE: tl.constexpr, OWN_WEIGHTS: tl.constexpr, GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token. With `OWN_WEIGHTS` each head of a token has its own."""
    if EARLY:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (col < SIZE)
    token, head = row // num_heads, row % num_heads
    first = head * SIZE if OWN_WEIGHTS else tl.zeros_like(row)
    factors = tl.load(weight + first + col, mask=mask, other=0.0)
    if EARLY:
        gdc_wait()
    heads = tl.load(x + token * x_stride + head * x_head_stride + col, mask=mask, other=0.0)
    gates = _silu_of(tl.load(gate + token * gate_stride + head * gate_head_stride + col, mask=mask, other=0.0))
    if GATE_FIRST:
        gated = heads.to(tl.float32) * gates
        if mean is None:
            scale = row_scale(gated, eps, SIZE)
        else:
            at = mean + token * mean_stride + head * mean_head_stride
            scale = tl.rsqrt(tl.load(at, mask=row < num_rows, other=1.0) + eps)
        result = weighted(gated * scale, factors, x.dtype.element_ty, None)
    else:
        normed = weighted(heads.to(tl.float32) * row_scale(heads, eps, SIZE), factors, x.dtype.element_ty, None)
        result = normed.to(tl.float32) * gates
    tl.store(out + row * SIZE + col, result, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_squares_kernel(
    x, gate, out, num_rows, num_heads, x_stride, x_head_stride, gate_stride, gate_head_stride, factor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As above; each row leaves a number."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (col < SIZE)
    token, head = row // num_heads, row % num_heads
    heads = tl.load(x + token * x_stride + head * x_head_stride + col, mask=mask, other=0.0)
    gates = _silu_of(tl.load(gate + token * gate_stride + head * gate_head_stride + col, mask=mask, other=0.0))
    gated = heads.to(tl.float32) * gates
    total = tl.sum(gated * gated, axis=1, keep_dims=True) * factor
    tl.store(out + row, total, mask=row < num_rows)


@triton.jit
def _silu_of(gates):
    gates = gates.to(tl.float32)
    return gates / (1.0 + tl.exp(-gates))
