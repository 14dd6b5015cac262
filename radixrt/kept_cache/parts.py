"""What a rank has of the rows of a kept cache, between its pools and buffers of whole rows."""

# Tests: tests/kept_cache/test_kept_cache.py, tests/kept_cache/test_ranks.py, tests/kept_cache/test_states.py

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layers.ranks import ALONE, Ranks
from memory_pool.layout import Part
from memory_pool.pool import as_slots
from radixrt.cache.radix_tree import Slots
from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy


class Run(NamedTuple):
    """Heads or channels that follow one another: where they are in whole rows and in a rank's part, and whether no
    rank before has them, too.
    """

    whole: slice
    own: slice
    is_first: bool


@dataclass(frozen=True)
class RowPart:
    """What a rank has of the rows of a part, each of which is a slot of its pools: its heads or channels, in its
    layers.

    Attributes:
        memory, host_memory: the part in its pools, `[num_layers, num_arrays, num_slots, *shape]` of `own`.
        whole, own: the part as the model has it, and as the rank has it.
        first_layer: of the rank, of the model's layers that keep it.
    """

    memory: Tensor
    host_memory: Tensor | None
    impl: Impl
    whole: Part
    own: Part
    ranks: Ranks = ALONE
    first_layer: int = 0

    @property
    def device(self) -> torch.device:
        """Of its pool."""
        return self.memory.device

    @property
    def dtype(self) -> torch.dtype:
        """Of rows."""
        return self.whole.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of a whole row: of all ranks."""
        return self.whole.row_shape

    @property
    def layers(self) -> slice:
        """Its own."""
        return slice(self.first_layer, self.first_layer + self.own.num_layers)

    @property
    def runs(self) -> Iterator[Run]:
        """What it has of rows. Ranks have equal pieces of the heads or channels that they divide by themselves, as
        `rank_part` cuts weights. With fewer pieces than ranks, neighbours have the same one.
        """
        divided = self.whole.divided, self.own.divided
        if self.whole.shape == self.own.shape:  # one piece, which all ranks have
            divided = self.whole.shape[:1], self.own.shape[:1]
        size, whole_begin, begin = self.ranks.size, 0, 0
        for whole, own in zip(*divided, strict=True):
            if own:
                piece, before = (rank * (whole // own) // size for rank in (self.ranks.rank, self.ranks.rank - 1))
                first = whole_begin + piece * own
                yield Run(slice(first, first + own), slice(begin, begin + own), piece != before)
            whole_begin, begin = whole_begin + whole, begin + own

    def _pieces(self, buffer: Tensor) -> Iterator[tuple[Run, Tensor, Tensor]]:
        """Its runs, each in a buffer `[num_rows, *row_shape]` and in its pool, as `kv_copy` takes them."""
        shape = self.whole.num_layers, self.whole.num_arrays, *self.whole.shape
        rows = buffer.view(len(buffer), *shape).movedim(0, 2)[self.layers]
        for run in self.runs:
            yield run, as_slots(rows[:, :, :, run.whole]), as_slots(self.memory[:, :, :, run.own])

    @contextmanager
    def buffers(self, count: int, num_rows: int) -> Iterator[Tensor]:
        """Memory `[count, num_rows, *row_shape]` on the host, pinned for a GPU."""
        shape = count, num_rows, *self.row_shape
        yield torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=self.device.type == "cuda")

    def gather(self, slots: Slots, buffer: Tensor) -> None:
        """Start to copy `slots` `[n]` (host slot s is -s) to their places in the first n rows of a buffer
        `[num_rows, *row_shape]`; nothing where another rank does.
        """
        here, there = (np.flatnonzero(which).astype(np.int32) for which in (slots > 0, slots < 0))
        source, target = (torch.from_numpy(array).to(self.device) for array in (slots[here], here))
        host_source, host_target = torch.from_numpy(-slots[there]), torch.from_numpy(there)
        for run, rows, memory in self._pieces(buffer):
            if not run.is_first:
                continue
            kv_copy(memory, source, rows, target, impl=self.impl)
            if self.host_memory is not None:
                on_host = as_slots(self.host_memory[:, :, :, run.own])
                kv_copy(on_host, host_source, rows, host_target, impl="torch")

    def scatter(self, buffer: Tensor, slots: Slots) -> None:
        """Start to copy its part of a buffer's first n rows to `slots` `[n]`, except where these are 0."""
        places = np.flatnonzero(slots).astype(np.int32)
        source, target = (torch.from_numpy(array).to(self.device) for array in (places, slots[places]))
        for _, rows, memory in self._pieces(buffer):
            kv_copy(rows, source, memory, target, impl=self.impl)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the pool's device current, with nothing queued before and after: no copy may outlive its buffer."""
        device = self.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            try:
                yield
            finally:
                torch.cuda.synchronize()
