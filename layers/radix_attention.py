"""RadixAttention: norms and rotates the new tokens' heads, stores their KV, and attends to it and to prefixes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from layers.input_metadata import InputMetadata
from layers.norm import RMSNorm
from layers.rotary import RotaryEmbedding
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.extend import extend_attention
from triton_ops.implementation import Impl
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView


class KVCache(Protocol):
    """The pool as attention sees it."""

    def view(self, layer_id: int, req_to_token: Tensor) -> KVView: ...


class RadixAttention(nn.Module):
    """The attention of one layer, from the projections' output to the heads' outputs.

    `q_norm` and `k_norm`, both or none, are norms of each head by itself; `rotary` is None where the layer has no
    positions. `scale`, `softcap` and `sliding_window`: see `Scoring`. A layer with a window stores all its KV
    nevertheless: a prefix can be reused at any length.
    """

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: RotaryEmbedding | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        scale: float,
        softcap: float | None = None,
        sliding_window: int | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        self.layer_id, self.head_dim = layer_id, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.scoring = Scoring(scale, softcap, sliding_window)
        self.impl = impl

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: InputMetadata, kv_pool: KVCache) -> Tensor:
        """Attention of a pass's T new tokens; writes their K and V to `metadata.out_cache_loc` first.

        `q` is `[T, num_heads, head_dim]`, `k` and `v` are `[T, num_kv_heads, head_dim]`, views of one packed
        projection or not; `qk_norm_rope_store` changes them in place. Returns `[T, num_heads, head_dim]` in q's
        dtype.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        norm = rotation = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)
        if self.rotary is not None:
            rotation = Rotation(self.rotary.cos_sin_cache, metadata.positions)
        kv = kv_pool.view(self.layer_id, metadata.req_to_token)
        q, k, v = qk_norm_rope_store(
            q, k, v, kv, metadata.out_cache_loc, norm=norm, rotation=rotation, impl=self.impl
        )
        end, window = metadata.num_extend_tokens, self.scoring.window
        if metadata.num_extends:
            plan = metadata.extend_plan(window)
            new = q[:end], k[:end], v[:end]
            extend_attention(*new, kv, metadata.extends, plan, self.scoring, out=out[:end], impl=self.impl)
        if end < q.shape[0]:
            decode_attention(
                q[end:], kv, metadata.decode_plan(window), self.scoring, out=out[end:], impl=self.impl
            )
        return out
