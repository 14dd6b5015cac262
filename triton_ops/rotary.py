"""Rotary position embedding (Su et al., RoFormer, 2021), the variant that rotates halves ("neox")."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate elements i and `i + rotary_dim // 2` of each head by angle i of the token's position.

    Args:
        q, k: `[num_tokens, num_heads or num_kv_heads, head_dim]`, any float dtype, any strides.
        cos_sin_cache: float32 `[max_position, rotary_dim]`: `rotary_dim // 2` cosines, then the sines.
            `rotary_dim` is at most `head_dim`; the elements of a head from there on are not rotated.
        positions: int32 `[num_tokens]`.

    Returns:
        q and k rotated, as new tensors in their dtypes, computed in float32.
    """
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        rotated, kept = x[..., :rotary_dim], x[..., rotary_dim:]
        first, second = rotated.float().chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
        return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned

    return rotate(q), rotate(k)
