"""What the attention operations share: scoring, checks, and the arguments that every kernel takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triton_ops.attention.merge import Partials
from triton_ops.attention.plan import SharingPlan
from triton_ops.e4m3 import E4M3, check_scales
from triton_ops.implementation import next_power_of_2
from triton_ops.kv.view import KVView
from triton_ops.tuning import AttentionConfig

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Scoring:
    """How attention scores keys: softmax over `scale * q k^T`, with these changes.

    Attributes:
        scale: factor on the scores, positive.
        softcap: the scaled scores become `softcap * tanh(score / softcap)`; None: no cap.
        window: a token at position p sees the positions from `p - window + 1` to p; None: all from 0, which is
            required where a plan has shared items.
        sinks: float32 `[num_heads]`: a logit without a value that joins the softmax of each row of the head
            (Xiao et al., 2023, as learned by gpt-oss, 2025); None: none.
        alibi_slopes: float32 `[num_heads]`: `slope * (key position - own position)` is added to the scores, after
            the softcap (Press et al., 2022); None: nothing. No model here uses it yet.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


def check_window(scoring: Scoring, plan: SharingPlan | None) -> None:
    """Raise ValueError for a window and a plan with shared items, which all their rows read whole."""
    if scoring.window is not None and plan is not None and plan.shared_lens.shape[0]:
        raise ValueError(
            f"the window is {scoring.window}, but the plan has {plan.shared_lens.shape[0]} shared items, "
            "which all their rows read whole: make a flat plan"
        )


def check_arguments(q: Tensor, kv: KVView, scoring: Scoring, out: Tensor, lse: Tensor | None) -> None:
    """Raise ValueError where a kernel would read or write something else than its arguments mean."""
    num_heads, head_dim = q.shape[1:]
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"the kernel takes head_dim up to {MAX_HEAD_DIM}, but it is {head_dim}")
    contiguous = q.stride(2) == kv.k.stride(2) == kv.req_to_token.stride(1) == 1
    if kv.k.stride() != kv.v.stride() or not contiguous:
        raise ValueError(
            "the kernel takes contiguous heads and rows of req_to_token, and keys and values of the same strides, "
            f"but they are {[*q.stride()]} of q, {[*kv.k.stride()]} and {[*kv.v.stride()]} of keys and values, "
            f"{[*kv.req_to_token.stride()]} of req_to_token"
        )
    check_scales(kv.k_scale, kv.v_scale, kv.k.shape[1])
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {[*q.shape]}")
    if kv.k.dtype == E4M3 and (q.dtype == torch.bfloat16 or head_dim % 2):
        raise ValueError(f"over e4m3 the kernel takes even heads and no bfloat16, but q is {[*q.shape]} {q.dtype}")
    for name, values, shape in (
        ("lse", lse, q.shape[:2]),
        ("sinks", scoring.sinks, (num_heads,)),
        ("alibi_slopes", scoring.alibi_slopes, (num_heads,)),
    ):
        if values is not None and (
            values.shape != shape or values.dtype != torch.float32 or not values.is_contiguous()
        ):
            raise ValueError(f"{name} must be contiguous float32 {[*shape]}")


def kernel_arguments(
    q: Tensor, kv: KVView, scoring: Scoring, partials: Partials, config: AttentionConfig
) -> dict[str, Any]:
    """The keyword arguments that all attention kernels have."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.k.shape[1]
    capped = scoring.softcap is not None
    return {
        "q": q,
        "k_buffer": kv.k,
        "v_buffer": kv.v,
        "req_to_token": kv.req_to_token,
        "k_scale": kv.k_scale,
        "v_scale": kv.v_scale,
        "alibi_slopes": scoring.alibi_slopes,
        "partial_out": partials.out,
        "partial_lse": partials.lse,
        "scale": scoring.scale if capped else scoring.scale * math.log2(math.e),
        "softcap": scoring.softcap if capped else 1.0,
        "q_row_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "slot_stride": kv.k.stride(0),
        "slot_head_stride": kv.k.stride(1),
        "table_stride": kv.req_to_token.stride(0),
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "HAS_SOFTCAP": capped,
        "HAS_ALIBI": scoring.alibi_slopes is not None,
        **config.launch_arguments(),
    }


def result_arguments(scoring: Scoring, out: Tensor, lse: Tensor | None) -> dict[str, Any]:
    """The keyword arguments of kernels that write final results: `window` and `sinks` matter to them alone."""
    return {
        "sinks": scoring.sinks,
        "out": out,
        "lse": lse,
        "window": 0 if scoring.window is None else scoring.window,
        "HAS_WINDOW": scoring.window is not None,
        "HAS_SINKS": scoring.sinks is not None,
        "HAS_LSE": lse is not None,
    }
