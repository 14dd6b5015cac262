"""Pieces of a kept cache in memory that all ranks map: each copies its part of the rows from or to it."""

# Tests: tests/kept_cache/test_ranks.py

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from memory_pool.page_lock import page_locked
from radixrt.arrays import Int32Array
from radixrt.cache.radix_tree import Slots
from radixrt.engine.signals import deferred
from radixrt.kept_cache.parts import RowPart
from radixrt.ranks.followers import Followers


@contextmanager
def _mapped(part: RowPart, file: int, count: int, num_rows: int) -> Iterator[Tensor]:
    """The file as `RowPart.buffers`, which must be large enough."""
    shape = count, num_rows, *part.row_shape
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

    def __init__(self, followers: Followers, parts: Mapping[str, RowPart]) -> None:
        self._followers, self._parts, self._file = followers, parts, followers.kept_file
        self._asked: dict[int, int] = {}  # by buffer: what was asked of it last

    @contextmanager
    def buffers(self, name: str, count: int, num_rows: int) -> Iterator[Tensor]:
        """See `OtherParts`."""
        part = self._parts[name]
        size = part.dtype.itemsize * math.prod((count, num_rows, *part.row_shape))
        self._asked.clear()
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        try:
            self._ask({"begin": [name, count, num_rows]})
            with _mapped(part, self._file, count, num_rows) as buffers:
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


class OwnParts:
    """The parts of a rank other than the first, which does what that one's KeptParts say."""

    def __init__(self, parts: Mapping[str, RowPart], file: int) -> None:
        self._parts, self._file = parts, file
        self._part: RowPart | None = None  # whose buffers are mapped
        self._mapped = ExitStack()
        self._buffers: Tensor | None = None

    def handle(self, what: dict[str, Any], slots: Int32Array) -> None:
        """Do it, to its end."""
        if "begin" in what or "end" in what:
            self._buffers = None
            self._mapped.close()
        if "begin" in what:
            name, *sizes = what["begin"]
            self._part = self._parts[name]
            self._buffers = self._mapped.enter_context(_mapped(self._part, self._file, *sizes))
            return
        part, buffers = self._part, self._buffers
        if part is not None and buffers is not None:
            with part.on_device():
                if "gather" in what:
                    part.gather(slots, buffers[what["gather"]])
                elif "scatter" in what:
                    part.scatter(buffers[what["scatter"]], slots)
