"""Saves the cache to a file and loads it: KV and states on their way between the pools and the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from radixrt.cache.snapshot import Adoption, Loaded, Saved, take_snapshot
from radixrt.engine.signals import deferred
from radixrt.errors import CacheFileError
from radixrt.files.standard import standard_error
from radixrt.kept_cache.cache_file import (
    STATES,
    CacheFileReader,
    CacheFileWriter,
    Formats,
    Identity,
    RowFormat,
    differences,
)
from radixrt.kept_cache.parts import RowPart

# As safetensors names them.
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
NUM_BUFFERS = 4  # pieces that are read or written, hashed and copied at once


class OtherParts(Protocol):
    """The parts of rows that other ranks have. Each copies its own from or to buffers that all of them map."""

    def buffers(self, name: str, count: int, num_rows: int) -> AbstractContextManager[Tensor]:
        """Memory `[count, num_rows, ...]` for whole rows of a tensor, pinned for a GPU."""

    def gather(self, buffer: int, slots: Slots) -> None:
        """Start `RowPart.gather` into a buffer, on all of them."""

    def scatter(self, buffer: int, slots: Slots) -> None:
        """Start `RowPart.scatter` of a buffer, on all of them."""

    def wait(self, buffer: int) -> None:
        """Wait until what was started of a buffer has ended. Raises DeviceLostError where a rank is lost."""


@dataclass
class CacheStorage:
    """Saves and loads a cache, while no pass is in flight and no transfer is booked.

    Pieces of rows go through a few host buffers, pinned for a GPU, so the memory does not grow with the cache.
    Where ranks hold a model together, the first one alone has the tree and the file; `others` have their parts.
    """

    cache: PrefixCache
    parts: Mapping[str, RowPart]  # by the name of the tensor, those of tokens first
    others: OtherParts | None = None

    @cached_property
    def formats(self) -> Formats:
        return {name: RowFormat(DTYPE_NAMES[part.dtype], part.row_shape) for name, part in self.parts.items()}

    def save(self, path: Path, weights_version: int, identity: Identity, *, progress: bool) -> Saved:
        """Write all prefixes of a weights version to a file.

        Raises CacheFileError where it cannot be written; an older one is as it was.
        """
        tree, slots, states = take_snapshot(self.cache.tree, weights_version)
        with self._on_device(), CacheFileWriter.open(path, tree, self.formats, identity) as writer:
            for name in self.parts:
                self._write(writer, name, states[states != 0] if name in STATES else slots, progress)
            writer.finish()
        return Saved(tree.num_tokens, tree.num_states)

    def load(self, path: Path, weights_version: int, identity: Identity, *, progress: bool) -> Loaded:
        """Put the prefixes of a file into the tree, under `weights_version`, as far as there are free slots, and
        their states, as far as there are free ones.

        Raises CacheFileError where the file is damaged, or of another identity; nothing has changed then.
        """
        with self._on_device(), CacheFileReader.open(path) as reader:
            differing = differences(reader.identity, identity)
            if not differing:
                told = [{name: str(rows) for name, rows in of.items()} for of in (reader.formats, self.formats)]
                differing = differences(*told)
            if differing:
                raise CacheFileError(f"the cache file {path} is of another model: {'; '.join(differing)}")
            if fault := reader.tree.fault(identity["vocab size"]):
                raise CacheFileError(f"the cache file {path} cannot be used: {fault}")
            arriving: Adoption | None = None
            try:
                with deferred():
                    adoption = arriving = self.cache.begin_adoption(reader.tree, weights_version)
                # Unchecked rows go to slots and states that nothing reads.
                states = adoption.states[reader.tree.has_state > 0]
                for name in self.parts:
                    self._read(reader, name, states if name in STATES else adoption.slots, progress)
                with deferred():
                    self.cache.adopt(adoption)
                    arriving = None
            finally:
                if arriving is not None:
                    with deferred():
                        self.cache.cancel_adoption(arriving)
        return Loaded(adoption.num_taken, adoption.left_out, adoption.num_taken_states, adoption.left_out_states)

    def _on_device(self) -> AbstractContextManager[None]:
        return next(iter(self.parts.values())).on_device()  # all parts are on one

    def _write(self, writer: CacheFileWriter, name: str, slots: Slots, progress: bool) -> None:
        """Write the rows of `slots`, which may be the host's: see `RowPart.gather`."""
        with self._buffers(name, len(slots)) as buffers, _bar("saving", name, len(slots), progress) as bar:
            for buffer, count in self._gathered(name, slots, buffers):
                buffer.wait()
                buffer.hash = writer.write(buffer.bytes(count))
                bar.update(count)

    def _read(self, reader: CacheFileReader, name: str, slots: Slots, progress: bool) -> None:
        """Check every piece of a tensor's rows, and copy those that have a slot into it."""
        with self._buffers(name, len(slots)) as buffers, _bar("loading", name, len(slots), progress) as bar:
            for piece, buffer in self._pieces(name, slots, buffers):
                buffer.hash = reader.read(buffer.bytes(len(piece)))
                buffer.scatter(piece)
                bar.update(len(piece))

    def _gathered(self, name: str, slots: Slots, buffers: Sequence[_Buffer]) -> Iterator[tuple[_Buffer, int]]:
        """Yield the rows of `slots` in buffers, with their number, while the next piece is gathered."""
        before: tuple[_Buffer, int] | None = None
        for piece, buffer in self._pieces(name, slots, buffers):
            buffer.gather(piece)
            if before is not None:
                yield before
            before = buffer, len(piece)
        if before is not None:
            yield before

    @contextmanager
    def _buffers(self, name: str, num_rows: int) -> Iterator[list[_Buffer]]:
        """Buffers for pieces of so many rows; in the end nothing uses them any more."""
        piece_rows, part, others = self.formats[name].piece_rows, self.parts[name], self.others
        size, count = min(piece_rows, num_rows), min(NUM_BUFFERS, -(-num_rows // piece_rows))
        with part.buffers(count, size) if others is None else others.buffers(name, count, size) as pieces:
            buffers = [_Buffer(nth, piece, part, others) for nth, piece in enumerate(pieces)]
            try:
                yield buffers
            finally:  # others that map the memory may let go of it
                wait([buffer.hash for buffer in buffers if buffer.hash is not None])

    def _pieces(self, name: str, slots: Slots, buffers: Sequence[_Buffer]) -> Iterator[tuple[Slots, _Buffer]]:
        """Yield the slots of each piece of rows and a buffer that is free; at the end all of them are free."""
        size = self.formats[name].piece_rows
        for start, buffer in zip(range(0, len(slots), size), cycle(buffers), strict=False):
            buffer.wait()
            yield slots[start : start + size], buffer
        for buffer in buffers:
            buffer.wait()


class _Buffer:
    """Host memory for rows, `[num_rows, ...]`, that a copy or a hash may use."""

    def __init__(self, nth: int, memory: Tensor, part: RowPart, others: OtherParts | None) -> None:
        self.memory, self._nth, self._part, self._others = memory, nth, part, others
        self.hash: Future[Any] | None = None
        is_on_gpu = part.device.type == "cuda"
        self._copied = torch.cuda.Event() if is_on_gpu else None  # type: ignore[no-untyped-call]

    def bytes(self, num_rows: int) -> NDArray[np.uint8]:
        """A flat view of the first rows."""
        return np.asarray(self.memory[:num_rows].view(-1).view(torch.uint8).numpy())

    def gather(self, slots: Slots) -> None:
        """Start to copy `slots` `[n]` to the first n rows."""
        if self._others is not None:
            self._others.gather(self._nth, slots)
        self._part.gather(slots, self.memory)
        self.copied()

    def scatter(self, slots: Slots) -> None:
        """Start to copy the first n rows to `slots` `[n]`, except where they are 0."""
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


def _bar(what: str, name: str, num_rows: int, shown: bool) -> tqdm[Any]:
    options: dict[str, Any] = {"unit": " tokens", "desc": what}
    if name in STATES:
        options = {"unit": " states", "desc": f"{what} {name}"}
    return tqdm(total=num_rows, unit_scale=True, disable=not shown, file=standard_error(), **options)
