"""Saves the cache to a file and loads it: KV on its way between the pools and the disk."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
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
from radixrt.files.standard import standard_error
from radixrt.kept_cache.cache_file import CacheFileReader, CacheFileWriter, Identity, KVFormat, differences
from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy

# As safetensors names them.
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
NUM_BUFFERS = 4  # pieces that are read or written, hashed and copied at once


@dataclass
class CacheStorage:
    """Saves and loads a cache, while no pass is in flight and no transfer is booked.

    Pieces of KV go through a few host buffers, pinned for a GPU, so the memory does not grow with the cache.
    """

    cache: PrefixCache
    kv_pool: TokenToKVPool
    host_pool: HostKVPool | None
    impl: Impl

    @cached_property
    def format(self) -> KVFormat:
        num_layers, two, _, num_kv_heads, head_dim = self.kv_pool.buffer.shape
        return KVFormat(DTYPE_NAMES[self.kv_pool.buffer.dtype], (num_layers, two, num_kv_heads, head_dim))

    def save(self, path: Path, weights_version: int, identity: Identity, *, progress: bool) -> int:
        """Write all prefixes of a weights version to a file. Returns how many tokens it holds.

        Raises CacheFileError where it cannot be written; an older one is as it was.
        """
        tree, slots = take_snapshot(self.cache.tree, weights_version)
        with (
            self._on_device(),
            CacheFileWriter.open(path, tree, self.format, identity) as writer,
            _bar("saving", tree.num_tokens, progress) as bar,
        ):
            for buffer, count in self._gathered(slots):
                buffer.wait()
                buffer.hash = writer.write(buffer.bytes(count))
                bar.update(count)
            writer.finish()
        return tree.num_tokens

    def load(self, path: Path, weights_version: int, identity: Identity, *, progress: bool) -> tuple[int, int]:
        """Put the prefixes of a file into the tree, under `weights_version`, as far as there are free slots.

        Returns how many tokens were loaded, and how many found none. Raises CacheFileError where the file is
        damaged, or of another identity; nothing has changed then.
        """
        with self._on_device(), CacheFileReader.open(path) as reader:
            differing = differences(reader.identity, identity)
            if not differing and reader.kv != self.format:
                differing.append(f"KV is {reader.kv} in the file, {self.format} in the model")
            if differing:
                raise CacheFileError(f"the cache file {path} is of another model: {'; '.join(differing)}")
            if fault := reader.tree.fault(identity["vocab size"]):
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
        with _bar("loading", len(slots), progress) as bar:
            for piece, buffer in self._pieces(slots):
                buffer.hash = reader.read(buffer.bytes(len(piece)))
                self._scatter(buffer, piece)
                bar.update(len(piece))

    def _gathered(self, slots: Slots) -> Iterator[tuple[_Buffer, int]]:
        """Yield the KV of `slots` in buffers, with the number of its tokens, while the next piece is gathered."""
        before: tuple[_Buffer, int] | None = None
        for piece, buffer in self._pieces(slots):
            self._gather(piece, buffer)
            if before is not None:
                yield before
            before = buffer, len(piece)
        if before is not None:
            yield before

    def _pieces(self, slots: Slots) -> Iterator[tuple[Slots, _Buffer]]:
        """Yield the slots of each piece of KV and a buffer that is free; at the end all of them are free."""
        size, num_tokens = self.format.piece_tokens, len(slots)
        num_buffers = min(NUM_BUFFERS, -(-num_tokens // size))
        buffers = [_Buffer(self.kv_pool.buffer, min(size, num_tokens)) for _ in range(num_buffers)]
        for start, buffer in zip(range(0, num_tokens, size), cycle(buffers), strict=False):
            buffer.wait()
            yield slots[start : start + size], buffer
        for buffer in buffers:
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

    @contextmanager
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
    """Host memory for KV, `[num_tokens, num_layers, 2, num_kv_heads, head_dim]`, that a copy or a hash may use."""

    def __init__(self, pool: Tensor, num_tokens: int) -> None:
        num_layers, two, _, *head = pool.shape
        shape = num_tokens, num_layers, two, *head
        self.memory = torch.empty(shape, dtype=pool.dtype, device="cpu", pin_memory=pool.is_cuda)
        self.by_layer = self.memory.permute(1, 2, 0, 3, 4)
        self.hash: Future[Any] | None = None
        self._copied = torch.cuda.Event() if pool.is_cuda else None  # type: ignore[no-untyped-call]

    def bytes(self, num_tokens: int) -> NDArray[np.uint8]:
        """A flat view of the first tokens."""
        return np.asarray(self.memory[:num_tokens].view(-1).view(torch.uint8).numpy())

    def copied(self) -> None:
        """Note that a copy from or to it has been queued."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until the copy and the hash have ended; raises what the hash raises."""
        if self._copied is not None:
            self._copied.synchronize()
        if self.hash is not None:
            self.hash.result()


def _bar(what: str, num_tokens: int, shown: bool) -> tqdm[Any]:
    return tqdm(
        desc=what, total=num_tokens, unit=" tokens", unit_scale=True, disable=not shown, file=standard_error()
    )
