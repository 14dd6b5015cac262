"""Attention that can be differentiated, over contiguous keys and values, for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from triton_ops.attention.training_kernels import dkv_kernel, dq_kernel, forward_kernel
from triton_ops.implementation import Impl, cdiv, gpu_of, next_power_of_2, runs_triton
from triton_ops.tuning import AttentionConfig, training_config

MAX_HEAD_DIM = 128


def attention_with_grad(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, impl: Impl = "auto"
) -> Tensor:
    """Softmax attention with gradients for q, k and v: see `training_reference`.

    Args:
        q: `[batch, num_heads, len_q, head_dim]`, any strides.
        k, v: `[batch, num_kv_heads, len_k, head_dim]` in q's dtype; consecutive heads of q share a KV head.
        scale: factor on the scores.
        causal: query i sees the keys up to `i + len_k - len_q`, so that the last query sees all; a query that sees
            none has a result of 0. Else all queries see all keys.

    Returns:
        `[batch, num_heads, len_q, head_dim]` in q's dtype, with its dimensions in memory in the order of q's.

    Raises ValueError where the tensors do not fit one another, have no element, or are nothing for the kernels:
    float16, bfloat16 or float32 with heads of at most 128.

    The kernels are FlashAttention-2 (Dao, 2023): the forward pass keeps the log-sum-exps, from which the backward
    pass computes the probabilities again. Nothing is added atomically: the same inputs have the same gradients, to
    the bit. They have no second derivatives.
    """
    _check(q, k, v)
    if runs_triton(impl, q.device):
        if q.shape[3] > MAX_HEAD_DIM or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(
                f"the kernels take float16, bfloat16 and float32 and head_dim up to {MAX_HEAD_DIM}, but q is "
                f"{[*q.shape]} {q.dtype}"
            )
        result: Tensor = _Attention.apply(q, k, v, scale, causal)  # type: ignore[no-untyped-call]
        return result
    return _in_torch(q, k, v, scale, causal)


def _in_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    # Not all of torch's kernels give 0 where a query sees nothing.
    blind = max(0, q.shape[2] - k.shape[2]) if causal else 0
    q, gqa = q[:, :, blind:], q.shape[1] != k.shape[1]
    mask = _visible(q, k) if causal and q.shape[2] != k.shape[2] else None
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=gqa
    )
    return pad(out, (0, 0, blind, 0)) if blind else out


def training_reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """What it means, in float64, for autograd."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ keys.transpose(2, 3) * scale
    if not causal:
        return scores.softmax(-1) @ values
    visible = _visible(q, k)
    # Finite even where a query sees nothing: a softmax of -inf alone would be NaN.
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~visible, 0.0) @ values


def _visible(q: Tensor, k: Tensor) -> Tensor:
    """Which keys the queries see causally: bool `[len_q, len_k]`."""
    len_q, len_k = q.shape[2], k.shape[2]
    return torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril(len_k - len_q)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    same = q.dim() == k.dim() == 4 and k.shape == v.shape and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not (same and q.dtype == k.dtype == v.dtype and q.numel() and k.numel() and q.shape[1] % k.shape[1] == 0):
        raise ValueError(
            "attention takes q [batch, num_heads, len_q, head_dim] and k, v [batch, num_kv_heads, len_k, "
            "head_dim] of one dtype, num_heads a multiple of num_kv_heads, none of them empty, but they are "
            + ", ".join(f"{[*x.shape]} {x.dtype}" for x in (q, k, v))
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        """By the kernel; keeps the log-sum-exps."""
        q, k, v = (_with_contiguous_heads(x) for x in (q, k, v))
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        config = training_config(gpu_of(q.device), q.shape[3], q.dtype, kind="forward")
        tensors = {"q": q, "k": k, "v": v, "out": out}
        _launch(forward_kernel, tensors, config, scale, causal, tile=config.block_m, over="q", lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """First for q, which leaves the sums of d_out * out behind, then for k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        d_out = _with_contiguous_heads(d_out)
        dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
        gpu, rest = gpu_of(q.device), {"lse": lse, "delta": delta}
        config = training_config(gpu, q.shape[3], q.dtype, kind="dq")
        tensors = {"q": q, "k": k, "v": v, "out": out, "d_out": d_out, "dq": dq}
        _launch(dq_kernel, tensors, config, ctx.scale, ctx.causal, tile=config.block_m, over="q", **rest)
        config = training_config(gpu, q.shape[3], q.dtype, kind="dkv")
        tensors = {"q": q, "k": k, "v": v, "d_out": d_out, "dk": dk, "dv": dv}
        _launch(dkv_kernel, tensors, config, ctx.scale, ctx.causal, tile=config.block_n, over="k", **rest)
        return dq, dk, dv, None, None


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _launch(
    kernel: Any,
    tensors: dict[str, Tensor],
    config: AttentionConfig,
    scale: float,
    causal: bool,
    *,
    tile: int,
    over: str,
    **rows: Tensor,
) -> None:
    """A program for every `tile` rows of each head of the tensor `over`; `rows` have a number for each query."""
    q, k = tensors["q"], tensors["k"]
    batch, num_heads, length, _ = tensors[over].shape
    kernel[(batch * num_heads * cdiv(length, tile),)](
        **tensors,
        **rows,
        **{f"{name}_strides": tensor.stride()[:3] for name, tensor in tensors.items()},
        scale=scale,
        len_q=q.shape[2],
        len_k=k.shape[2],
        NUM_HEADS=q.shape[1],
        GROUP=q.shape[1] // k.shape[1],
        HEAD_DIM=q.shape[3],
        BLOCK_D=max(16, next_power_of_2(q.shape[3])),
        BLOCK_M=config.block_m,
        CAUSAL=causal,
        **config.launch_arguments(),
    )
