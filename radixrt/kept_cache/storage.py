"""Saves the cache to a file and loads it: KV on its way between the pools and the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import Slots
from radixrt.cache.snapshot import Adoption, take_snapshot
from radixrt.engine.signals import deferred
from radixrt.errors import CacheFileError
from radixrt.files.standard import standard_error
from radixrt.kept_cache.cache_file import CacheFileReader, CacheFileWriter, Identity, KVFormat, differences
from radixrt.kept_cache.kv_part import KVPart

# As safetensors names them.
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
NUM_BUFFERS = 4  # pieces that are read or written, hashed and copied at once


class OtherParts(Protocol):
    """The parts of KV that other ranks have. Each copies its own from or to buffers that all of them map."""

    def buffers(self, count: int, num_tokens: int) -> AbstractContextManager[Tensor]:
        """Memory `[count, num_tokens, num_layers, 2, num_kv_heads, head_dim]` of all heads, pinned for a GPU."""

    def gather(self, buffer: int, slots: Slots) -> None:
        """Start `KVPart.gather` into a buffer, on all of them."""

    def scatter(self, buffer: int, slots: Slots) -> None:
        """Start `KVPart.scatter` of a buffer, on all of them."""

    def wait(self, buffer: int) -> None:
        """Wait until what was started of a buffer has ended. Raises DeviceLostError where a rank is lost."""


@dataclass
class CacheStorage:
    """Saves and loads a cache, while no pass is in flight and no transfer is booked.

    Pieces of KV go through a few host buffers, pinned for a GPU, so the memory does not grow with the cache. Where
    ranks hold a model together, the first one alone has the tree and the file; `others` have their parts of KV.
    """

    cache: PrefixCache
    part: KVPart
    others: OtherParts | None = None

    @cached_property
    def format(self) -> KVFormat:
        return KVFormat(DTYPE_NAMES[self.part.dtype], self.part.token_shape)

    def save(self, path: Path, weights_version: int, identity: Identity, *, progress: bool) -> int:
        """Write all prefixes of a weights version to a file. Returns how many tokens it holds.

        Raises CacheFileError where it cannot be written; an older one is as it was.
        """
        tree, slots = take_snapshot(self.cache.tree, weights_version)
        with (
            self.part.on_device(),
            CacheFileWriter.open(path, tree, self.format, identity) as writer,
            self._buffers(len(slots)) as buffers,
            _bar("saving", tree.num_tokens, progress) as bar,
        ):
            for buffer, count in self._gathered(slots, buffers):
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
        with self.part.on_device(), CacheFileReader.open(path) as reader:
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
        with self._buffers(len(slots)) as buffers, _bar("loading", len(slots), progress) as bar:
            for piece, buffer in self._pieces(slots, buffers):
                buffer.hash = reader.read(buffer.bytes(len(piece)))
                buffer.scatter(piece)
                bar.update(len(piece))

    def _gathered(self, slots: Slots, buffers: Sequence[_Buffer]) -> Iterator[tuple[_Buffer, int]]:
        """Yield the KV of `slots` in buffers, with the number of its tokens, while the next piece is gathered."""
        before: tuple[_Buffer, int] | None = None
        for piece, buffer in self._pieces(slots, buffers):
            buffer.gather(piece)
            if before is not None:
                yield before
            before = buffer, len(piece)
        if before is not None:
            yield before

    @contextmanager
    def _buffers(self, num_tokens: int) -> Iterator[list[_Buffer]]:
        """Buffers for pieces of so many tokens; in the end nothing uses them any more."""
        size = min(self.format.piece_tokens, num_tokens)
        count = min(NUM_BUFFERS, -(-num_tokens // self.format.piece_tokens))
        memory = self.part.buffers if self.others is None else self.others.buffers
        with memory(count, size) as pieces:
            buffers = [_Buffer(nth, piece, self.part, self.others) for nth, piece in enumerate(pieces)]
            try:
                yield buffers
            finally:  # others that map the memory may let go of it
                wait([buffer.hash for buffer in buffers if buffer.hash is not None])

    def _pieces(self, slots: Slots, buffers: Sequence[_Buffer]) -> Iterator[tuple[Slots, _Buffer]]:
        """Yield the slots of each piece of KV and a buffer that is free; at the end all of them are free."""
        size, num_tokens = self.format.piece_tokens, len(slots)
        for start, buffer in zip(range(0, num_tokens, size), cycle(buffers), strict=False):
            buffer.wait()
            yield slots[start : start + size], buffer
        for buffer in buffers:
            buffer.wait()


class _Buffer:
    """Host memory for KV, `[num_tokens, num_layers, 2, num_kv_heads, head_dim]`, that a copy or a hash may use."""

    def __init__(self, nth: int, memory: Tensor, part: KVPart, others: OtherParts | None) -> None:
        self.memory, self._nth, self._part, self._others = memory, nth, part, others
        self.hash: Future[Any] | None = None
        is_on_gpu = part.device.type == "cuda"
        self._copied = torch.cuda.Event() if is_on_gpu else None  # type: ignore[no-untyped-call]

    def bytes(self, num_tokens: int) -> NDArray[np.uint8]:
        """A flat view of the first tokens."""
        return np.asarray(self.memory[:num_tokens].view(-1).view(torch.uint8).numpy())

    def gather(self, slots: Slots) -> None:
        """Start to copy the KV of `slots` `[n]` to the first n tokens."""
        if self._others is not None:
            self._others.gather(self._nth, slots)
        self._part.gather(slots, self.memory)
        self.copied()

    def scatter(self, slots: Slots) -> None:
        """Start to copy the first n tokens to `slots` `[n]`, except where they are 0."""
        if self._others is not None:
            self._others.scatter(self._nth, slots)
        self._part.scatter(self.memory, slots)
        self.copied()

    def copied(self) -> None:
        """Note that a copy from or to it has been queued."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until the copies and the hash have ended; raises what the hash raises."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._others is not None:
            self._others.wait(self._nth)
        if self.hash is not None:
            self.hash.result()


def _bar(what: str, num_tokens: int, shown: bool) -> tqdm[Any]:
    return tqdm(
        desc=what, total=num_tokens, unit=" tokens", unit_scale=True, disable=not shown, file=standard_error()
    )
