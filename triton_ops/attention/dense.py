"""What attention means: the dense form that all faster ones are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.attention.arguments import Scoring


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Causal attention of one request's last T tokens to its L tokens, in float64.

    `q` is `[T, num_heads, head_dim]`, `keys` and `values` are `[L, num_kv_heads, head_dim]`. Returns the result
    `[T, num_heads, head_dim]` and the log-sum-exps `[T, num_heads]`; 0 and -inf of a row that sees nothing.
    """
    num_tokens, num_heads, _ = q.shape
    length, num_kv_heads, _ = keys.shape
    keys, values = (x.double().repeat_interleave(num_heads // num_kv_heads, 1) for x in (keys, values))
    own = torch.arange(length - num_tokens, length, device=q.device)
    distance = torch.arange(length, device=q.device) - own[:, None]  # [T, L], of each key from each query
    scores = torch.einsum("thd, lhd -> htl", q.double(), keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.alibi_slopes is not None:
        scores = scores + scoring.alibi_slopes.double()[:, None, None] * distance
    visible = distance <= 0
    if scoring.window is not None:
        visible = visible & (distance > -scoring.window)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    if scoring.sinks is not None:
        lse = torch.logaddexp(lse, scoring.sinks.double()[:, None])
    weights = torch.where(visible, (scores - lse[..., None]).exp(), 0.0)
    return torch.einsum("htl, lhd -> thd", weights, values), lse.T
