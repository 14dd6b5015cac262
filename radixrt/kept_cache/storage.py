"""Saves the cache to a file and loads it: KV on its way between the pools and the disk."""

# Tests: tests/kept_cache/test_kept_cache.py

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from memory_pool.token_to_kv_pool import HostKVPool, TokenToKVPool
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import Slots
from radixrt.cache.snapshot import Adoption, take_snapshot
from radixrt.engine.signals import deferred
from radixrt.errors import CacheFileError
from radixrt.kept_cache.cache_file import (
    CacheFileReader,
    CacheFileWriter,
    Identity,
    KVFormat,
    differences,
    kv_pieces,
)
from radixrt.kept_cache.identity import DTYPE_NAMES
from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy

NUM_BUFFERS = 4  # pieces that are read or written, hashed and copied at once


class CacheStorage:
    """Saves and loads a cache, while no pass is in flight and no transfer is booked.

    Pieces of KV go through a few host buffers, pinned for a GPU, so the memory does not grow with the cache.
    """

    def __init__(
        self, cache: PrefixCache, kv_pool: TokenToKVPool, host_pool: HostKVPool | None, *, impl: Impl
    ) -> None:
        self.cache = cache
        self.kv_pool = kv_pool
        self.host_pool = host_pool
        self.impl = impl
        num_layers, two, _, num_kv_heads, head_dim = kv_pool.buffer.shape
        self.format = KVFormat(DTYPE_NAMES[kv_pool.buffer.dtype], (num_layers, two, num_kv_heads, head_dim))

    def save(self, path: Path, weights_version: int, identity: Identity, *, progress: bool) -> int:
        """Write all prefixes of a weights version to a file. Returns how many tokens it holds.

        Raises:
            CacheFileError: the file cannot be written; an older one is as it was.
        """
        tree, slots = take_snapshot(self.cache.tree, weights_version)
        with (
            self._on_device(),
            CacheFileWriter(path, tree, self.format, identity) as writer,
            _bar("saving", tree.num_tokens, progress) as bar,
        ):
            buffers = self._buffers(tree.num_tokens)
            hashed: deque[Future[Any]] = deque()
            gathered: deque[tuple[_Buffer, int]] = deque()

            def write() -> None:
                buffer, count = gathered.popleft()
                buffer.wait()
                hashed.append(writer.write(buffer.bytes(count)))
                bar.update(count)

            for start, end in kv_pieces(tree.num_tokens, self.format):
                if len(hashed) + len(gathered) == len(buffers):
                    hashed.popleft().result()
                buffer = buffers[0]
                buffers.rotate(-1)
                self._gather(slots[start:end], buffer)
                gathered.append((buffer, end - start))
                if len(gathered) == 2:  # the GPU gathers one piece while the other is written
                    write()
            while gathered:
                write()
            writer.finish()
        return tree.num_tokens

    def load(
        self, path: Path, weights_version: int, identity: Identity, vocab_size: int, *, progress: bool
    ) -> tuple[int, int]:
        """Put the prefixes of a file into the tree, under `weights_version`, as far as there are free slots.

        Returns:
            How many tokens were loaded, and how many found no free slot.

        Raises:
            CacheFileError: the file is damaged, or of another identity. Nothing has changed then.
        """
        with self._on_device(), CacheFileReader(path) as reader:
            differing = differences(reader.identity, identity)
            if not differing and reader.kv != self.format:
                differing.append(f"KV is {reader.kv} in the file, {self.format} in the model")
            if differing:
                raise CacheFileError(f"the cache file {path} is of another model: {'; '.join(differing)}")
            fault = reader.tree.fault(vocab_size)
            if fault is not None:
                raise CacheFileError(f"the cache file {path} cannot be used: {fault}")
            arriving: Adoption | None = None
            try:
                with deferred():
                    adoption = arriving = self.cache.begin_adoption(reader.tree, weights_version)
                # Unchecked KV goes to slots that nothing reads.
                self._read(reader, adoption.slots, progress)
                with deferred():
                    self.cache.adopt(adoption)
                    arriving = None
            finally:
                if arriving is not None:
                    with deferred():
                        self.cache.cancel_adoption(arriving)
        return adoption.num_taken, adoption.left_out

    def _read(self, reader: CacheFileReader, slots: Slots, progress: bool) -> None:
        """Check every piece of KV, and copy the tokens that have a slot into it."""
        num_tokens = reader.tree.num_tokens
        buffers = self._buffers(num_tokens)
        checked: deque[Future[None]] = deque()
        with _bar("loading", num_tokens, progress) as bar:
            for start, end in kv_pieces(num_tokens, self.format):
                if len(checked) == len(buffers):
                    checked.popleft().result()
                buffer = buffers[0]
                buffers.rotate(-1)
                buffer.wait()
                checked.append(reader.read(buffer.bytes(end - start)))
                self._scatter(buffer, slots[start:end])
                bar.update(end - start)
            for future in checked:
                future.result()
        for buffer in buffers:  # no copy may outlive it
            buffer.wait()

    def _gather(self, slots: Slots, buffer: _Buffer) -> None:
        """Start to copy the KV of `slots` `[n]` (host slot s is -s) to the first n tokens of a buffer."""
        pool = self.kv_pool.buffer
        here, there = (np.flatnonzero(which).astype(np.int32) for which in (slots > 0, slots < 0))
        source, target = (torch.from_numpy(array).to(pool.device) for array in (slots[here], here))
        kv_copy(pool, source, buffer.by_layer, target, impl=self.impl)
        buffer.copied()
        if self.host_pool is not None:
            source, target = torch.from_numpy(-slots[there]), torch.from_numpy(there)
            kv_copy(self.host_pool.buffer, source, buffer.by_layer, target, impl="torch")

    def _scatter(self, buffer: _Buffer, slots: Slots) -> None:
        """Start to copy the first n tokens of a buffer to `slots` `[n]` of the pool, except where they are 0."""
        pool = self.kv_pool.buffer
        places = np.flatnonzero(slots).astype(np.int32)
        source, target = (torch.from_numpy(array).to(pool.device) for array in (places, slots[places]))
        kv_copy(buffer.by_layer, source, pool, target, impl=self.impl)
        buffer.copied()

    def _buffers(self, num_tokens: int) -> deque[_Buffer]:
        size = self.format.piece_tokens
        count = min(NUM_BUFFERS, -(-num_tokens // size))
        return deque(_Buffer(self.kv_pool.buffer, min(size, num_tokens)) for _ in range(count))

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
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


class _Buffer:
    """Host memory for KV, `[num_tokens, num_layers, 2, num_kv_heads, head_dim]`."""

    def __init__(self, pool: Tensor, num_tokens: int) -> None:
        num_layers, two, _, *head = pool.shape
        self.memory = torch.empty(
            (num_tokens, num_layers, two, *head), dtype=pool.dtype, device="cpu", pin_memory=pool.is_cuda
        )
        self.by_layer = self.memory.permute(1, 2, 0, 3, 4)
        self._done: torch.cuda.Event | None = None
        self._on_gpu = pool.is_cuda

    def bytes(self, num_tokens: int) -> NDArray[np.uint8]:
        """A flat view of the first tokens."""
        flat = self.memory[:num_tokens].view(-1).view(torch.uint8)
        return np.asarray(flat.numpy())

    def copied(self) -> None:
        """Note that a copy from or to it has been queued."""
        if self._on_gpu:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> None:
        """Wait until that copy has ended."""
        if self._done is not None:
            self._done.synchronize()


def _bar(what: str, num_tokens: int, shown: bool) -> tqdm[Any]:
    return tqdm(desc=what, total=num_tokens, unit=" tokens", unit_scale=True, disable=not shown, file=sys.stderr)
