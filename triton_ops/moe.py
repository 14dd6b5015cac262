"""A mixture of gated feed-forward experts (Shazeer et al., 2017; SwiGLU experts as in Mixtral, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.implementation import Impl
from triton_ops.silu_and_mul import silu_and_mul


def moe(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """For each token, the sum of its experts' outputs `down(silu(gate(x)) * up(x))` times their weights.

    Args:
        x: `[num_tokens, hidden_size]`, any float dtype.
        weights: float32 `[num_tokens, top_k]`.
        experts: int64 `[num_tokens, top_k]`, each below `num_experts`, no two of a token's the same.
        gate_up: `[num_experts, 2 * intermediate_size, hidden_size]` in x's dtype: gate over up.
        down: `[num_experts, hidden_size, intermediate_size]` in x's dtype.
        impl: of the experts' activation; the rest is torch.

    Returns:
        `[num_tokens, hidden_size]` in x's dtype, summed in float32.

    Experts without tokens cost nothing. On a GPU this waits for the device, to read how many tokens each has.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # token and choice, by expert
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0])
    for expert, chosen in enumerate(torch.split(order, counts.tolist())):
        if chosen.shape[0] == 0:
            continue
        tokens = chosen // top_k
        computed = linear(silu_and_mul(linear(x[tokens], gate_up[expert]), impl=impl), down[expert])
        out.index_add_(0, tokens, computed.float() * weights.flatten()[chosen].unsqueeze(1))
    return out.to(x.dtype)
