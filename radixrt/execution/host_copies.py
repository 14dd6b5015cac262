"""Copies of device tensors on the host, in memory that is used again and never freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_ops.implementation import next_power_of_2

MIN_BYTES = 256


@dataclass(frozen=True)
class HostCopy:
    """`tensor`, the copy, lies in `memory`."""

    memory: Tensor
    tensor: Tensor


class HostCopies:
    """Starts copies, and hands out what they brought.

    Their memory is pinned, for CUDA. Freeing pinned memory records an event, which would end the process where the
    device has been lost and nobody knows it yet. So there is as much memory as was ever in use together.

    Attributes:
        num_allocated: pieces of memory that there are.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._free: dict[int, list[Tensor]] = {}  # by bytes
        self.num_allocated = 0

    def start(self, tensor: Tensor) -> HostCopy:
        """Start a copy; it belongs to the caller until `take`."""
        num_bytes = next_power_of_2(max(tensor.nbytes, MIN_BYTES))
        free = self._free.setdefault(num_bytes, [])
        memory = free.pop() if free else self._new(num_bytes)
        copy = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return HostCopy(memory, copy.copy_(tensor, non_blocking=True))

    def take(self, copy: HostCopy) -> NDArray[Any]:
        """The numbers of a copy that has been made, in memory of their own."""
        numbers: NDArray[Any] = copy.tensor.numpy().copy()
        self._free[len(copy.memory)].append(copy.memory)
        return numbers

    def _new(self, num_bytes: int) -> Tensor:
        self.num_allocated += 1
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)
