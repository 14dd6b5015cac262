"""Rotary position embedding (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    q_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of each head's elements: pair i by angle i of the token's position.

    Args:
        q, k: `[num_tokens, num_heads or num_kv_heads, head_dim]`, any float dtype, any strides.
        cos_sin_cache: float32 `[max_position, rotary_dim]`: `rotary_dim // 2` cosines, then the sines.
            `rotary_dim` is at most `head_dim`; further elements of a head are not rotated.
        positions: int32 `[num_tokens]`.
        interleaved: pair i is elements 2 i and 2 i + 1; else ("neox") i and `i + rotary_dim // 2`.
        q_factors: float32 `[max_position]`, a factor on what is rotated of q by position; None: 1.

    Returns:
        q and k rotated: new tensors in their dtypes, computed in float32.
    """
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, kept = x[..., :rotary_dim].float(), x[..., rotary_dim:]
        if interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
        return torch.cat([joined.to(x.dtype), kept], dim=-1) if kept.shape[-1] else joined.to(x.dtype)

    factors = 1.0 if q_factors is None else q_factors.index_select(0, positions).view(-1, 1, 1)
    return rotate(q, cos * factors, sin * factors), rotate(k, cos, sin)
