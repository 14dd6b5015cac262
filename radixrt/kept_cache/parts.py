"""A rank's part of the rows of a kept cache, KV and states, between its pools and buffers of whole rows."""

# Tests: tests/kept_cache/test_kept_cache.py, tests/kept_cache/test_ranks.py, tests/kept_cache/test_states.py

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layers.ranks import ALONE, Ranks
from memory_pool.state_pool import as_slots
from memory_pool.token_to_kv_pool import HostKVPool, TokenToKVPool
from radixrt.cache.radix_tree import Slots
from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy


class RowPart(ABC):
    """What a rank has of the rows of one tensor, each of which is a slot of its pools."""

    impl: Impl

    @property
    @abstractmethod
    def pool(self) -> Tensor:
        """The device's, as `kv_copy` takes it."""

    @property
    @abstractmethod
    def host_pool(self) -> Tensor | None:
        """The host's, likewise."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of rows."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """Of a whole row: of all ranks."""

    @abstractmethod
    def own(self, buffer: Tensor) -> Tensor:
        """Its part of a buffer `[num_rows, *row_shape]`, like `pool`."""

    @property
    def is_first(self) -> bool:
        """Whether no rank before has the same part."""
        return True

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @contextmanager
    def buffers(self, count: int, num_rows: int) -> Iterator[Tensor]:
        """Memory `[count, num_rows, *row_shape]` on the host, pinned for a GPU."""
        shape = count, num_rows, *self.row_shape
        yield torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=self.pool.is_cuda)

    def gather(self, slots: Slots, buffer: Tensor) -> None:
        """Start to copy `slots` `[n]` (host slot s is -s) to their places in the first n rows of a buffer
        `[num_rows, *row_shape]`; nothing where another rank does.
        """
        if not self.is_first:
            return
        pool, own = self.pool, self.own(buffer)
        here, there = (np.flatnonzero(which).astype(np.int32) for which in (slots > 0, slots < 0))
        source, target = (torch.from_numpy(array).to(pool.device) for array in (slots[here], here))
        kv_copy(pool, source, own, target, impl=self.impl)
        if self.host_pool is not None:
            source, target = torch.from_numpy(-slots[there]), torch.from_numpy(there)
            kv_copy(self.host_pool, source, own, target, impl="torch")

    def scatter(self, buffer: Tensor, slots: Slots) -> None:
        """Start to copy its part of a buffer's first n rows to `slots` `[n]`, except where these are 0."""
        pool = self.pool
        places = np.flatnonzero(slots).astype(np.int32)
        source, target = (torch.from_numpy(array).to(pool.device) for array in (places, slots[places]))
        kv_copy(self.own(buffer), source, pool, target, impl=self.impl)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the pool's device current, with nothing queued before and after: no copy may outlive its buffer."""
        device = self.pool.device
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
    def pool(self) -> Tensor:
        return self.kv_pool.buffer

    @property
    def host_pool(self) -> Tensor | None:
        return None if self.host_kv_pool is None else self.host_kv_pool.buffer

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """`(num_layers, 2, num_kv_heads, head_dim)`."""
        _, two, _, _, head_dim = self.pool.shape
        return self.num_layers, two, self.num_kv_heads, head_dim

    @property
    def layers(self) -> slice:
        """Its own."""
        return slice(self.first_layer, self.first_layer + len(self.pool))

    @property
    def heads(self) -> slice:
        """Its own; neighbours have the same one where a stage has more ranks than heads."""
        return self._heads_of(self.ranks.rank)

    def _heads_of(self, rank: int) -> slice:
        own = self.pool.shape[3]
        first = rank * (self.num_kv_heads // own) // self.ranks.size * own
        return slice(first, first + own)

    @property
    def is_first(self) -> bool:
        rank = self.ranks.rank
        return rank == 0 or self.heads != self._heads_of(rank - 1)

    def own(self, buffer: Tensor) -> Tensor:
        return buffer.permute(1, 2, 0, 3, 4)[self.layers, :, :, self.heads]


@dataclass(frozen=True)
class StatePart(RowPart):
    """One part of the states of sequences, a row a state: `[num_layers, num_states, ...]` in both tiers."""

    states: Tensor
    host_states: Tensor | None
    impl: Impl

    @property
    def pool(self) -> Tensor:
        return as_slots(self.states)

    @property
    def host_pool(self) -> Tensor | None:
        return None if self.host_states is None else as_slots(self.host_states)

    @property
    def dtype(self) -> torch.dtype:
        return self.states.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """`(num_layers, ...)`."""
        num_layers, _, *shape = self.states.shape
        return num_layers, *shape

    def own(self, buffer: Tensor) -> Tensor:
        return as_slots(buffer.transpose(0, 1))
