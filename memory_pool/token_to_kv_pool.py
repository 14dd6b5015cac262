"""The KV of tokens, on the device and on the host: in each one allocation, and the free list of its slots."""

from __future__ import annotations

import torch

from memory_pool.kv_layout import KVLayout
from memory_pool.page_lock import lock_with
from memory_pool.slot_allocator import SlotAllocator
from memory_pool.state_pool import HostStatePool, StatePool
from triton_ops.e4m3 import E4M3
from triton_ops.kv.view import KVView


class TokenToKVPool:
    """KV memory for `num_slots` tokens: `buffer`, all KV as `[num_layers, 2, num_slots, num_kv_heads, head_dim]`,
    keys, then values.

    All layers use the same slot numbers, one dtype and one shape. A pool of e4m3 (`torch.float8_e4m3fn`) has
    `scales`, float32 `[num_layers, 2, num_kv_heads]`: KV is the stored numbers times their head's scale. Beside it
    are `states`, `num_states` of them, where layers keep some.
    """

    def __init__(self, num_slots: int, layout: KVLayout, *, num_states: int = 2, device: torch.device) -> None:
        self.allocator = SlotAllocator(num_slots)
        num_layers, heads, dtype = layout.num_layers, (layout.num_kv_heads, layout.head_dim), layout.dtype
        # Not zeros: no slot is read before it is written, and untouched pages cost a CPU nothing.
        self.buffer = torch.empty((num_layers, 2, num_slots, *heads), dtype=dtype, device=device)
        self.scales = torch.ones((num_layers, 2, heads[0]), device=device) if dtype == E4M3 else None
        self.states = None if layout.states is None else StatePool(num_states, layout.states, device=device)

    def view(self, layer_id: int, req_to_token: torch.Tensor) -> KVView:
        """A layer as attention reads it, with the device's copy of the table of slots."""
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[layer_id].unbind()
        return KVView(self.buffer[layer_id, 0], self.buffer[layer_id, 1], req_to_token, k_scale, v_scale)

    def set_scales(self, scales: torch.Tensor) -> None:
        """Replace the scales in place. KV stored before must not be read any more."""
        if self.scales is None:
            raise ValueError("a pool that is not of e4m3 has no scales")
        if scales.shape != self.scales.shape or not bool((scales > 0).all()):
            raise ValueError(f"scales must be positive, of shape {[*self.scales.shape]}")
        self.scales.copy_(scales)


class HostKVPool:
    """Host memory for `num_slots` tokens of a pool's KV; page-locked if that pool is on a GPU.

    `buffer` is like the pool's, but its memory is token-major: the KV of a token crosses the link in one piece.
    Beside it are `states`, `num_states` of them, where the pool has some. Raises RuntimeError where the memory
    cannot be allocated or page-locked.
    """

    def __init__(self, num_slots: int, kv_pool: TokenToKVPool, *, num_states: int = 2) -> None:
        self.allocator = SlotAllocator(num_slots)
        num_layers, two, _, num_kv_heads, head_dim = kv_pool.buffer.shape
        shape, device = (num_slots, num_layers, two, num_kv_heads, head_dim), kv_pool.buffer.device
        memory = torch.empty(shape, dtype=kv_pool.buffer.dtype, device="cpu")
        self.buffer = memory.permute(1, 2, 0, 3, 4)
        lock_with(self, memory, device)
        self.states = None if kv_pool.states is None else HostStatePool(num_states, kv_pool.states)
