"""One copy a pass from host to device: arrays of many kinds packed into one buffer of int32 words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]

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
        places, end = _places(arrays)
        if end > len(self._buffer):
            self._reserve(2 * end)  # what is in flight holds on to the old buffers
        words = self._next_words()
        for name, array in arrays.items():
            words[places[name]] = np.ascontiguousarray(array).view(np.int32)
        self._copy(end)
        return {
            name: self._buffer[place].view(_TORCH_DTYPES[arrays[name].dtype]) for name, place in places.items()
        }

    def send(self, words: Int32Array) -> None:
        """Copy arrays that are `packed`, no longer than what was uploaded before, to where an upload puts them."""
        self._next_words()[: len(words)] = words
        self._copy(len(words))

    def _next_words(self) -> Int32Array:
        """The buffer on the host whose turn it is."""
        self._turn ^= 1
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        return self._words[self._turn]

    def _copy(self, num_words: int) -> None:
        self._buffer[:num_words].copy_(self._host[self._turn][:num_words], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()


def padded(array: NDArray[np.int32], length: int, filler: ArrayLike = 0) -> NDArray[np.int32]:
    """`array` `[n <= length]` int32 with fillers behind it."""
    filled = np.empty(length, np.int32)
    filled[: len(array)] = array
    filled[len(array) :] = filler
    return filled


def packed(arrays: Mapping[str, NDArray[Any]]) -> tuple[Int32Array, dict[str, NDArray[Any]]]:
    """Copies of arrays as an upload packs them: the words int32, and each array's part of these."""
    places, end = _places(arrays)
    words = np.zeros(end, np.int32)
    parts: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        parts[name] = words[places[name]].view(array.dtype)
        parts[name][:] = array
    return words, parts


def _places(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, slice], int]:
    """The words of each array, and where the last one ends: their order and sizes decide."""
    places, end = {}, 0
    for name, array in arrays.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes // 4
        places[name] = slice(start, end)
    return places, end
