"""RadixAttention: norms and rotates the new tokens' heads, stores their KV, and attends to it and to prefixes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from layers.input_metadata import InputMetadata
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.extend import extend_attention
from triton_ops.attention.ordered import ordered_decode, ordered_extend
from triton_ops.implementation import Impl
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store


class RadixAttention(nn.Module):
    """The attention of layer `layer_id`, from the projections' output to the heads' outputs.

    `cos_sin_cache`, see `Rotation`, is None where the layer has no positions; `q_factors` go with it. `norm` is of
    each head by itself. A layer with a window stores all its KV nevertheless: a prefix can be reused at any
    length. `deterministic` as in `Placement`.
    """

    def __init__(
        self,
        layer_id: int,
        scoring: Scoring,
        *,
        cos_sin_cache: Tensor | None,
        q_factors: Tensor | None = None,
        norm: HeadNorm | None,
        impl: Impl,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.layer_id, self.scoring, self.impl, self.deterministic = layer_id, scoring, impl, deterministic
        self.cos_sin_cache, self.q_factors, self.norm = cos_sin_cache, q_factors, norm

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: InputMetadata) -> Tensor:
        """Attention of a pass's T new tokens; writes their K and V to `metadata.out_cache_loc` first.

        `q` is `[T, num_heads, head_dim]`, `k` and `v` are `[T, num_kv_heads, head_dim]`, views of one packed
        projection or not; `qk_norm_rope_store` changes them in place. Returns `[T, num_heads, head_dim]` in q's
        dtype.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rotation = None
        if self.cos_sin_cache is not None:
            rotation = Rotation(self.cos_sin_cache, metadata.positions, q_factors=self.q_factors)
        kv = metadata.kv(self.layer_id)
        q, k, v = qk_norm_rope_store(
            q, k, v, kv, metadata.out_cache_loc, norm=self.norm, rotation=rotation, impl=self.impl
        )
        scoring, end = self.scoring, metadata.num_extend_tokens
        result: dict[str, Any]
        if metadata.num_extends:
            plan, result = metadata.extend_plan(scoring.window), {"out": out[:end], "impl": self.impl}
            if self.deterministic:
                ordered_extend(q[:end], kv, metadata.extends, plan, scoring, **result)
            else:
                extend_attention(q[:end], k[:end], v[:end], kv, metadata.extends, plan, scoring, **result)
        if end < q.shape[0]:
            decode_plan, result = metadata.decode_plan(scoring.window), {"out": out[end:], "impl": self.impl}
            if self.deterministic:
                ordered_decode(q[end:], kv, metadata.decode_rows, decode_plan, scoring, **result)
            else:
                decode_attention(q[end:], kv, decode_plan, scoring, **result)
        return out
