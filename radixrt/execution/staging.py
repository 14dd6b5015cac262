"""One copy a pass from host to device: arrays of many kinds packed into one buffer of int32 words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 4  # words: every array starts at a multiple of 16 bytes
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int64): torch.int64,
}


class Staging:
    """Sends a pass's arrays to one place on the device, packed in one copy.

    The host side is a ring of two buffers (pinned, for CUDA), so that a pass can be packed while the copy of the
    one before may not have been made yet; packing waits for the copy before that. The device side is one buffer:
    passes run in order, and the arrays of a pass are valid until the next upload. It moves when it has to grow.
    """

    def __init__(self, device: torch.device, num_words: int = 1 << 16) -> None:
        self._device = device
        self._turn = 0
        self._copied: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._reserve(num_words)

    def _reserve(self, num_words: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = [torch.empty(num_words, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(2)]
        self._words = [buffer.numpy() for buffer in self._host]
        self._buffer = torch.empty(num_words, dtype=torch.int32, device=self._device)

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Return device views of 1-d int32, int64 and float32 `arrays`, by the same names."""
        ends, end = _places(arrays)
        if end > len(self._buffer):
            self._reserve(2 * end)  # what is in flight holds on to the old buffers
        self._turn ^= 1
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        words = self._words[self._turn]
        for name, array in arrays.items():
            start, stop = ends[name]
            words[start:stop] = np.ascontiguousarray(array).view(np.int32)
        self._buffer[:end].copy_(self._host[self._turn][:end], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()
        return {
            name: self._buffer[start:stop].view(_TORCH_DTYPES[arrays[name].dtype])
            for name, (start, stop) in ends.items()
        }


def num_words(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Words that an upload of `arrays` takes."""
    return _places(arrays)[1]


def _places(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each array begins and ends, in words, and where the last one ends: their order and sizes decide."""
    ends, end = {}, 0
    for name, array in arrays.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes // 4
        ends[name] = (start, end)
    return ends, end
