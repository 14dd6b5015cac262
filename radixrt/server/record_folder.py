"""Records of a server that outlive it: each is a file of JSON, written in one step."""

# Tests: tests/server/test_files.py

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from radixrt.errors import BatchFileError
from radixrt.files.atomic_file import AtomicFile

_SUFFIX = ".json"


class Kept(Protocol):
    """What is kept: its id, which is the name of its file, and its number, greater than those before it."""

    @property
    def id(self) -> str: ...

    @property
    def number(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...


K = TypeVar("K", bound=Kept)


class RecordFolder(Generic[K]):
    """All records of a kind, in memory and on disk, in the order of their numbers.

    Ids are made here, of a prefix and random digits: what clients call something never becomes part of a path.
    """

    def __init__(self, folder: Path, prefix: str, read: Callable[[dict[str, Any]], K]) -> None:
        """Read what is in the folder. Raises BatchFileError where a file is no record of this kind, or OSError."""
        self._folder, self._prefix = folder, prefix
        self._name = re.compile(rf"({re.escape(prefix)}[0-9a-f]{{32}})\{_SUFFIX}")
        found = [_read(path, read) for path in folder.iterdir() if self._name.fullmatch(path.name) is not None]
        self._records = {record.id: record for record in sorted(found, key=lambda record: record.number)}
        self._next = 1 + max((record.number for record in found), default=0)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[K]:
        """In the order of their numbers; what changes meanwhile changes nothing."""
        return iter(tuple(self._records.values()))

    def get(self, record_id: str) -> K | None:
        """The record of an id, if there is one."""
        return self._records.get(record_id)

    def new_id(self) -> str:
        """One that nobody guesses."""
        return self._prefix + secrets.token_hex(16)

    def next_number(self) -> int:
        """Greater than all before."""
        self._next += 1
        return self._next - 1

    def put(self, record: K) -> None:
        """Keep a new record, or a known one as it is now. Raises OSError where the disk refuses."""
        text = json.dumps(record.to_json(), allow_nan=False)
        with AtomicFile(self._path(record.id)) as file:
            file.write(text.encode())
            file.finish()
        self._records[record.id] = record

    def remove(self, record_id: str) -> None:
        """Forget a record. Raises OSError where the disk refuses."""
        self._path(record_id).unlink()
        del self._records[record_id]

    def _path(self, record_id: str) -> Path:
        return self._folder / f"{record_id}{_SUFFIX}"


def _read(path: Path, read: Callable[[dict[str, Any]], K]) -> K:
    try:
        record = read(json.loads(path.read_bytes()))
    except (ValueError, TypeError, KeyError) as error:
        raise BatchFileError(f"{path} is no record of this server: {error}; move it away") from error
    if record.id != path.name.removesuffix(_SUFFIX):
        raise BatchFileError(f"{path} is the record of {record.id}; move it away")
    return record
