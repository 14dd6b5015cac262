"""The token ids of many prompts, on disk: they are mapped into memory, and never all of them resident.

A store is a folder with two files of little-endian numbers: `tokens.i32`, the ids of all prompts one after the
other, and `offsets.i64`, N + 1 places in it, of which prompt i begins at the i-th and ends at the next. A million
prompts of 1,000 tokens are 4 GB and 8 MB.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from radixrt.arrays import Int32Array, Int64Array
from radixrt.errors import BatchFileError
from radixrt.files.disk import file_error, new_file

TOKENS_FILE, OFFSETS_FILE = "tokens.i32", "offsets.i64"


class TokenStore:
    """Read-only token ids of N prompts, some of which may be empty.

    Args:
        tokens: `[T]` int32, none negative.
        offsets: `[N + 1]` int64, ascending, from 0 to T.

    Raises:
        ValueError: the offsets do not fit the tokens.
    """

    def __init__(self, tokens: Int32Array, offsets: Int64Array) -> None:
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets of {len(offsets) - 1} prompts do not divide {len(tokens)} tokens")
        self.tokens = tokens
        self.offsets = offsets
        self._mapping: mmap.mmap | None = None

    @classmethod
    def of(cls, prompts: Iterable[Sequence[int] | npt.NDArray[np.integer]]) -> TokenStore:
        """A store in memory, for a small list."""
        listed = [_checked(prompt) for prompt in prompts]
        offsets = np.zeros(len(listed) + 1, dtype=np.int64)
        np.cumsum([len(prompt) for prompt in listed], out=offsets[1:])
        return cls(np.concatenate([np.zeros(0, dtype=np.int32), *listed]), offsets)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open the store that a `TokenWriter` has finished.

        Raises:
            BatchFileError: there is none, or it is cut short.
            JournalError: the disk fails.
        """
        try:
            offsets, _ = _mapped(folder / OFFSETS_FILE, np.dtype("<i8"))
            tokens, mapping = _mapped(folder / TOKENS_FILE, np.dtype("<i4"))
            store = cls(tokens, offsets)
        except OSError as error:
            raise file_error(f"cannot read the tokens in {folder}", error) from error
        except ValueError as error:
            raise BatchFileError(f"the tokens in {folder} are not whole ({error}); remove it") from error
        store._mapping = mapping
        return store

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, prompt: int) -> Int32Array:
        """The tokens of one prompt `[n]`, a view."""
        return self.tokens[self.offsets[prompt] : self.offsets[prompt + 1]]

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each prompt, `[N]`."""
        return np.diff(self.offsets)

    def forget(self) -> None:
        """Let the operating system drop pages that were read. Reading stays possible."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


class TokenWriter:
    """Writes a store, prompt after prompt. Leaving the context without `finish` removes it.

    Args:
        folder: made if there is none; a store in it is replaced.

    Raises:
        BatchFileError: the files cannot be made.
        JournalError: the disk refuses. Nothing is tried again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_prompts = 0
        self.num_tokens = 0
        self._files: list[BinaryIO] = []
        with self._refusals():
            folder.mkdir(exist_ok=True)
            for name in (OFFSETS_FILE, TOKENS_FILE):
                self._files.append(new_file(folder / name))
            self._write(0, np.zeros(1, dtype=np.int64))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_closed:
            self._abandon()

    def append(self, prompts: Sequence[npt.NDArray[np.integer]]) -> None:
        """Add prompts, each `[n >= 0]` token ids.

        Raises:
            ValueError: an id is negative or does not fit in int32. Nothing is added then.
        """
        if not prompts:
            return
        if all(isinstance(prompt, np.ndarray) and prompt.dtype == np.int32 for prompt in prompts):
            joined = _checked(np.concatenate(prompts))  # a look at all takes less time than one at each
        else:
            joined = np.concatenate([_checked(prompt) for prompt in prompts])
        ends = self.num_tokens + np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64)
        with self._refusals():
            self._write(1, joined)
            self._write(0, ends)
        self.num_prompts += len(prompts)
        self.num_tokens = int(ends[-1])

    def flush(self) -> None:
        """Let who reads the files find all that was added."""
        with self._refusals():
            for file in self._files:
                file.flush()

    def finish(self) -> TokenStore:
        """Close the files and open the store. It is not made durable, since it can be made again."""
        with self._refusals():
            for file in self._files:
                file.close()
        return TokenStore.open(self.folder)

    @property
    def _is_closed(self) -> bool:
        return all(file.closed for file in self._files)

    def _write(self, file: int, numbers: npt.NDArray[np.integer]) -> None:
        little = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
        self._files[file].write(little.data.cast("B"))

    def _abandon(self) -> None:
        for file in self._files:
            with suppress(OSError):  # the buffered rest is not needed
                file.close()
        for name in (OFFSETS_FILE, TOKENS_FILE):
            with suppress(OSError):
                os.unlink(self.folder / name)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._abandon()
            raise file_error(f"cannot write the tokens in {self.folder}", error) from error


def _checked(prompt: Sequence[int] | npt.NDArray[np.integer]) -> Int32Array:
    ids = np.asarray(prompt)
    if len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
        raise ValueError(f"token ids from {ids.min()} to {ids.max()} are not all in 0..{2**31 - 1}")
    return ids.astype(np.int32, copy=False)


def _mapped(path: Path, dtype: np.dtype[np.signedinteger]) -> tuple[npt.NDArray[Any], mmap.mmap | None]:
    """The numbers in a file and its mapping; an empty file has none."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size % dtype.itemsize:
            raise ValueError(f"{path.name} has {size} bytes")
        if not size:
            return np.zeros(0, dtype), None
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, dtype), mapping
