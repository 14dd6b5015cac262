"""Causal attention of new tokens over a cached prefix in the pool and over one another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triton_ops.soft_cap import soft_cap


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Token i of a request attends to the request's cached prefix and to its new tokens 0..i.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, any float dtype, any strides.
        k, v: `[num_tokens, num_kv_heads, head_dim]`, the new tokens' own, contiguous by request.
            `num_heads` is a multiple of `num_kv_heads`.
        k_buffer, v_buffer: `[num_slots, num_kv_heads, head_dim]`; read at the prefixes' slots only, the
            others may hold anything.
        req_to_token: int32 `[max_requests, max_context_len]`, position to slot.
        req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens: int32 `[num_extends]`. Request b
            has tokens `extend_start_loc[b] : extend_start_loc[b] + extend_seq_lens[b]`; 0 of them is
            allowed.
        scale: factor on the scores.
        softcap: the scaled scores become `softcap * tanh(score / softcap)`; None: they stay.
        sliding_window: a token at position p sees the positions from `p - sliding_window + 1` to p, so 1 is
            itself alone; None: all from 0.

    Returns:
        `[num_tokens, num_heads, head_dim]` in q's dtype, computed in float32; zero at tokens of no request.

    On a GPU this waits for the device, to read the lengths.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    requests = torch.stack([req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens], 1).tolist()
    for row, prefix_len, start, extend_len in requests:
        if extend_len == 0:
            continue
        new = slice(start, start + extend_len)
        keys, values, mask = k[new], v[new], None
        # What the first new token no longer sees, none of them does.
        first = 0 if sliding_window is None else max(0, prefix_len - sliding_window + 1)
        num_cached = prefix_len - first
        if num_cached:
            slots = req_to_token[row, first:prefix_len]
            keys = torch.cat([k_buffer.index_select(0, slots).to(k.dtype), keys])
            values = torch.cat([v_buffer.index_select(0, slots).to(v.dtype), values])
        if num_cached or softcap is not None or (sliding_window is not None and sliding_window < extend_len):
            mask = torch.ones(extend_len, num_cached + extend_len, dtype=torch.bool, device=q.device)
            mask = mask.tril_(num_cached)
            if sliding_window is not None:
                mask = mask.triu_(num_cached - sliding_window + 1)
        out[new] = _attend(q[new], keys, values, mask, scale, softcap)
    return out


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """`q [T, num_heads, head_dim]` over `keys` and `values` `[L, num_kv_heads, head_dim]` where
    `mask [T, L]` is true (None: causal, T = L), in float32.
    """
    q, keys, values = (x.transpose(0, 1).float() for x in (q, keys, values))
    if softcap is None:
        attended = scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)
    assert mask is not None
    group = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = soft_cap(q @ keys.transpose(1, 2) * scale, softcap)
    return (scores.masked_fill_(~mask, -torch.inf).softmax(-1) @ values).transpose(0, 1)
