"""A rank's part of the KV of tokens, between its pools and buffers of all heads."""

# Tests: tests/kept_cache/test_kept_cache.py, tests/kept_cache/test_ranks.py

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layers.ranks import ALONE, Ranks
from memory_pool.token_to_kv_pool import HostKVPool, TokenToKVPool
from radixrt.cache.radix_tree import Slots
from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy


@dataclass(frozen=True)
class KVPart:
    """What a rank has of the KV of a model with so many layers of attention and heads: its own, in its pools, the
    layers from `first_layer` on.
    """

    kv_pool: TokenToKVPool
    host_pool: HostKVPool | None
    impl: Impl
    num_layers: int
    num_kv_heads: int
    ranks: Ranks = ALONE
    first_layer: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_pool.buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.kv_pool.buffer.device

    @property
    def token_shape(self) -> tuple[int, int, int, int]:
        """Of a token's whole KV: `(num_layers, 2, num_kv_heads, head_dim)`."""
        _, two, _, _, head_dim = self.kv_pool.buffer.shape
        return self.num_layers, two, self.num_kv_heads, head_dim

    @property
    def layers(self) -> slice:
        """Its own."""
        return slice(self.first_layer, self.first_layer + len(self.kv_pool.buffer))

    @property
    def heads(self) -> slice:
        """Its own; neighbours have the same one where a stage has more ranks than heads."""
        return self._heads_of(self.ranks.rank)

    def _heads_of(self, rank: int) -> slice:
        own = self.kv_pool.buffer.shape[3]
        first = rank * (self.num_kv_heads // own) // self.ranks.size * own
        return slice(first, first + own)

    @property
    def is_first_of_its_heads(self) -> bool:
        """Whether no rank before in its stage has the same heads."""
        rank = self.ranks.rank
        return rank == 0 or self.heads != self._heads_of(rank - 1)

    @contextmanager
    def buffers(self, count: int, num_tokens: int) -> Iterator[Tensor]:
        """Memory `[count, num_tokens, num_layers, 2, num_kv_heads, head_dim]` on the host, pinned for a GPU."""
        shape = count, num_tokens, *self.token_shape
        yield torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=self.kv_pool.buffer.is_cuda)

    def gather(self, slots: Slots, buffer: Tensor) -> None:
        """Start to copy the KV of `slots` `[n]` (host slot s is -s) to its place in the first n tokens of a buffer
        `[num_tokens, num_layers, 2, num_kv_heads, head_dim]`; nothing where another rank does.
        """
        if not self.is_first_of_its_heads:
            return
        pool, own = self.kv_pool.buffer, self._own(buffer)
        here, there = (np.flatnonzero(which).astype(np.int32) for which in (slots > 0, slots < 0))
        source, target = (torch.from_numpy(array).to(pool.device) for array in (slots[here], here))
        kv_copy(pool, source, own, target, impl=self.impl)
        if self.host_pool is not None:
            source, target = torch.from_numpy(-slots[there]), torch.from_numpy(there)
            kv_copy(self.host_pool.buffer, source, own, target, impl="torch")

    def scatter(self, buffer: Tensor, slots: Slots) -> None:
        """Start to copy its part of a buffer's first n tokens to `slots` `[n]`, except where these are 0."""
        pool = self.kv_pool.buffer
        places = np.flatnonzero(slots).astype(np.int32)
        source, target = (torch.from_numpy(array).to(pool.device) for array in (places, slots[places]))
        kv_copy(self._own(buffer), source, pool, target, impl=self.impl)

    def _own(self, buffer: Tensor) -> Tensor:
        """Its part of a buffer, like a pool."""
        return buffer.permute(1, 2, 0, 3, 4)[self.layers, :, :, self.heads]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the pool's device current, with nothing queued before and after: no copy may outlive its buffer."""
        device = self.kv_pool.buffer.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            try:
                yield
            finally:
                torch.cuda.synchronize()
