"""The files of one tenant on disk, and how much they may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from radixrt.files.atomic_file import AtomicFile
from radixrt.server.files.record import FileRecord
from radixrt.server.limits import Limits
from radixrt.server.record_folder import RecordFolder
from radixrt.server.refusal import Refusal

_PREFIX = "file-"


class FileStore:
    """Keeps files in a folder: the content by its id, and beside it the record, which is written last.

    What a killed server has left of a content without a record is removed. Used from any thread.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        """Raises BatchFileError or OSError where the folder cannot be read."""
        self._folder, self._limits, self._lock = folder, limits, Lock()
        self._records = RecordFolder(folder, _PREFIX, lambda given: FileRecord(**given))
        self._drafted_bytes = self._drafts = 0  # of files that are being written
        for path in folder.glob(f"{_PREFIX}*"):
            if path.suffix != ".json" and self._records.get(path.name) is None:
                path.unlink()

    def __iter__(self) -> Iterator[FileRecord]:
        """The oldest first."""
        return iter(self._records)

    def get(self, file_id: str) -> FileRecord:
        """Raises Refusal where there is none of that id."""
        if (record := self._records.get(file_id)) is None:
            raise _not_found()
        return record

    def content(self, record: FileRecord) -> Path:
        """Where the content of a file is."""
        return self._folder / record.id

    def opened(self, record: FileRecord) -> BinaryIO:
        """The content of a file, which is read to its end also if it is deleted meanwhile. Raises Refusal where it
        was before, OSError where the disk refuses.
        """
        try:
            return self.content(record).open("rb")
        except FileNotFoundError:
            raise _not_found() from None

    def delete(self, record: FileRecord) -> None:
        """Remove a file, its record first. Raises OSError where the disk refuses."""
        with self._lock:
            self._records.remove(record.id)
        with suppress(FileNotFoundError):
            self.content(record).unlink()

    def draft(self, file_id: str | None = None, *, bounded: bool = True) -> Draft:
        """A file to be written, with an id of its own or a given one; `bounded` by the tenant's limits.

        Raises Refusal where the tenant has too many, OSError where the disk refuses.
        """
        with self._lock:
            if bounded and len(self._records) + self._drafts >= self._limits.files:
                raise Refusal(
                    413, f"{self._limits.files:,} files are the most; delete some first", "too_many_files"
                )
            self._drafts += 1
        try:
            return Draft(self, AtomicFile(self._folder / (file_id or self._records.new_id())), bounded)
        except BaseException:
            self._end_draft(0)
            raise

    def _take_room(self, size: int, more: int, bounded: bool) -> None:
        """Let a draft of so many bytes have more."""
        limits = self._limits
        if bounded and size + more > limits.file_bytes:
            raise Refusal(413, f"the file has more than {limits.file_bytes:,} bytes", "file_too_large")
        with self._lock:
            if bounded and self._num_bytes() + more > limits.all_file_bytes:
                told = f"all files have more than {limits.all_file_bytes:,} bytes; delete some first"
                raise Refusal(413, told, "storage_full")
            self._drafted_bytes += more

    def _num_bytes(self) -> int:
        return sum(record.bytes for record in self._records) + self._drafted_bytes

    def _keep(self, file_id: str, size: int, filename: str, purpose: str) -> FileRecord:
        with self._lock:
            record = FileRecord(
                id=file_id,
                number=self._records.next_number(),
                bytes=size,
                created_at=int(time.time()),
                filename=filename,
                purpose=purpose,
            )
            self._records.put(record)
        return record

    def _end_draft(self, size: int) -> None:
        with self._lock:
            self._drafts -= 1
            self._drafted_bytes -= size


def _not_found() -> Refusal:
    return Refusal(404, "there is no such file", "file_not_found")


class Draft:
    """A file that is being written. It is kept by `keep`, or else removed with the end of the context.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, store: FileStore, file: AtomicFile, bounded: bool) -> None:
        self._store, self._file, self._bounded = store, file, bounded
        self.size = 0

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._file.__exit__(*error)
        finally:
            self._store._end_draft(self.size)

    def write(self, data: bytes) -> None:
        """Append all of `data`. Raises Refusal where a limit is passed, OSError where the disk refuses."""
        self._store._take_room(self.size, len(data), self._bounded)
        self.size += len(data)
        self._file.write(data)

    def keep(self, filename: str, purpose: str) -> FileRecord:
        """Make the content durable, then the record. Raises OSError where the disk refuses."""
        self._file.finish()
        return self._store._keep(self._file.path.name, self.size, filename, purpose)
