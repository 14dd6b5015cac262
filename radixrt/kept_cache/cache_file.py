"""A kept cache as a safetensors file: the tree, the KV of its tokens, states, and a hash of everything.

    u64, little-endian: bytes of the header
    header: JSON, padded with spaces to a multiple of 8 bytes; its `__metadata__` has radixrt_cache_version,
        identity and tenants, the latter two as JSON
    tensors, one after the other:
        node_last_used  I64 [N]               the arrays of a TreeSnapshot
        node_lengths    I32 [N]
        node_parents    I32 [N]
        node_tenants    I32 [N]
        tokens          I32 [T]
        node_has_state  I32 [N]               in files of version 2 alone, as conv and recurrent
        kv              any [T, num_layers, 2, num_kv_heads, head_dim], a row a token; models that keep other
                        parts of tokens have these, by their names
        conv            any [S, num_layers, conv_channels, conv_width - 1], a row for each node that has a state
        recurrent       F32 [S, num_layers, num_heads, key_dim, value_dim], likewise
        piece_sha256    U8  [P, 32]           of each piece: the tensors above, with those of rows cut into runs
        sha256          U8  [32]              of the header with its length, and of piece_sha256

Version 2 is for models that keep states, 1 for all others. The identity is what KV and states depend on. Nothing
in a file is trusted: hashes and sizes are checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixrt.cache.snapshot import TreeSnapshot
from radixrt.checks import short
from radixrt.errors import BatchFileError, CacheFileError
from radixrt.files.atomic_file import AtomicFile
from radixrt.files.path_roles import refusal_of_target

VERSION, WITH_STATES = "1", "2"
PIECE_BYTES = 64 * 2**20  # of rows, unless one alone has more; part of the format
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}

_MAX_HEADER_BYTES = 2**26
_DIGEST_BYTES = 32
_HASHERS = min(8, os.cpu_count() or 1)
_ARRAYS = {  # by the field of TreeSnapshot: name and dtype in the file
    "last_used": ("node_last_used", "I64"),
    "lengths": ("node_lengths", "I32"),
    "parents": ("node_parents", "I32"),
    "tenants": ("node_tenants", "I32"),
    "tokens": ("tokens", "I32"),
    "has_state": ("node_has_state", "I32"),
}
STATES = ("conv", "recurrent")  # tensors with a row a state; all others have one a token
_VERSIONS = {VERSION: (), WITH_STATES: STATES}
_NUMPY: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}

Identity = Mapping[str, Any]


@dataclass(frozen=True)
class RowFormat:
    """The layout of a row: safetensors' dtype name, and its shape, see `Part.row_shape`."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {[*self.shape]}"

    @property
    def row_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def piece_rows(self) -> int:
        """Rows in a piece; the last piece may have fewer."""
        return max(1, PIECE_BYTES // max(1, self.row_bytes))


Formats = Mapping[str, RowFormat]  # by the name of the tensor


def _version_of(formats: Formats) -> str:
    states = tuple(name for name in formats if name in STATES)
    return next(version for version, names in _VERSIONS.items() if names == states)


def _arrays_of(version: str) -> dict[str, tuple[str, str]]:
    return {field: named for field, named in _ARRAYS.items() if field != "has_state" or version == WITH_STATES}


def _layout(
    num_nodes: int, num_tokens: int, counts: Mapping[str, int], formats: Formats
) -> dict[str, dict[str, Any]]:
    """The header without its metadata: by name dtype, shape and data_offsets. `counts` are of rows."""
    arrays = _arrays_of(_version_of(formats)).values()
    num_pieces = len(arrays) + sum(-(-counts[name] // rows.piece_rows) for name, rows in formats.items())
    tensors, offset = {}, 0
    for name, dtype, shape in (
        *((name, dtype, [num_tokens if name == "tokens" else num_nodes]) for name, dtype in arrays),
        *((name, rows.dtype, [counts[name], *rows.shape]) for name, rows in formats.items()),
        ("piece_sha256", "U8", [num_pieces, _DIGEST_BYTES]),
        ("sha256", "U8", [_DIGEST_BYTES]),
    ):
        end = offset + ITEM_BYTES[dtype] * math.prod(shape)
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return tensors


class CacheFileWriter:
    """Writes a cache file: `write` for each piece of rows, in order, then `finish`."""

    def __init__(self, head: bytes, file: AtomicFile, hashers: ThreadPoolExecutor) -> None:
        self._head, self._file, self._hashers = head, file, hashers
        self._digests: list[Future[bytes]] = []
        file.write(head)

    @classmethod
    @contextmanager
    def open(
        cls, path: Path, tree: TreeSnapshot, formats: Formats, identity: Identity
    ) -> Iterator[CacheFileWriter]:
        """Begin a file, which `finish` puts in the place of an older one. `formats` are of its tensors of rows, in
        order.

        Raises CacheFileError where the disk refuses, another process is writing the same file, or what is at
        the path is no kept cache.
        """
        check_cache_target(path)
        version = _version_of(formats)
        metadata = {
            "radixrt_cache_version": version,
            "identity": json.dumps(identity),
            "tenants": json.dumps(tree.tenant_names),
        }
        tensors = _layout(len(tree), tree.num_tokens, row_counts(tree, formats), formats)
        header = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        if len(header) > _MAX_HEADER_BYTES:
            raise CacheFileError(f"cannot write {path}: its {len(tree.tenant_names)} tenants have too long names")
        with (
            _refusals(f"cannot write {path}"),
            AtomicFile(path) as file,
            ThreadPoolExecutor(_HASHERS, "cache-file") as hashers,
        ):
            writer = cls(len(header).to_bytes(8, "little") + header, file, hashers)
            for field, (_, dtype) in _arrays_of(version).items():
                writer.write(getattr(tree, field).astype(_NUMPY[dtype]).view(np.uint8))
            yield writer

    def write(self, piece: NDArray[np.uint8]) -> Future[bytes]:
        """Append the next piece, as flat bytes that do not change before the future is done."""
        future = self._hashers.submit(_sha256, piece.data)
        self._digests.append(future)
        self._file.write(piece.data)
        return future

    def finish(self) -> None:
        """Make the file durable and give it its name."""
        digests = b"".join(future.result() for future in self._digests)
        self._file.write(digests)
        self._file.write(_sha256(self._head + digests))
        self._file.finish()


class CacheFileReader:
    """Reads a cache file: `read` for each piece of rows, in order. All else is checked on opening.

    `tree`, `formats` and `identity` are what the writer was given.
    """

    def __init__(self, path: Path, file: BufferedReader, hashers: ThreadPoolExecutor) -> None:
        self._path, self._file, self._hashers = path, file, hashers
        size = os.fstat(file.fileno()).st_size
        prefix = self._bytes(min(8, size))
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise self._error("it is no safetensors file, or cut short in its header")
        header = self._bytes(header_bytes)
        try:
            tensors = json.loads(header)
            metadata = tensors.pop("__metadata__")
            version = metadata["radixrt_cache_version"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._error("it is no cache file of radixrt, or altered") from error
        if not isinstance(version, str) or version not in _VERSIONS:
            read = " and ".join(map(repr, _VERSIONS))
            raise self._error(f"it is of format {version!r}, and this radixrt reads {read}")
        try:
            others = {"piece_sha256", "sha256", *(name for name, _ in _arrays_of(version).values())}
            rows = [*(name for name in tensors if name not in {*others, *STATES}), *_VERSIONS[version]]
            shapes = {name: tensors[name]["shape"] for name in ("node_lengths", "tokens", *rows)}
            if not all(type(count) is int and 0 <= count < 2**31 for shape in shapes.values() for count in shape):
                raise ValueError(f"the shapes {shapes}")
            (num_nodes,), (num_tokens,) = shapes.pop("node_lengths"), shapes.pop("tokens")
            counts = {name: shape[0] for name, shape in shapes.items()}
            self.formats = {name: RowFormat(tensors[name]["dtype"], (*own,)) for name, (_, *own) in shapes.items()}
            expected = _layout(num_nodes, num_tokens, counts, self.formats)
            self.identity, tenants = json.loads(metadata["identity"]), json.loads(metadata["tenants"])
            if tensors != expected or not isinstance(self.identity, dict) or not isinstance(tenants, list):
                raise ValueError("the tensors or the metadata")
            if not all(name is None or type(name) is str for name in tenants):
                raise ValueError("the tenants")
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise self._error("its header has been altered") from error
        whole = 8 + header_bytes + expected["sha256"]["data_offsets"][1]
        if size != whole:
            what = "it is cut short" if size < whole else "something follows its end"
            raise self._error(f"{what}: it has {size:,} bytes in place of {whole:,}")

        begin, end = expected["piece_sha256"]["data_offsets"]
        file.seek(begin, os.SEEK_CUR)
        table = self._bytes(end - begin)
        if _sha256(prefix + header + table) != self._bytes(_DIGEST_BYTES):
            raise self._error("it has been altered: a hash is not that of its header and hashes")
        self._digests = (table[i : i + _DIGEST_BYTES] for i in range(0, len(table), _DIGEST_BYTES))
        file.seek(8 + header_bytes)
        arrays: dict[str, Any] = {"has_state": np.zeros(num_nodes, np.int32)}
        for field, (name, dtype) in _arrays_of(version).items():
            begin, end = expected[name]["data_offsets"]
            data = self._bytes(end - begin)
            if _sha256(data) != next(self._digests):
                raise self._error(f"it has been altered: a hash is not that of {name}")
            arrays[field] = np.frombuffer(data, _NUMPY[dtype]).astype(_NUMPY[dtype].newbyteorder("="))
        self.tree = TreeSnapshot(**arrays, tenant_names=tuple(tenants))
        if counts != row_counts(self.tree, self.formats):
            kept = f"{self.tree.num_tokens} tokens and {self.tree.num_states} states"
            raise self._error(f"its rows are not those of {kept}: {counts}")

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[CacheFileReader]:
        """Open a file. Raises CacheFileError where it cannot be read, is no cache file, or has been altered."""
        unusable = f"the cache file {path} cannot be used"
        if "\0" in str(path):
            raise CacheFileError(f"{unusable}: a path holds no NUL")
        with (
            _refusals(unusable),
            open(path, "rb") as file,
            ThreadPoolExecutor(_HASHERS, "cache-file") as hashers,
        ):
            yield cls(path, file, hashers)

    def read(self, piece: NDArray[np.uint8]) -> Future[None]:
        """Fill flat bytes with the next piece; the future raises CacheFileError if it was altered."""
        self._check_length(self._file.readinto(piece.data), len(piece))
        expected = next(self._digests)

        def check() -> None:
            if _sha256(piece.data) != expected:
                raise self._error("it has been altered: a hash is not that of its KV or states")

        return self._hashers.submit(check)

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        self._check_length(len(data), count)
        return data

    def _check_length(self, length: int, expected: int) -> None:
        if length < expected:
            raise self._error("it has been cut short while it was read")

    def _error(self, reason: str) -> CacheFileError:
        return CacheFileError(f"the cache file {self._path} cannot be used: {reason}")


def row_counts(tree: TreeSnapshot, formats: Formats) -> dict[str, int]:
    """How many rows each tensor has."""
    return {name: tree.num_states if name in STATES else tree.num_tokens for name in formats}


def check_cache_target(path: Path) -> None:
    """Raise CacheFileError unless a kept cache can be written there: no other file with content is replaced."""
    if (refusal := refusal_of_target("the cache file", path)) is not None:
        raise CacheFileError(refusal)
    with _refusals(f"cannot write {path}"):
        if path.exists() and path.stat().st_size and not _is_cache_file(path):
            raise CacheFileError(
                f"the cache file {path} exists and is no kept cache of radixrt; give another name"
            )


def _is_cache_file(path: Path) -> bool:
    """Whether a file begins as a kept cache of any format does."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            return False
        try:
            return "radixrt_cache_version" in json.loads(file.read(header_bytes))["__metadata__"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return False


@contextmanager
def _refusals(message: str) -> Iterator[None]:
    """Raise CacheFileError where the disk refuses."""
    try:
        yield
    except OSError as error:
        raise CacheFileError(f"{message}: {error.strerror or error}") from error
    except BatchFileError as error:
        raise CacheFileError(f"{message}: {error}") from error


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def differences(kept: Identity, own: Identity) -> list[str]:
    """Name each difference between a file's identity and the model's in a phrase."""

    def value(identity: Identity, name: str) -> str:
        return short(str(identity[name])) if name in identity else "not named"

    return [
        f"{name} is {value(kept, name)} in the file, {value(own, name)} in the model"
        for name in dict.fromkeys([*own, *kept])
        if name not in kept or name not in own or kept[name] != own[name]
    ]
