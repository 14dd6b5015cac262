"""The KV of tokens: one allocation, seen as a K and a V buffer a layer, and the free list of its slots."""

from __future__ import annotations

import torch

from memory_pool.slot_allocator import SlotAllocator


class TokenToKVPool:
    """KV memory for `num_slots` tokens in `num_layers` layers.

    Every layer uses the same slot numbers. All layers form one KV group: one dtype, one shape.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.allocator = SlotAllocator(num_slots)
        # Not zeros: nothing reads a slot before it is written, and a CPU hands out untouched pages for free.
        self._buffer = torch.empty((num_layers, 2, num_slots, num_kv_heads, head_dim), dtype=dtype, device=device)

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token's K and V take in all layers together."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    @property
    def buffer(self) -> torch.Tensor:
        """All of it, `[num_layers, 2, num_slots, num_kv_heads, head_dim]`: keys, then values."""
        return self._buffer

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer, `[num_slots, num_kv_heads, head_dim]`, a view."""
        return self._buffer[layer_id, 0]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        """Values of a layer, `[num_slots, num_kv_heads, head_dim]`, a view."""
        return self._buffer[layer_id, 1]

    def fill(self, value: float) -> None:
        """Overwrite every slot (tests fill the pool with NaN: whatever reads a slot it does not own shows)."""
        self._buffer.fill_(value)
