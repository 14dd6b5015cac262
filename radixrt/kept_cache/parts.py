"""A rank's part of the rows of a kept cache, KV and states, between its pools and buffers of whole rows."""

# Tests: tests/kept_cache/test_kept_cache.py, tests/kept_cache/test_ranks.py, tests/kept_cache/test_states.py

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layers.ranks import ALONE, Ranks
from memory_pool.state_pool import as_slots
from memory_pool.token_to_kv_pool import HostKVPool, TokenToKVPool
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


def runs_of(wholes: Sequence[int], owns: Sequence[int], ranks: Ranks) -> Iterator[Run]:
    """What a rank has of rows. Of each kind of heads or channels, which ranks divide by itself, so many are in a
    whole row, and so many on each rank: equal pieces, as `rank_part` cuts weights. With fewer pieces than ranks,
    neighbours have the same one.
    """
    if (*wholes,) == (*owns,):
        wholes, owns = [sum(wholes)], [sum(owns)]
    whole_begin = begin = 0
    for whole, own in zip(wholes, owns, strict=True):
        if own:
            piece, before = (rank * (whole // own) // ranks.size for rank in (ranks.rank, ranks.rank - 1))
            first = whole_begin + piece * own
            yield Run(slice(first, first + own), slice(begin, begin + own), piece != before)
        whole_begin, begin = whole_begin + whole, begin + own


class Piece(NamedTuple):
    """A run in all layers of a rank, as `kv_copy` takes it: in a buffer of whole rows, on the device and on the
    host.
    """

    rows: Tensor
    pool: Tensor
    host_pool: Tensor | None
    is_first: bool


class RowPart(ABC):
    """What a rank has of the rows of one tensor, each of which is a slot of its pools."""

    impl: Impl

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Of its pool."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of rows."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """Of a whole row: of all ranks."""

    @abstractmethod
    def pieces(self, buffer: Tensor) -> Iterator[Piece]:
        """All that it has, beside its places in a buffer `[num_rows, *row_shape]`."""

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
        for piece in self.pieces(buffer):
            if not piece.is_first:
                continue
            kv_copy(piece.pool, source, piece.rows, target, impl=self.impl)
            if piece.host_pool is not None:
                kv_copy(piece.host_pool, host_source, piece.rows, host_target, impl="torch")

    def scatter(self, buffer: Tensor, slots: Slots) -> None:
        """Start to copy its part of a buffer's first n rows to `slots` `[n]`, except where these are 0."""
        places = np.flatnonzero(slots).astype(np.int32)
        source, target = (torch.from_numpy(array).to(self.device) for array in (places, slots[places]))
        for piece in self.pieces(buffer):
            kv_copy(piece.rows, source, piece.pool, target, impl=self.impl)

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


@dataclass(frozen=True)
class KVPart(RowPart):
    """What a rank has of the KV of a model with so many layers of attention and heads, a row a token: its own, in
    its pools, the layers from `first_layer` on.
    """

    kv_pool: TokenToKVPool
    host_kv_pool: HostKVPool | None
    impl: Impl
    num_layers: int
    num_kv_heads: int
    ranks: Ranks = ALONE
    first_layer: int = 0

    @property
    def device(self) -> torch.device:
        return self.kv_pool.buffer.device

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_pool.buffer.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """`(num_layers, 2, num_kv_heads, head_dim)`."""
        _, two, _, _, head_dim = self.kv_pool.buffer.shape
        return self.num_layers, two, self.num_kv_heads, head_dim

    @property
    def layers(self) -> slice:
        """Its own."""
        return slice(self.first_layer, self.first_layer + len(self.kv_pool.buffer))

    @property
    def heads(self) -> slice:
        """Its own; neighbours have the same one where a stage has more ranks than heads."""
        return self._run.whole

    @property
    def _run(self) -> Run:
        (run,) = runs_of([self.num_kv_heads], [self.kv_pool.buffer.shape[3]], self.ranks)
        return run

    def pieces(self, buffer: Tensor) -> Iterator[Piece]:
        host_pool = None if self.host_kv_pool is None else self.host_kv_pool.buffer
        rows = buffer.permute(1, 2, 0, 3, 4)[self.layers, :, :, self.heads]
        yield Piece(rows, self.kv_pool.buffer, host_pool, self._run.is_first)


@dataclass(frozen=True)
class StatePart(RowPart):
    """What a rank has of one part of the states of a model, a row a state: its channels or heads, in the layers
    that keep states from `first_layer` of these on.

    Attributes:
        states, host_states: `[its layers, num_states, its channels or heads, ...]`.
        num_layers: of the model.
        wholes, owns: see `runs_of`.
    """

    states: Tensor
    host_states: Tensor | None
    impl: Impl
    num_layers: int
    wholes: tuple[int, ...]
    owns: tuple[int, ...]
    ranks: Ranks = ALONE
    first_layer: int = 0

    @property
    def device(self) -> torch.device:
        return self.states.device

    @property
    def dtype(self) -> torch.dtype:
        return self.states.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """`(num_layers, channels or heads, ...)`."""
        return self.num_layers, sum(self.wholes), *self.states.shape[3:]

    def pieces(self, buffer: Tensor) -> Iterator[Piece]:
        rows = buffer.transpose(0, 1)[self.first_layer : self.first_layer + len(self.states)]
        for run in runs_of(self.wholes, self.owns, self.ranks):
            pool, host_pool = (
                None if states is None else as_slots(states[:, :, run.own])
                for states in (self.states, self.host_states)
            )
            assert pool is not None
            yield Piece(as_slots(rows[:, :, run.whole]), pool, host_pool, run.is_first)
