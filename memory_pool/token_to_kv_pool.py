"""The KV of tokens: one allocation, viewed as a K and a V buffer of each layer, and the free list of its slots."""

from __future__ import annotations

import torch

from memory_pool.slot_allocator import SlotAllocator
from triton_ops.kv.e4m3 import E4M3


class TokenToKVPool:
    """KV memory for `num_slots` tokens in `num_layers` layers.

    All layers use the same slot numbers, one dtype and one shape. A pool of e4m3 (`torch.float8_e4m3fn`) has
    scales: keys and values are the stored numbers times their head's scale.
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
        # Not zeros: no slot is read before it is written, and untouched pages cost a CPU nothing.
        self._buffer = torch.empty((num_layers, 2, num_slots, num_kv_heads, head_dim), dtype=dtype, device=device)
        self._scales = torch.ones((num_layers, 2, num_kv_heads), device=device) if dtype == E4M3 else None

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    @property
    def buffer(self) -> torch.Tensor:
        """All KV, `[num_layers, 2, num_slots, num_kv_heads, head_dim]`: keys, then values."""
        return self._buffer

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer, `[num_slots, num_kv_heads, head_dim]`, a view."""
        return self._buffer[layer_id, 0]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        """Values of a layer, `[num_slots, num_kv_heads, head_dim]`, a view."""
        return self._buffer[layer_id, 1]

    def k_scale(self, layer_id: int) -> torch.Tensor | None:
        """The scales of a layer's keys, float32 `[num_kv_heads]`, a view; None without scales."""
        return None if self._scales is None else self._scales[layer_id, 0]

    def v_scale(self, layer_id: int) -> torch.Tensor | None:
        """The scales of a layer's values, likewise."""
        return None if self._scales is None else self._scales[layer_id, 1]

    @property
    def scales(self) -> torch.Tensor | None:
        """All scales, float32 `[num_layers, 2, num_kv_heads]`, keys before values."""
        return self._scales

    def set_scales(self, scales: torch.Tensor) -> None:
        """Replace the scales in place. KV stored before must not be read any more."""
        if self._scales is None:
            raise ValueError("a pool that is not of e4m3 has no scales")
        if scales.shape != self._scales.shape or not bool((scales > 0).all()):
            raise ValueError(f"scales must be positive, of shape {[*self._scales.shape]}")
        self._scales.copy_(scales)

    def fill(self, value: float) -> None:
        """Overwrite every slot (tests fill the pool with NaN, so that reads of foreign slots show)."""
        self._buffer.fill_(value)
