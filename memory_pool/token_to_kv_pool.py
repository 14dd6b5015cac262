"""The KV of tokens on the device, as attention reads it, and its scales."""

from __future__ import annotations

import torch
from torch import Tensor

from memory_pool.layout import Layout, Part
from memory_pool.pool import Pool
from memory_pool.state_pool import StatePool
from triton_ops.e4m3 import E4M3
from triton_ops.kv.view import KVView

KV = "kv"  # the part of K and V


def kv_part(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Part:
    """K and V of each token, as attention layers keep them; ranks divide the heads."""
    return Part(KV, num_layers, (num_kv_heads, head_dim), dtype, (num_kv_heads,), num_arrays=2)


class TokenToKVPool(Pool):
    """Memory for what `num_slots` tokens have in all layers, and beside it for `num_states` states, where layers
    keep some. All layers use the same slot numbers.

    A pool of e4m3 (`torch.float8_e4m3fn`) has `scales`, float32 `[num_layers, num_arrays, num_kv_heads]`: KV is
    the stored numbers times their head's scale.
    """

    def __init__(self, num_slots: int, layout: Layout, *, num_states: int = 2, device: torch.device) -> None:
        super().__init__(num_slots, layout.tokens, device=device)
        first, self.scales = layout.tokens[0], None
        self.dtype = first.dtype
        if self.dtype == E4M3:
            self.scales = torch.ones((first.num_layers, first.num_arrays, first.shape[0]), device=device)
        self.states: StatePool | None = None
        if layout.sequences:
            self.states = StatePool(num_states, layout.sequences, device=device)

    def view(self, layer_id: int, req_to_token: Tensor) -> KVView:
        """A layer as attention reads it, with the device's copy of the table of slots."""
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[layer_id].unbind()
        k, v = self.memory[KV][layer_id].unbind()
        return KVView(k, v, req_to_token, k_scale, v_scale)

    def magnitudes(self) -> Tensor:
        """The greatest magnitudes in all slots but the reserved one, of each layer, K and V, and head: shaped as
        `scales`, in the pool's dtype.
        """
        return self.memory[KV][:, :, 1:].abs().amax((2, 4))

    def set_scales(self, scales: Tensor) -> None:
        """Replace the scales in place. KV stored before must not be read any more."""
        if self.scales is None:
            raise ValueError("a pool that is not of e4m3 has no scales")
        if scales.shape != self.scales.shape or not bool((scales > 0).all()):
            raise ValueError(f"scales must be positive, of shape {[*self.scales.shape]}")
        self.scales.copy_(scales)
