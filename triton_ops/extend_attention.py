"""Causal attention of new tokens over a cached prefix in the pool and over one another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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
        if prefix_len:
            slots = req_to_token[row, :prefix_len]
            keys = torch.cat([k_buffer.index_select(0, slots).to(k.dtype), keys])
            values = torch.cat([v_buffer.index_select(0, slots).to(v.dtype), values])
            mask = torch.ones(extend_len, prefix_len + extend_len, dtype=torch.bool, device=q.device)
            mask = mask.tril_(prefix_len)
        attended = scaled_dot_product_attention(
            q[new].transpose(0, 1).unsqueeze(0).float(),
            keys.transpose(0, 1).unsqueeze(0).float(),
            values.transpose(0, 1).unsqueeze(0).float(),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[new] = attended.squeeze(0).transpose(0, 1)
    return out
