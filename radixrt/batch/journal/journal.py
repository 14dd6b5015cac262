"""The finished records of a run, in a file that only grows."""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from radixrt.batch.journal.journal_format import (
    FINISHED,
    SYNCED,
    VERSION,
    OtherFormatError,
    header_line,
    journal_line,
    parse_header,
    parse_line,
    whole_lines,
)
from radixrt.batch.journal.manifest import Manifest, differences
from radixrt.errors import BatchFileError, JournalError
from radixrt.files.atomic_file import partial_path
from radixrt.files.disk import Disk, refusal

SYNC_RECORDS = 256  # a sync comes after this many records at the latest,
SYNC_SECONDS = 2.0  # or this long after the first of them

ORDERED_BYTES = 256 * 2**20  # records put in order at once
_MAX_NAMED = 5  # damaged lines in a message


@dataclass(frozen=True)
class Recovery:
    """The content of a journal when it was opened.

    Attributes:
        records: positions that have a record.
        cut_bytes: removed bytes at the end: a partial line, or everything from the first wrong line on.
        duplicates: further records of positions that had one; the first one counts. radixrt writes none.
    """

    records: int
    cut_bytes: int
    duplicates: int


@dataclass(frozen=True)
class Kept:
    """What an earlier run has left in its journal.

    Attributes:
        manifest: of that run.
        finished: positions with a record, `[num_records]`.
    """

    manifest: Manifest
    finished: NDArray[np.bool_]


def read_kept(path: Path, disk: Disk) -> Kept | None:
    """The content of a journal up to its first wrong line, without a change; None if it cannot be used.

    Raises:
        BatchFileError: it is no file of radixrt's.
        OSError: the disk refuses.
    """
    fd = disk.open_own(path, os.O_RDONLY)
    try:
        lines = whole_lines(disk, fd)
        manifest = parse_header(next(lines, b""))
        finished = np.zeros(manifest.num_records, np.bool_)
        for line in lines:
            kind, _ = parse_line(line) or (None, 0)
            if kind is None or (kind.isdigit() and int(kind) >= len(finished)):
                break
            if kind.isdigit():
                finished[int(kind)] = True
        return Kept(manifest, finished)
    except ValueError:  # whoever opens the journal to go on says what is wrong
        return None
    finally:
        disk.close(fd)


def create_journal(path: Path, manifest: Manifest, disk: Disk) -> None:
    """Make a journal without records in one step, replacing an existing one.

    The folder is not made durable. Raises JournalError if the disk refuses.
    """
    partial = partial_path(path)
    try:
        disk.write_file(partial, iter([header_line(manifest)]))
        disk.replace(partial, path)
    except OSError as error:
        raise JournalError(f"cannot write {path}: {refusal(error)}") from error


class Journal:
    """The journal of a run, opened to go on. One thread uses it, while its process holds the run's lock.

    When the disk refuses, or an exception such as Ctrl-C cuts a call in two, the journal is dead. Nothing is tried
    again, since a second fsync may succeed with data lost, and every call but `close` raises.

    Args:
        found: called with each valid record, with its newline, in any order.

    Attributes:
        num_records: of the whole run; positions are below it.
        written: records that are in the file.
        durable: records that are known to be on the disk.
        is_finished: whether this process or an earlier one has called `mark_finished`.
        recovery: its content when it was opened.

    Raises:
        BatchFileError: the journal is of something else, of another format, or damaged; it was not changed.
        JournalError: the disk refuses.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        disk: Disk,
        clock: Callable[[], float] = time.monotonic,
        found: Callable[[bytes], object] = lambda record: None,
    ) -> None:
        self._path = path
        self._disk = disk
        self._clock = clock
        self.num_records = manifest.num_records
        self.written = self.durable = 0
        self.is_finished = False
        self._dead: str | None = None  # if it is, why
        self._unsynced_since = 0.0  # by the clock, if there are records to sync
        self._end = 0  # of the last line, in bytes
        self._offsets = np.zeros(self.num_records, dtype=np.int64)  # of lines, by position
        self._lengths = np.zeros(self.num_records, dtype=np.int64)  # of lines with newline; 0: no record yet
        with self._refusals():
            self._fd = disk.open_own(path, os.O_RDWR | os.O_APPEND)
        try:
            with self._unless_dead():
                self._check_header(manifest)
                self.recovery = self._recover(found)
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which positions have a record: [num_records] bool."""
        return self._lengths > 0

    def append(self, position: int, line: bytes) -> None:
        """Write the record of a position, with its newline, and sync if that is due.

        Raises:
            ValueError: there is no such position, it has a record, or `line` is not one line.
            JournalError: the disk refuses, or the journal is dead. The record may be in the file or not.
        """
        if not 0 <= position < self.num_records:
            raise ValueError(f"there is no position {position} in a run of {self.num_records} records")
        if self._lengths[position]:
            raise ValueError(f"position {position} has a record")
        if not line or line.find(b"\n") != len(line) - 1:
            raise ValueError(f"the record of position {position} is not one line with its newline")
        with self._unless_dead():
            if self.written == self.durable:
                self._unsynced_since = self._clock()
            start = self._end
            self._write(journal_line(b"%d" % position, line))
            self._book(position, start, self._end)
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Sync if `SYNC_RECORDS` records wait for it, or one has waited for `SYNC_SECONDS`.

        Raises:
            JournalError: as in `sync`.
        """
        waiting = self.written - self.durable
        if waiting >= SYNC_RECORDS or (waiting and self._clock() - self._unsynced_since >= SYNC_SECONDS):
            self.sync()

    def sync(self) -> None:
        """Make all records durable.

        Raises:
            JournalError: the disk refuses, something else has changed the file, or the journal is dead.
        """
        with self._unless_dead():
            if self.durable < self.written:
                self._fsync()
                self.durable = self.written
                self._write(journal_line(SYNCED))

    def check_whole(self) -> None:
        """Raise BatchFileError unless each position has a record."""
        if self.written < self.num_records:
            missing = np.flatnonzero(self._lengths == 0)
            raise BatchFileError(
                f"{self._path} lacks {len(missing):,} of {self.num_records:,} records, the first that of position "
                f"{missing[0]}"
            )

    def mark_finished(self) -> None:
        """Note durably that all records are here: from now on an existing output may be this run's.

        Raises:
            BatchFileError: as in `check_whole`.
            JournalError: as in `sync`.
        """
        self.check_whole()
        self.sync()
        if not self.is_finished:
            with self._unless_dead():
                self._write(journal_line(FINISHED))
                self._fsync()
                self.is_finished = True

    def records(self) -> Iterator[bytes]:
        """All records by position, each with its newline, and checked again.

        At most `ORDERED_BYTES` are in memory, or one record. The file is read once from beginning to end for each
        block of that size.

        Raises:
            JournalError: a record is not as it was written, or the journal is closed.
        """
        self._check_alive()
        positions = np.flatnonzero(self._lengths)
        ends = np.cumsum(self._lengths[positions])
        start = 0
        while start < len(positions):
            limit = ORDERED_BYTES + (int(ends[start - 1]) if start else 0)
            end = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
            yield from self._read(positions[start:end])
            start = end

    def close(self) -> None:
        """Sync, unless the journal is dead, and close the file. A second call does nothing.

        Raises:
            JournalError: as in `sync`.
        """
        if self._fd < 0:
            return
        try:
            if self._dead is None:
                self.sync()
        finally:
            fd, self._fd = self._fd, -1
            self._dead = self._dead or "it is closed"
            with self._refusals():
                self._disk.close(fd)

    def _check_header(self, manifest: Manifest) -> None:
        anew = f"remove the folder {self._path.parent} to begin anew"
        try:
            kept = parse_header(next(whole_lines(self._disk, self._fd), b""))
        except OtherFormatError as error:
            raise BatchFileError(
                f"{self._path} is of format {error.version}, and this radixrt reads {VERSION}: finish the run "
                f"with the version that began it, or {anew}"
            ) from error
        except ValueError as error:
            raise BatchFileError(
                f"{self._path} is no journal, or damaged in its first line ({error}): restore it from a copy, or "
                f"{anew}"
            ) from error
        if found := differences(kept, manifest):
            raise BatchFileError(
                f"{self._path.parent} holds a run of something else: {'; '.join(found)}. Give what that run was "
                f"begun with to go on with it, choose another output, or {anew}"
            )

    def _recover(self, found: Callable[[bytes], object]) -> Recovery:
        """Book the records in the file, and cut off the remains of a kill or a power cut."""
        self._disk.fsync(self._fd)  # data that an earlier process left in memory
        self._disk.drop_cache(self._fd)  # data only in memory after a failed fsync is not read
        size = self._disk.fstat(self._fd).st_size
        duplicates, is_synced = self._scan(found)
        cut_bytes = size - self._end
        if cut_bytes:
            self._disk.truncate(self._fd, self._end)
            self._disk.fsync(self._fd)
        self.durable = self.written
        if not is_synced:
            self._write(journal_line(SYNCED))
        return Recovery(self.written, cut_bytes, duplicates)

    def _scan(self, found: Callable[[bytes], object]) -> tuple[int, bool]:
        """Book the records before the first wrong line.

        Returns:
            the number of duplicates, and whether a SYNCED follows all booked records.
        """
        wrong: list[int] = []  # lines, from 1, as editors count
        num_damaged = duplicates = 0
        is_synced = True
        lines = whole_lines(self._disk, self._fd)
        self._end = len(next(lines)) + 1
        for number, line in enumerate(lines, 2):
            kind, start = parse_line(line) or (None, 0)
            if kind is None or (kind.isdigit() and int(kind) >= self.num_records):
                wrong.append(number)
            elif kind == SYNCED:
                num_damaged, is_synced = len(wrong), True
            elif wrong:
                pass  # it will be cut, unless a SYNCED follows
            elif kind == FINISHED:
                self.is_finished = True
            elif self._lengths[int(kind)]:
                duplicates += 1
            else:
                self._book(int(kind), self._end, self._end + len(line) + 1)
                found(line[start:] + b"\n")
                is_synced = False
            if not wrong:
                self._end += len(line) + 1
        if num_damaged:
            raise self._damage(wrong[:num_damaged])
        return duplicates, is_synced

    def _damage(self, lines: list[int]) -> BatchFileError:
        named = lines[:_MAX_NAMED]
        more = f" and {len(lines) - len(named):,} more" if len(lines) > len(named) else ""
        delete = f"sed -i '{';'.join(f'{line}d' for line in named)}' {shlex.quote(str(self._path))}"
        return BatchFileError(
            f"{self._path} was whole and is damaged now, in line {', '.join(map(str, named))}{more}: something "
            f"has changed it, or the disk is failing. Restore it from a copy, or delete what is damaged ({delete})"
            " and run the same command again, which will compute these records anew"
        )

    def _read(self, positions: NDArray[np.int64]) -> list[bytes]:
        """The records at `positions`, in that order; they are read in the order of the file."""
        offsets, lengths = self._offsets[positions], self._lengths[positions].tolist()
        records = [b""] * len(positions)
        with self._refusals():
            for i in np.argsort(offsets).tolist():
                line = self._disk.pread_all(self._fd, lengths[i], int(offsets[i]))
                kind, start = parse_line(line[:-1]) or (None, 0)
                if kind != b"%d" % positions[i] or line[-1:] != b"\n":
                    raise OSError(errno.ESTALE, f"the record of position {positions[i]} is not what was written")
                records[i] = line[start:]
        return records

    def _book(self, position: int, start: int, end: int) -> None:
        self._offsets[position] = start
        self._lengths[position] = end - start
        self.written += 1

    def _write(self, line: bytes) -> None:
        self._disk.write_all(self._fd, line)
        self._end += len(line)

    def _fsync(self) -> None:
        """Make the file durable, if it exists and nothing else has written to it."""
        status = self._disk.fstat(self._fd)
        if not status.st_nlink:
            raise OSError(errno.ESTALE, "something has removed it")
        if status.st_size != self._end:
            raise OSError(
                errno.ESTALE, f"something has changed it: {status.st_size} bytes in place of {self._end}"
            )
        self._disk.fsync(self._fd)

    @contextmanager
    def _unless_dead(self) -> Iterator[None]:
        """The journal is dead unless the block runs to its end."""
        self._check_alive()
        self._dead = "a call was interrupted; run the same command again"
        with self._refusals():
            yield
        self._dead = None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise JournalError(f"cannot use {self._path}: {self._dead}")

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._dead = refusal(error)
            kept = f" ({self.durable:,} of {self.num_records:,} records are on the disk)" if self.durable else ""
            raise JournalError(f"cannot use {self._path}: {self._dead}{kept}") from error
