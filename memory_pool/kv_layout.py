"""What the layers of a model keep: KV of each token, and states of sequences."""

# Tests: tests/memory_pool/test_token_to_kv_pool.py

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVLayout:
    """The layers of a model that keep KV, or those of a rank's part of it: all have one shape and one dtype."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of one token's K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
