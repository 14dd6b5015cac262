"""One copy a pass from host to device: arrays of many kinds packed into one buffer of int32 words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from radixrt.arrays import Int32Array

_NO_WORDS = np.zeros(0, np.int32)
ALIGNMENT = 4  # words: every array starts at a multiple of 16 bytes
_TORCH_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32")}


@dataclass(frozen=True)
class Layout:
    """Where 1-d arrays of int32, int64 and float32 lie among words. Their order and sizes decide."""

    places: Mapping[str, tuple[slice, np.dtype[Any]]]  # the words of each array, and its dtype
    num_words: int  # where the last one ends

    def parts(self, words: Int32Array) -> dict[str, NDArray[Any]]:
        """Each array's part of the words."""
        return {name: words[place].view(dtype) for name, (place, dtype) in self.places.items()}

    def tensors(self, words: Tensor) -> dict[str, Tensor]:
        """Each array's part of the words on the device."""
        return {name: words[place].view(_TORCH_DTYPES[dtype]) for name, (place, dtype) in self.places.items()}


class Staging:
    """Sends packed words to one place on the device.

    The host side is a ring of two buffers or more (pinned, for CUDA), so that words can be sent while the copies
    before may not have been made yet; sending waits for the last copy of the same buffer. The device side is one
    buffer: passes run in order, and the words of a pass are valid until the next upload. It moves when it has to
    grow; once there is a fixed one, only words that are too many for that go there.
    """

    def __init__(self, device: torch.device, num_words: int = 1 << 16, num_buffers: int = 2) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._turn, self._num_buffers = 0, num_buffers
        events = range(num_buffers if self._on_gpu else 0)
        self._copied = [torch.cuda.Event() for _ in events]  # type: ignore[no-untyped-call]
        self.fixed = torch.empty(0, dtype=torch.int32, device=device)  # the one that stays where it is
        self._reserve(num_words)

    def _reserve(self, num_words: int) -> None:
        # What is in flight holds on to the buffers before.
        pinned = self._on_gpu
        self._host = [
            torch.empty(num_words, dtype=torch.int32, device="cpu", pin_memory=pinned)
            for _ in range(self._num_buffers)
        ]
        self._words = [buffer.numpy() for buffer in self._host]
        self._buffer = torch.empty(num_words, dtype=torch.int32, device=self._device)

    def fix(self, num_words: int) -> None:
        """From now on, keep one buffer where it is: graphs that read up to `num_words` of it know its address."""
        assert not len(self.fixed)
        self.fixed = torch.empty(2 * num_words, dtype=torch.int32, device=self._device)  # the rest is for extras

    def upload(self, words: Int32Array, num_fixed: int = 0) -> Tensor:
        """A buffer on the device that begins with the words; the first `num_fixed` are in the fixed one, too."""
        begun = self.begin(len(words))
        begun[:] = words
        return self.send(begun, num_fixed)

    def begin(self, count: int) -> Int32Array:
        """The host's words to be sent next, `[count]`; what is in them is of no meaning."""
        if count > len(self._buffer):
            self._reserve(2 * count)
        self._turn = (self._turn + 1) % self._num_buffers
        if self._on_gpu:
            self._copied[self._turn].synchronize()
        return self._words[self._turn][:count]

    def send(self, begun: Int32Array, num_fixed: int = 0) -> Tensor:
        """`upload` of the words that `begin` returned last."""
        assert np.may_share_memory(begun, self._words[self._turn])  # else others would be sent
        count, host = len(begun), self._host[self._turn]
        is_long = count > len(self.fixed)
        target = self._buffer if is_long else self.fixed
        target[:count].copy_(host[:count], non_blocking=True)
        if is_long and num_fixed:
            self.fixed[:num_fixed].copy_(host[:num_fixed], non_blocking=True)
        if self._on_gpu:
            self._copied[self._turn].record()
        return target


def packed(
    arrays: Mapping[str, NDArray[Any]], layout: Layout | None = None, before: Int32Array = _NO_WORDS
) -> tuple[Int32Array, Layout]:
    """The words `before`, then arrays, and where each of these is: `layout`, if that is known."""
    if layout is None:
        places, end = {}, len(before)
        for name, array in arrays.items():
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + array.nbytes // 4
            places[name] = slice(begin, end), array.dtype
        layout = Layout(places, end)
    words, end = np.empty(layout.num_words, np.int32), len(before)
    words[:end] = before
    for name, (place, _) in layout.places.items():
        words[end : place.start] = 0  # nothing else is: changes of rows may be millions of words
        words[place] = np.ascontiguousarray(arrays[name]).view(np.int32)
        end = place.stop
    return words, layout


def padded(array: Int32Array, length: int, filler: ArrayLike = 0) -> Int32Array:
    """`array` `[n <= length]` int32 with fillers after it."""
    filled = np.empty(length, np.int32)
    filled[: len(array)] = array
    filled[len(array) :] = filler
    return filled
