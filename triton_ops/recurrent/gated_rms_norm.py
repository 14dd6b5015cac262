"""Root mean square norm whose result is gated, of heads."""

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
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, impl: Impl = "auto"
) -> Tensor:
    """`rms_norm(x, weight) * silu(gate)` of heads, over the last dimension: `[T, H, D]` in x's dtype, contiguous.
    With `gate_first` it is `rms_norm(x * silu(gate), weight)`.

    `x` and `gate` are `[T, H, D]` in any float dtype, elements of a head side by side, `weight` is `[D]` in the
    same, or `[H * D]`. The order is that of transformers: normed in float32, rounded, multiplied by the weight and
    rounded, multiplied by `silu(gate)` in float32, rounded; or multiplied by `silu(gate)` in float32 first.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, gate, weight)
    if runs_triton(impl, x.device):
        return _launch(x, gate, weight, eps, gate_first)
    factors, wide = weight.view(-1, x.shape[2]), gate.float()
    gates = wide / (-wide).exp().add_(1.0)
    if not gate_first:
        return (rms_norm(x, factors, eps, impl="torch").float() * gates).to(x.dtype).contiguous()
    gated = x.float() * gates
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return factors * normed.to(x.dtype)


def _check(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must be [T, H, D], but is {[*x.shape]}")
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(f"gate must be {[*x.shape]} in {x.dtype}, but is {[*gate.shape]} in {gate.dtype}")
    for name, heads in (("x", x), ("gate", gate)):
        if heads.numel() and heads.stride(2) != 1:
            raise ValueError(
                f"elements of {name}'s heads must lie side by side, but have a stride of {heads.stride(2)}"
            )
    sizes = x.shape[2], x.shape[1] * x.shape[2]
    if weight.dim() != 1 or len(weight) not in sizes or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous [{sizes[0]}] or [{sizes[1]}] in {x.dtype}, but is {[*weight.shape]} in "
            f"{weight.dtype}"
        )


# --- the kernel ---


def _launch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_tokens, num_heads, size = x.shape
    if out.numel() == 0:
        return out
    block, block_rows, num_warps = row_blocks(size, x.dtype)
    _gated_rms_norm_kernel[(cdiv(num_tokens * num_heads, block_rows),)](
        x,
        gate,
        weight,
        out,
        num_tokens * num_heads,
        num_heads,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
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


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x, gate, weight, out, num_rows, num_heads, x_stride, x_head_stride, gate_stride, gate_head_stride, eps,
    SIZE: tl.constexpr, OWN_WEIGHTS: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
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
    gates = tl.load(gate + token * gate_stride + head * gate_head_stride + col, mask=mask, other=0.0)
    gates = gates.to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    if GATE_FIRST:
        gated = heads.to(tl.float32) * gates
        result = weighted(gated * row_scale(gated, eps, SIZE), factors, x.dtype.element_ty, None)
    else:
        normed = weighted(heads.to(tl.float32) * row_scale(heads, eps, SIZE), factors, x.dtype.element_ty, None)
        result = normed.to(tl.float32) * gates
    tl.store(out + row * SIZE + col, result, mask=mask)
