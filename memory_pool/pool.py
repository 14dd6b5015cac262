"""Memory for the parts of a layout, on the device and on the host, and the free list of its slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memory_pool.layout import Part
from memory_pool.page_lock import lock_with
from memory_pool.slot_allocator import SlotAllocator


class Pool:
    """Memory for `num_slots` tokens or sequences, of which slot 0 is reserved.

    Attributes:
        memory: by the name of a part, `[num_layers, num_arrays, num_slots, *shape]`, one allocation each.
        states: the pool of sequences beside one of tokens, where layers keep any.
    """

    states: Pool | None = None

    def __init__(self, num_slots: int, parts: Sequence[Part], *, device: torch.device) -> None:
        self.allocator = SlotAllocator(num_slots)
        self.parts = (*parts,)
        self.device = torch.empty(0, device=device).device  # with its index
        self.memory = {part.name: self._allocated(part, num_slots) for part in parts}

    def _allocated(self, part: Part, num_slots: int) -> Tensor:
        # Not zeros: no slot is read before it is written, and untouched pages cost a CPU nothing.
        shape = part.num_layers, part.num_arrays, num_slots, *part.shape
        return torch.empty(shape, dtype=part.dtype, device=self.device)

    @property
    def kinds(self) -> tuple[Pool, ...]:
        """It, and the pool of sequences if there is one."""
        return (self,) if self.states is None else (self, self.states)

    @property
    def memory_of_all(self) -> dict[str, Tensor]:
        """The memory of both."""
        return {name: memory for pool in self.kinds for name, memory in pool.memory.items()}

    def fill(self, number: float) -> None:
        """Fill all slots of both."""
        for memory in self.memory_of_all.values():
            memory.fill_(number)


class HostPool(Pool):
    """Host memory for `num_slots` slots of a pool, and for `num_states` of its states; page-locked if that pool is
    on a GPU.

    `memory` is like the pool's, but slot after slot: a part of a token or sequence crosses the link in one piece.
    `device` is the pool's. Raises RuntimeError where the memory cannot be allocated or page-locked.
    """

    def __init__(self, num_slots: int, pool: Pool, *, num_states: int = 2) -> None:
        super().__init__(num_slots, pool.parts, device=pool.device)
        self.states = None if pool.states is None else HostPool(num_states, pool.states)

    def _allocated(self, part: Part, num_slots: int) -> Tensor:
        shape = num_slots, part.num_layers, part.num_arrays, *part.shape
        memory = torch.empty(shape, dtype=part.dtype, device="cpu")
        lock_with(self, memory, self.device)
        return memory.movedim(0, 2)


def as_slots(memory: Tensor) -> Tensor:
    """A part's memory `[num_layers, num_arrays, num_slots, ...]`, the rest contiguous, as `kv_copy` takes it: a
    view `[num_layers, 2, num_slots, 1, bytes]` int8 of both arrays, or of the halves of one.
    """
    rows = memory.flatten(3).view(torch.int8)
    num_layers, num_arrays, num_slots, num_bytes = rows.shape
    if num_arrays == 1:
        rows = rows.view(num_layers, num_slots, 2, num_bytes // 2).transpose(1, 2)
    return rows.unsqueeze(3)
