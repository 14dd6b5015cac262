"""Routing of tokens to experts: the largest probabilities of the softmax of the router's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, cdiv, next_power_of_2, runs_triton, tl, triton
from triton_ops.tuning import row_blocks


def topk_softmax(logits: Tensor, top_k: int, *, renormalize: bool, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """The `top_k` likeliest experts of each token, the likeliest first: weights float32 and experts int64, both
    `[num_tokens, top_k]`.

    `logits` is `[num_tokens, num_experts]` in any float dtype. Weights are the softmax over all experts, in
    float32; with `renormalize` they are divided by their sum.
    """
    if runs_triton(impl, logits.device):
        return launch_topk(_topk_softmax_kernel, logits, top_k, RENORMALIZE=renormalize)
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts


def launch_topk(kernel: Any, logits: Tensor, top_k: int, **others: Any) -> tuple[Tensor, Tensor]:
    """Weights and experts by a kernel that chooses: `others` are the arguments that it has besides.

    Raises ValueError unless there are `top_k` experts.
    """
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be 1 to {num_experts} (all experts), but is {top_k}")
    rows = as_rows(logits)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens:
        block, block_rows, num_warps = row_blocks(num_experts, logits.dtype)
        kernel[(cdiv(num_tokens, block_rows),)](
            logits_ptr=rows,
            weights_ptr=weights,
            experts_ptr=experts,
            num_tokens=num_tokens,
            logits_stride=rows.stride(0),
            TOP_K=top_k,
            CHOICES=next_power_of_2(top_k),
            NUM_EXPERTS=num_experts,
            BLOCK=block,
            ROWS=block_rows,
            num_warps=num_warps,
            **others,
        )
    return weights, experts


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_softmax_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    logits_stride,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    expert = tl.arange(0, BLOCK)[None, :]
    is_expert = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=(row < num_tokens) & is_expert, other=0.0)
    logits = tl.where(is_expert, logits.to(tl.float32), -float("inf"))
    mass = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
    mass /= tl.sum(mass, axis=1, keep_dims=True)
    # Probabilities of the experts that are left; -1 for chosen ones and beyond the end. NaN counts as 0, so that a
    # row of NaN names experts that exist; its weights stay NaN.
    left = tl.where(is_expert, tl.where(mass == mass, mass, 0.0), -1.0)
    choice = tl.arange(0, CHOICES)[None, :]
    weights = tl.zeros((ROWS, CHOICES), tl.float32)
    experts = tl.zeros((ROWS, CHOICES), tl.int32)
    for nth in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=1)[:, None]
        is_best = expert == best
        weights = tl.where(choice == nth, tl.sum(tl.where(is_best, mass, 0.0), axis=1)[:, None], weights)
        experts = tl.where(choice == nth, best, experts)
        left = tl.where(is_best, -1.0, left)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=1, keep_dims=True)
    mask = (row < num_tokens) & (choice < TOP_K)
    tl.store(weights_ptr + row * TOP_K + choice, weights, mask=mask)
    tl.store(experts_ptr + row * TOP_K + choice, experts.to(tl.int64), mask=mask)
