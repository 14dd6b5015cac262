"""Routing of tokens to experts: the softmax of the router's logits, and the best of it."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_softmax(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` likeliest experts of each token: weights float32 and experts int64, both
    `[num_tokens, top_k]`, the likeliest first.

    `logits` is `[num_tokens, num_experts]` in any float dtype. Weights are the softmax over all experts, in
    float32; with `renormalize` they are divided by their sum, so that it is 1.
    """
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts
