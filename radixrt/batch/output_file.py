"""An output file that gets its name when it is whole, plain or compressed."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Protocol

from radixrt.batch.source import STANDARD, place_name, zstd_module
from radixrt.errors import BatchFileError

_GZIP_LEVEL = 6
_GZIP_WINDOW = 31  # zlib writes gzip: a window of 2^15 bytes, and 16 for the header


class _Encoder(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class OutputFile:
    """Bytes appended to `PATH.partial`, which `finish` makes durable and renames to PATH.

    PATH.gz is compressed by gzip, PATH.zst by zstd, without a time or a name inside: the same bytes make the same
    file. "-" is standard output, which has no partial file and no name to get.

    Leaving the context without `finish` is `abort`.

    Attributes:
        partial: where the bytes stand until `finish`; None for standard output.

    Raises:
        BatchFileError: there is a partial file and `overwrite` is False; PATH is of a kind that cannot be written;
            or the disk refuses: nothing is tried again then, for a second fsync may succeed with data lost. Only
            if the folder cannot be made durable, PATH is the new file all the same.
    """

    def __init__(self, path: str | Path, *, overwrite: bool) -> None:
        self._path = None if path == STANDARD else Path(path)
        self._encoder = None if self._path is None else _encoder(self._path)
        self.partial = None if self._path is None else partial_path(self._path)
        self._name = place_name(self.partial or STANDARD, "output")
        mode: Literal["wb", "xb"] = "wb" if overwrite else "xb"
        try:
            self._file = _standard_output() if self.partial is None else open(self.partial, mode)  # noqa: SIM115
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def closed(self) -> bool:
        """Whether it has ended: by `finish`, by `abort`, or because the disk refused."""
        return self._file.closed

    def write(self, data: bytes) -> None:
        """Append `data`, such as a line with its newline."""
        with self._refusals():
            self._file.write(data if self._encoder is None else self._encoder.compress(data))

    def flush(self) -> None:
        """Hand what was written to the operating system, so that others see it.

        A compressed file is shown as its blocks become full: they would be larger if they were cut for this.
        """
        with self._refusals():
            self._file.flush()

    def finish(self) -> None:
        """Make the file durable, give it its name, and make that durable."""
        with self._refusals():
            self._end()
            if self._path is not None and self.partial is not None:
                os.replace(self.partial, self._path)
                _sync_folder(self._path.parent)

    def abort(self) -> None:
        """Close what is not finished. The partial file keeps what was written, and can be read to its end."""
        if not self._file.closed:
            with self._refusals():
                self._end()

    def _end(self) -> None:
        if self._encoder is not None:
            self._file.write(self._encoder.flush())
        self._file.flush()
        if self.partial is not None:
            os.fsync(self._file.fileno())
        self._file.close()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> BatchFileError:
        return BatchFileError(f"cannot write {self._name}: {error.strerror or error}")


def partial_path(path: Path) -> Path:
    """Where the records of `path` stand until it is whole."""
    return path.with_name(path.name + ".partial")


def check_output_name(path: str | Path) -> None:
    """Raise BatchFileError where an output of that name cannot be written, whatever is on the disk."""
    if path != STANDARD:
        _encoder(Path(path))


def encoded(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """What is to stand in a file of that name for the bytes of `chunks`: they themselves, or compressed."""
    encoder = _encoder(path)
    if encoder is None:
        yield from chunks
        return
    for chunk in chunks:
        yield encoder.compress(chunk)
    yield encoder.flush()


def _encoder(path: Path) -> _Encoder | None:
    """What compresses a file, by its name."""
    if path.suffix == ".gz":
        return zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    if path.suffix in (".zst", ".zstd"):
        zstd = zstd_module(str(path))
        compressor: _Encoder = zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})
        return compressor
    if path.suffix == ".parquet":
        raise BatchFileError(
            f"cannot write {path}: records are JSON lines; name it .jsonl, .jsonl.gz or .jsonl.zst"
        )
    return None


def _standard_output() -> BinaryIO:
    """A file of our own on standard output: if its reader goes away, Python's is not left with unsent bytes."""
    if sys.stdout is None:
        raise OSError("it is closed")
    sys.stdout.flush()
    return open(os.dup(sys.stdout.fileno()), "wb")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
