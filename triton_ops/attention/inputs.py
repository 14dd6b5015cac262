"""What the attention kernels ask of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.attention.plan import SharingPlan
from triton_ops.kv.e4m3 import E4M3, check_scales

MAX_HEAD_DIM = 256


def check_attention_inputs(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Raise ValueError where a kernel would read or write something else than its arguments mean."""
    num_heads, head_dim = q.shape[1:]
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"the kernel takes head_dim up to {MAX_HEAD_DIM}, but it is {head_dim}")
    contiguous = q.stride(2) == k_buffer.stride(2) == req_to_token.stride(1) == 1
    if k_buffer.stride() != v_buffer.stride() or not contiguous:
        raise ValueError(
            "the kernel takes contiguous heads and lines of req_to_token, and buffers of the same strides, but "
            f"they are {[*q.stride()]} of q, {[*k_buffer.stride()]} and {[*v_buffer.stride()]} of the buffers, "
            f"{[*req_to_token.stride()]} of req_to_token"
        )
    check_scales(k_scale, v_scale, k_buffer.shape[1])
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {[*q.shape]}")
    if k_buffer.dtype == E4M3 and (q.dtype == torch.bfloat16 or head_dim % 2):
        raise ValueError(f"over e4m3 the kernel takes even heads and no bfloat16, but q is {[*q.shape]} {q.dtype}")
    for name, values, shape in (
        ("lse", lse, q.shape[:2]),
        ("sinks", sinks, (num_heads,)),
        ("alibi_slopes", alibi_slopes, (num_heads,)),
    ):
        if values is not None and (
            values.shape != shape or values.dtype != torch.float32 or not values.is_contiguous()
        ):
            raise ValueError(f"{name} must be contiguous float32 {[*shape]}")


def check_window(sliding_window: int | None, plan: SharingPlan | None) -> None:
    """Raise ValueError with a window and shared items."""
    if sliding_window is not None and plan is not None and plan.shared_lens.shape[0]:
        raise ValueError(
            f"sliding_window is {sliding_window}, but the plan has {plan.shared_lens.shape[0]} shared items, "
            "which all their rows read whole: make a flat plan"
        )
