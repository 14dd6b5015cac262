"""The header of a GGUF file, read strictly: no count, length or place in it goes beyond the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from radixrt.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAX_FIELDS, MAX_TENSORS, MAX_TEXTS, MAX_DIMENSIONS = 2**14, 2**18, 2**22, 4
_VERSIONS = (2, 3)
# Types of values: numbers by their dtype, bools as bytes.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
# The fewest bytes that a field, a tensor's entry and a text take.
_FIELD_BYTES, _TENSOR_BYTES, _TEXT_BYTES = 13, 24, 8
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, as it is stored there."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # as a checkpoint has it: the innermost size last
    data: NDArray[np.uint8]  # `[*shape[:-1], bytes of a row]`, a view of the file


@dataclass(frozen=True)
class Header:
    """The fields of a file by their names, and its tensors.

    A field is a number, bool or text, a list of texts, or an array of numbers `[num]` in its own dtype.
    """

    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def field(self, name: str, *types: type) -> Any:
        """The field; None where there is none. Arrays of numbers become lists, unless np.ndarray is asked for.

        Raises ModelError if it is of none of these types, if any are given.
        """
        value = self.fields.get(name)
        if value is not None and types and type(value) not in types:
            wanted = " or ".join(each.__name__ for each in types)
            raise ModelError(f"{name} is of the type {type(value).__name__}, not {wanted}")
        return value.tolist() if isinstance(value, np.ndarray) and np.ndarray not in types else value

    def id(self, name: str, size: int) -> int | None:
        """The field, if it is the id of one of `size` tokens. As llama.cpp does, others are passed over."""
        value = self.field(name)
        return value if type(value) is int and 0 <= value < size else None


def read_header(file: Path) -> Header:
    """Read all but the tensors' data, which stay on the disk. Raises ModelError, which says what is damaged."""
    size = file.stat().st_size
    if size < 24:
        raise ModelError(f"it has {size} bytes, fewer than any GGUF file")
    return _Reading(np.memmap(file, np.uint8, "r").view(np.ndarray)).header()


class _Reading:
    """A place in a file, which moves on with all that is taken there."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.place = data, 0

    def header(self) -> Header:
        if (magic := self.take(4, "the magic").tobytes()) != b"GGUF":
            raise ModelError(f"it begins with {magic!r}, not with GGUF")
        version = self.number(4)
        if version not in _VERSIONS:
            order = ", or in the other byte order" if version & 0xFFFF == 0 else ""
            raise ModelError(f"it is of version {version:,}{order}; 2 and 3 are supported, in little-endian order")
        tensors = self.count("tensors", _TENSOR_BYTES, MAX_TENSORS)
        fields: dict[str, Any] = {}
        for _ in range(self.count("fields", _FIELD_BYTES, MAX_FIELDS)):
            name = self.text("a field's name")
            if name in fields:
                raise ModelError(f"the field {name!r} is there twice")
            fields[name] = self.value(name, int(self.number(4)))
        return Header(fields, self.tensors(tensors, fields.get("general.alignment", 32)))

    def take(self, length: int, what: str) -> NDArray[np.uint8]:
        """`[length] uint8`."""
        left = len(self.data) - self.place
        if length > left:
            raise ModelError(f"{what} would take {length:,} bytes where {left:,} are left of the file")
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self, kind: int, what: str = "a number") -> Any:
        dtype = _NUMBERS[kind]
        value = self.take(dtype.itemsize, what).view(dtype)[0].item()
        return bool(value) if kind == _BOOL else value

    def count(self, what: str, least: int, most: int) -> int:
        """Of things that take `least` bytes each."""
        count, left = int(self.number(10)), len(self.data) - self.place
        if count * least > left:
            raise ModelError(f"it is to hold {count:,} {what}, and {left:,} bytes are left of the file")
        if count > most:
            raise ModelError(f"it is to hold {count:,} {what}, more than {most:,}")
        return count

    def text(self, what: str) -> str:
        try:
            return str(self.take(int(self.number(10, what)), what).tobytes(), "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{what} is not UTF-8: {error}") from error

    def texts(self, what: str, count: int) -> list[str]:
        """As `text` does, in a tenth of the time: there may be a million."""
        found: list[str] = []
        place, data, size, unpack = self.place, self.data.data, len(self.data), _LENGTH.unpack_from
        try:
            for _ in range(count):
                begin = place + _TEXT_BYTES
                place = begin + unpack(data, place)[0]
                if place > size:
                    raise ModelError(f"text {len(found)} of {what} ends at {place:,}, beyond the end of the file")
                found.append(str(data[begin:place], "utf-8"))
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelError(f"text {len(found)} of {what} cannot be read: {error}") from error
        self.place = place
        return found

    def value(self, name: str, kind: int) -> Any:
        if kind == _TEXT:
            return self.text(name)
        if kind in _NUMBERS:
            return self.number(kind, name)
        if kind != _ARRAY:
            raise ModelError(f"{name} is of the type {kind}, which is none of GGUF's")
        kind = int(self.number(4, name))
        if kind == _TEXT:
            return self.texts(name, self.count(f"texts in {name}", _TEXT_BYTES, MAX_TEXTS))
        if kind not in _NUMBERS:
            raise ModelError(f"{name} is a list of the type {kind}; lists hold numbers, bools or texts")
        dtype = _NUMBERS[kind]
        count = self.count(f"values in {name}", dtype.itemsize, len(self.data))
        return self.take(count * dtype.itemsize, name).view(dtype)

    def tensors(self, count: int, alignment: Any) -> dict[str, StoredTensor]:
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ModelError(f"general.alignment is {alignment!r}, not a power of two")
        entries: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(count):
            name = self.text("a tensor's name")
            if name in entries:
                raise ModelError(f"the tensor {name!r} is there twice")
            if not 1 <= (dimensions := self.number(4)) <= MAX_DIMENSIONS:
                raise ModelError(f"the tensor {name} has {dimensions:,} dimensions, not 1 to {MAX_DIMENSIONS}")
            entries[name] = ([self.number(10) for _ in range(dimensions)], self.number(4), self.number(10))
        start = -(-self.place // alignment) * alignment
        found, places = {}, []
        for name, (sizes, kind, offset) in entries.items():
            if offset % alignment:
                raise ModelError(f"the tensor {name} begins at {offset:,}, no multiple of {alignment:,}")
            self.place = min(start + offset, len(self.data))
            found[name] = self.tensor(name, sizes, kind)
            places.append((start + offset, self.place, name))
        places.sort()
        for (_, end, one), (begin, _, other) in pairwise(places):
            if begin < end:
                raise ModelError(f"the tensors {one} and {other} overlap")
        return found

    def tensor(self, name: str, sizes: list[int], kind: int) -> StoredTensor:
        """The one that begins here; `sizes`: the innermost first."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            stored_as = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(f"the tensor {name} is quantised as {kind}, which is not known") from error
        per_block, block_bytes = GGML_QUANT_SIZES[stored_as]
        if 0 in sizes or sizes[0] % per_block:
            raise ModelError(f"the tensor {name} has the sizes {sizes}, which {stored_as.name} cannot store")
        row = sizes[0] // per_block * block_bytes
        rows = sizes[:0:-1]
        length = row
        for each in rows:
            length *= each
        data = self.take(length, f"the tensor {name}").reshape(*rows, row)
        return StoredTensor(stored_as, (*rows, sizes[0]), data)
