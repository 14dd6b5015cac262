"""Pieces of a kept cache in memory that all ranks map: each copies its part of the KV from or to it."""

# Tests: tests/kept_cache/test_ranks.py

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from memory_pool.token_to_kv_pool import page_locked
from radixrt.arrays import Int32Array
from radixrt.cache.radix_tree import Slots
from radixrt.engine.signals import deferred
from radixrt.kept_cache.kv_part import KVPart
from radixrt.ranks.followers import Followers


@contextmanager
def _mapped(part: KVPart, file: int, count: int, num_tokens: int) -> Iterator[Tensor]:
    """The file as `KVPart.buffers`, which must be large enough."""
    shape = count, num_tokens, *part.token_shape
    if not math.prod(shape):
        yield torch.empty(shape, dtype=part.dtype, device="cpu")
        return
    memory = mmap.mmap(file, part.dtype.itemsize * math.prod(shape))
    buffers = torch.frombuffer(memory, dtype=torch.uint8).view(part.dtype).view(shape)
    with page_locked(buffers, part.device):
        yield buffers


def _free(file: int) -> None:
    """Give a file's memory back. It keeps its size: whoever still reads what it has mapped finds zeros, where a
    shorter file would end the process.
    """
    if hasattr(mmap, "MADV_REMOVE") and (size := os.fstat(file).st_size):
        with mmap.mmap(file, size) as memory:
            memory.madvise(mmap.MADV_REMOVE)


class KeptParts:
    """The other ranks' parts, as the first one saves and loads a cache: an `OtherParts`."""

    def __init__(self, followers: Followers, part: KVPart) -> None:
        self._followers, self._part, self._file = followers, part, followers.kept_file
        self._asked: dict[int, int] = {}  # by buffer: what was asked of it last

    @contextmanager
    def buffers(self, count: int, num_tokens: int) -> Iterator[Tensor]:
        """See `OtherParts`."""
        size = self._part.dtype.itemsize * math.prod((count, num_tokens, *self._part.token_shape))
        self._asked.clear()
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        try:
            self._ask({"begin": [count, num_tokens]})
            with _mapped(self._part, self._file, count, num_tokens) as buffers:
                yield buffers
        finally:
            self._followers.wait_for(self._ask({"end": True}))
            _free(self._file)

    def gather(self, buffer: int, slots: Slots) -> None:
        """See `OtherParts`."""
        self._asked[buffer] = self._ask({"gather": buffer}, slots)

    def scatter(self, buffer: int, slots: Slots) -> None:
        """See `OtherParts`."""
        self._asked[buffer] = self._ask({"scatter": buffer}, slots)

    def wait(self, buffer: int) -> None:
        """See `OtherParts`."""
        if buffer in self._asked:
            self._followers.wait_for(self._asked[buffer])

    def _ask(self, what: dict[str, Any], slots: Slots | None = None) -> int:
        with deferred():
            return self._followers.ask({"kept": what}, slots)


class OwnPart:
    """The part of a rank other than the first, which does what that one's KeptParts say."""

    def __init__(self, part: KVPart, file: int) -> None:
        self._part, self._file = part, file
        self._mapped = ExitStack()
        self._buffers: Tensor | None = None

    def handle(self, what: dict[str, Any], slots: Int32Array) -> None:
        """Do it, to its end."""
        if "begin" in what or "end" in what:
            self._buffers = None
            self._mapped.close()
        if "begin" in what:
            self._buffers = self._mapped.enter_context(_mapped(self._part, self._file, *what["begin"]))
            return
        if (buffers := self._buffers) is not None:
            with self._part.on_device():
                if "gather" in what:
                    self._part.gather(slots, buffers[what["gather"]])
                elif "scatter" in what:
                    self._part.scatter(buffers[what["scatter"]], slots)
