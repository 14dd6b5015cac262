"""The states of sequences, on the device and on the host: for each part of a state one allocation; free lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory_pool.kv_layout import StateLayout
from memory_pool.page_lock import lock_with
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

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """`conv` and `recurrent`, each `[num_layers, num_states, ...]`."""
        return self.conv, self.recurrent


class HostStatePool:
    """Host memory for `num_states` states of a pool; page-locked if that pool is on a GPU.

    `parts` are like the pool's, but their memory is state-major: each part of a state crosses the link in one
    piece. State 0 is reserved here, too. Raises RuntimeError where the memory cannot be allocated or page-locked.
    """

    def __init__(self, num_states: int, pool: StatePool) -> None:
        self.allocator = SlotAllocator(num_states)
        parts = []
        for part in pool.parts:
            num_layers, _, *shape = part.shape
            memory = torch.empty((num_states, num_layers, *shape), dtype=part.dtype, device="cpu")
            lock_with(self, memory, part.device)
            parts.append(memory.transpose(0, 1))
        self.parts = tuple(parts)


def as_slots(part: Tensor) -> Tensor:
    """A part of states `[num_layers, num_states, ...]`, the rest contiguous, as `kv_copy` takes it: a view
    `[num_layers, 2, num_states, 1, bytes of half of it]` int8.
    """
    rows = part.flatten(2).view(torch.int8)
    num_layers, num_states, num_bytes = rows.shape
    return rows.view(num_layers, num_states, 2, 1, num_bytes // 2).permute(0, 2, 1, 3, 4)
