"""Routing of tokens to experts by sigmoids, with a correction of the choice alone (DeepSeek-V3, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import Impl, runs_triton, tl, triton
from triton_ops.moe.topk_softmax import launch_topk


def topk_sigmoid(
    logits: Tensor,
    correction: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    factor: float = 1.0,
    tiny: float = 1e-20,
    num_groups: int = 1,
    top_groups: int = 1,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token, the best first: weights float32 and experts int64, `[num_tokens, top_k]`.

    An expert's score is the sigmoid of its logit. The choice goes by scores plus `correction`, which evens the
    load, the first of equals before the others; weights are the scores alone, with `renormalize` divided by their
    sum plus `tiny`, as it may be 0, times `factor`. With several groups of experts, side by side and of one size,
    the choice is among those of the `top_groups` whose two best experts have the greatest sum.

    Args:
        logits: `[num_tokens, num_experts]` in any float dtype.
        correction: float32 `[num_experts]`.

    Groups are for the torch form alone, whatever `impl` is; it waits for no device.
    """
    if num_groups == 1 and runs_triton(impl, logits.device):
        return launch_topk(
            _topk_sigmoid_kernel,
            logits,
            top_k,
            correction_ptr=_checked(correction, logits.shape[1]),
            factor=factor,
            RENORMALIZE=renormalize,
            TINY=tiny,
        )
    scores = 1.0 / (1.0 + torch.exp(-logits.float()))  # torch's sigmoid: other bits at other places, on a CPU
    choice = scores + correction
    if num_groups > 1:
        groups = choice.view(*choice.shape[:-1], num_groups, -1)
        best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
        choice = groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + tiny)
    return weights * factor, experts


def _checked(correction: Tensor, num_experts: int) -> Tensor:
    """As the kernel reads it."""
    if correction.shape != (num_experts,) or correction.dtype != torch.float32:
        raise ValueError(
            f"correction must be float32 [{num_experts}], but is {correction.dtype} {[*correction.shape]}"
        )
    return correction.contiguous()


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_sigmoid_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    logits_stride,
    factor,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TINY: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    expert = tl.arange(0, BLOCK)[None, :]
    is_expert = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=(row < num_tokens) & is_expert, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits.to(tl.float32)))
    left = scores + tl.load(correction_ptr + expert, mask=is_expert, other=0.0)
    # What is left to choose from; -inf for chosen ones and beyond the end. NaN counts as the least number, so that
    # a row of NaN names experts that exist; its weights stay NaN.
    left = tl.where(is_expert, tl.where(left == left, left, -3.0e38), -float("inf"))
    choice = tl.arange(0, CHOICES)[None, :]
    weights = tl.zeros((ROWS, CHOICES), tl.float32)
    experts = tl.zeros((ROWS, CHOICES), tl.int32)
    for nth in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=1)[:, None]
        is_best = expert == best
        weights = tl.where(choice == nth, tl.sum(tl.where(is_best, scores, 0.0), axis=1)[:, None], weights)
        experts = tl.where(choice == nth, best, experts)
        left = tl.where(is_best, -float("inf"), left)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=1, keep_dims=True) + TINY
    mask = (row < num_tokens) & (choice < TOP_K)
    tl.store(weights_ptr + row * TOP_K + choice, weights * factor, mask=mask)
    tl.store(experts_ptr + row * TOP_K + choice, experts.to(tl.int64), mask=mask)
