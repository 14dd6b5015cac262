"""Compresses an output according to its name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from radixrt.batch.formats.source import zstd_module
from radixrt.errors import BatchFileError
from radixrt.files.standard import STANDARD

_GZIP_LEVEL = 6
_UNKNOWN = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z")  # whose readers would find plain text
_GZIP_WINDOW = 31  # zlib writes gzip: a window of 2^15 bytes, and 16 for the header


class _Encoder(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def check_output_name(path: str | Path) -> None:
    """Raise BatchFileError if an output cannot have that name."""
    if path != STANDARD:
        _encoder(Path(path))


def encoded(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The content of an output file: the bytes of `chunks`, compressed if the name asks for it.

    PATH.gz is compressed by gzip, PATH.zst by zstd, without a time or a name inside: equal bytes make equal files.

    Raises:
        BatchFileError: as in `check_output_name`.
    """
    encoder = _encoder(path)
    if encoder is None:
        yield from chunks
        return
    for chunk in chunks:
        yield encoder.compress(chunk)
    yield encoder.flush()


def _encoder(path: Path) -> _Encoder | None:
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
    if path.suffix in _UNKNOWN:
        raise BatchFileError(
            f"cannot write {path}: {path.suffix} is not written; name it .jsonl, .jsonl.gz or .jsonl.zst"
        )
    return None
