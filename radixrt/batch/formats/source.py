"""The lines of a batch's input, read one by one: plain or compressed JSON lines, standard input, or parquet."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from radixrt.batch.formats.strict_json import loads
from radixrt.checks import short
from radixrt.errors import BatchFileError
from radixrt.files.standard import STANDARD, place_name

MAX_LINE = 64 * 2**20  # bytes

BOM = b"\xef\xbb\xbf"  # a byte order mark, which may come before JSON
_BLANK = b" \t\r\n"  # white space in JSON
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of metadata, which may come first
_NEEDS_MEMORY = "requires too much memory"  # what zstd says of windows above 2^27 bytes
_PARQUET = b"PAR1"
_NEVER_SHORT = (".gz", ".zst", ".zstd", ".parquet")  # formats in which even an empty file has four bytes
_BUFFER = 2**20
_ROWS = 256  # of parquet at once
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # a column that pandas adds


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be read.

    Attributes:
        message: the reason.
    """

    message: str


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


def read_lines(
    source: str | Path, *, max_line: int = MAX_LINE, seen: Callable[[int], object] = lambda count: None
) -> Iterator[tuple[int, bytes | BadLine]]:
    """Yield the lines that are not blank, stripped, each with its place in the file from 0.

    The first bytes of the file tell its format: gzip, zstd, parquet, otherwise plain JSON lines. A byte order mark
    is skipped, also before later lines: files may have been joined. Each row of a parquet file is a line: a JSON
    object with a key for each column that is not null.

    At most one line of JSON and a buffer of a megabyte are in memory, or some hundred rows of parquet.

    Args:
        source: a file, or "-" for standard input, where parquet cannot be read.
        max_line: bytes of the longest line. A longer one becomes a BadLine.
        seen: called with the number of bytes whenever some of the file were read, as they are in the file.

    Raises:
        BatchFileError: the file cannot be read to its end: it is damaged or cut short, or a package is missing.
            The message says how far it was read; all lines before that have been yielded.
    """
    name = place_name(source, "input")
    with _opened(source, name) as file:
        head = _head(file, name)
        if head == _PARQUET:
            if source == STANDARD:
                raise BatchFileError(
                    f"{name} is a parquet file, which can be read from a file only: give its path"
                )
            yield from _rows(Path(source), name, max_line, seen)
            return
        if source != STANDARD and len(head) < 4 and str(source).endswith(_NEVER_SHORT):
            raise BatchFileError(
                f"cannot read {name}: it is cut short, it has only {len(head)} bytes: copy it anew"
            )
        yield from _json_lines(io.BufferedReader(_Rejoined(head, file, seen), _BUFFER), head, name, max_line)


def is_plain(path: Path) -> bool:
    """Whether a file has plain lines, by its first bytes: neither gzip, nor zstd, nor parquet.

    Raises BatchFileError where it cannot be read.
    """
    with _opened(path, str(path)) as file:
        head = _head(file, str(path))
    is_compressed = head.startswith(_GZIP) or head == _ZSTD or _ZSTD_SKIPPABLE.fullmatch(head) is not None
    return not is_compressed and head != _PARQUET


@contextmanager
def _opened(source: str | Path, name: str) -> Iterator[IO[bytes]]:
    if source == STANDARD:
        if not hasattr(sys.stdin, "buffer"):
            raise BatchFileError(f"cannot read {name}: it is closed, or not that of a process")
        yield sys.stdin.buffer
        return
    try:
        file = open(source, "rb")  # noqa: SIM115
    except OSError as error:
        raise BatchFileError(f"cannot read {name}: {error.strerror or error}") from error
    with file:
        yield file


def _head(file: IO[bytes], name: str) -> bytes:
    """The first four bytes, or all if there are fewer."""
    head = b""
    try:
        while len(head) < 4 and (more := file.read(4 - len(head))):
            head += more
    except OSError as error:
        raise BatchFileError(f"cannot read {name}: {error.strerror or error}") from error
    return head


class _Rejoined(io.RawIOBase):
    """A file whose head was already read, from its beginning: standard input cannot seek back."""

    def __init__(self, head: bytes, rest: Any, seen: Callable[[int], object]) -> None:
        self._head = head
        self._rest = rest
        self._seen = seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._head:
            taken = min(len(buffer), len(self._head))
            buffer[:taken] = self._head[:taken]
            self._head = self._head[taken:]
            self._seen(taken)
            return taken
        count: int = self._rest.readinto1(buffer)
        self._seen(count)
        return count


def _json_lines(
    file: io.BufferedReader, head: bytes, name: str, max_line: int
) -> Iterator[tuple[int, bytes | BadLine]]:
    lines, damage = _decompressed(file, head, name)
    count = size = 0
    try:
        while line := lines.readline(max_line + 1):
            length = len(line)
            too_long = length > max_line and not line.endswith(b"\n")
            while too_long and not line.endswith(b"\n") and (line := lines.readline(_BUFFER)):
                length += len(line)
            index, count, size = count, count + 1, size + length
            if too_long:
                yield index, BadLine(f"the line has {length:,} bytes; at most {max_line:,} are read")
                continue
            text = line.removeprefix(BOM).strip(_BLANK)
            line = b""  # free it, unless the caller keeps it, while the next one is read
            if text:
                yield index, text
            text = b""
    except damage as error:
        if _NEEDS_MEMORY in str(error):
            raise BatchFileError(
                f"{name} is compressed by zstd with a window of more than 128 MiB, which is not read (after line "
                f"{count:,}): decompress it first (zstd -d --long=31), or compress it without --long"
            ) from error
        what = "is cut short" if isinstance(error, EOFError) else f"is damaged ({error})"
        raise BatchFileError(f"{name} {what} after line {count:,} ({size:,} bytes): copy it anew") from error
    except OSError as error:
        reason = error.strerror or error
        raise BatchFileError(f"cannot read {name} beyond line {count:,} ({size:,} bytes): {reason}") from error


def _decompressed(file: io.BufferedReader, head: bytes, name: str) -> tuple[_Lines, tuple[type[Exception], ...]]:
    """The text of a file, and the exceptions that reading it raises if it is damaged or cut short."""
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file), (EOFError, zlib.error, gzip.BadGzipFile)
    if head == _ZSTD or _ZSTD_SKIPPABLE.fullmatch(head):
        zstd = zstd_module(name)
        return zstd.ZstdFile(file), (EOFError, zstd.ZstdError)
    return file, ()


def zstd_module(name: str) -> Any:
    """Python's zstd module, or backports.zstd before Python 3.14. Raises BatchFileError."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise BatchFileError(
            f"{name} is for zstd, which this Python does not have ({error}): pip install backports.zstd"
        ) from error
    return zstd


def _rows(
    path: Path, name: str, max_line: int, seen: Callable[[int], object]
) -> Iterator[tuple[int, bytes | BadLine]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise BatchFileError(
            f"{name} is a parquet file, and pyarrow is not installed ({error}): pip install pyarrow"
        ) from error
    count = 0
    try:
        with parquet.ParquetFile(path) as file:
            size = path.stat().st_size
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    index, count = count, count + 1
                    yield index, _row_line(row, max_line)
                seen(size * batch.num_rows // max(1, file.metadata.num_rows))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise BatchFileError(f"cannot read {name} beyond row {count:,}: {reason}") from error


def _row_line(row: dict[str, Any], max_line: int) -> bytes | BadLine:
    """A row of a parquet file as a JSON line."""
    try:
        line = {
            column: _cell(column, value)
            for column, value in row.items()
            if value is not None and not _PANDAS_INDEX.fullmatch(column)
        }
    except ValueError as error:
        return BadLine(f"the row is not JSON: {error}")
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
    except (TypeError, ValueError) as error:
        return BadLine(_not_json(line, error))
    if len(text) > max_line:
        return BadLine(f"the row has {len(text):,} bytes as JSON; at most {max_line:,} are read")
    return text


def _not_json(row: dict[str, Any], error: Exception) -> str:
    """Which column of a row JSON cannot say."""
    for column, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as fault:
            remedy = "; make the column text, or leave it out" if isinstance(fault, TypeError) else ""
            return f"the row is not JSON: column {short(column)!r}: {fault}{remedy}"
    return f"the row is not JSON: {error}"


def _cell(column: str, value: Any) -> Any:
    """A cell of a column. Raises ValueError."""
    if column == "metadata":
        return value
    if column in ("messages", "tools", "chat_template_kwargs", "sampling_params", "body") and isinstance(
        value, str
    ):
        try:
            return loads(value.encode())
        except ValueError as error:
            raise ValueError(f"the text in {column} {error}") from None
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """A value without the keys whose value is null: all structs of a column have the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
