"""The states of sequences on the device: one allocation for each part of a state, and the free list."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory_pool.kv_layout import StateLayout
from memory_pool.slot_allocator import SlotAllocator


@dataclass(frozen=True)
class StateView:
    """A layer's part of all states.

    Attributes:
        conv: `[num_states, conv_channels, conv_width - 1]`, the last inputs of the convolution.
        recurrent: `[num_states, num_heads, key_dim, value_dim]` float32.
    """

    conv: Tensor
    recurrent: Tensor


class StatePool:
    """Memory for `num_states` states: `conv` and `recurrent` are all layers' `StateView`s, one after the other.

    State 0 is reserved, as slot 0 of a KV pool: sequences begin with it, which counts as zeros, whatever it holds,
    and padding leaves it.
    """

    def __init__(self, num_states: int, layout: StateLayout, *, device: torch.device) -> None:
        self.allocator = SlotAllocator(num_states)
        layers = layout.num_layers, num_states
        conv = *layers, layout.conv_channels, layout.conv_width - 1
        matrices = *layers, layout.num_heads, layout.key_dim, layout.value_dim
        # Not zeros: no other state is read before it is left.
        self.conv = torch.empty(conv, dtype=layout.conv_dtype, device=device)
        self.recurrent = torch.empty(matrices, dtype=torch.float32, device=device)

    def view(self, layer_id: int) -> StateView:
        """A layer's part; `layer_id` counts the layers that keep states."""
        return StateView(self.conv[layer_id], self.recurrent[layer_id])
