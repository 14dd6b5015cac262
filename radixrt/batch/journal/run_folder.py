"""The folder of a run: lock, journal and scratch files, until the output is whole."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from radixrt.batch.journal.journal import Journal, Kept, create_journal, read_kept
from radixrt.batch.journal.manifest import Manifest
from radixrt.batch.journal.run_lock import RunLock
from radixrt.errors import BatchFileError, JournalError
from radixrt.files.atomic_file import partial_path
from radixrt.files.disk import DISK, Disk, file_error, refusal

_CHUNK_BYTES = 2**20  # written at once

Encoding = Callable[[Iterator[bytes]], Iterator[bytes]]
"""Turns chunks of whole records into the bytes of a file, as a compression does. It is deterministic."""


class RunFolder:
    """The folder `OUTPUT.run` beside a batch's output, for the one process that holds its lock.

    In it are

        journal     the run's manifest and its finished records (`journal_format`);
        lock        held by the process that may write;
        output      the output, while it is made;
        scratch/    files that can be made again. An earlier run may have left some, perhaps of another input.

    `begin` opens the journal of a new run, or of one that goes on. `finish` makes the output and removes the
    folder. Leaving the context without `finish` keeps the files that `begin` needs to go on.

    The journal is removed last of all. While the folder is removed, it is `OUTPUT.run.finished` beside it: if the
    process is killed meanwhile, the next one knows that the output is this run's.

    Attributes:
        path: the folder.
        scratch: the folder `scratch` in it.

    Raises:
        BatchFileError: another process holds the lock, or there can be no such folder.
        JournalError: the disk refuses.
    """

    def __init__(self, output: Path, *, disk: Disk = DISK) -> None:
        self.path = run_path(output)
        self.scratch = self.path / "scratch"
        self._output = output
        self._journal_path = self.path / "journal"
        self._merged_path = self.path / "output"
        self._lock_path = self.path / "lock"
        self._aside_path = aside_path(output)
        self._disk = disk
        self._journal: Journal | None = None
        self._replace = self._was_finished = False
        try:
            self._lock = self._make()
        except OSError as error:
            raise file_error(f"cannot make {self.path}", error) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._journal is not None:
                self._journal.close()
            else:
                with self._refusals(self.path):
                    if not self._disk.exists(self._journal_path):  # there is nothing to go on with
                        self._remove()
        finally:
            with self._refusals(self._lock_path):
                self._lock.release()

    @property
    def journal(self) -> Journal | None:
        """The journal, once `begin` has opened it."""
        return self._journal

    def kept(self) -> Kept | None:
        """What an earlier run has left; None if there is nothing to go on with. Raises as `begin` does."""
        with self._refusals(self.path):
            exists = self._disk.exists(self._journal_path)
            return read_kept(self._journal_path, self._disk) if exists else None

    def begins_anew(self, *, replace: bool = False, restart: bool = False) -> bool:
        """Whether `begin` will make a journal, whatever the manifest. Raises JournalError if the disk refuses."""
        with self._refusals(self.path):
            has_journal = not restart and self._disk.exists(self._journal_path)
            return not has_journal and (replace or not self._disk.exists(self._output))

    def begin(
        self,
        manifest: Manifest,
        *,
        replace: bool = False,
        restart: bool = False,
        found: Callable[[bytes], object] = lambda record: None,
    ) -> Journal:
        """Open the journal of the run that the manifest describes.

        Args:
            manifest: describes the run. An earlier run with another manifest is refused.
            replace: an existing output may be replaced.
            restart: discard an earlier run, whatever its manifest.
            found: called with each record of an earlier run, in any order.

        Raises:
            BatchFileError: the output exists, or the journal is another run's or damaged.
            JournalError: the disk refuses.
        """
        with self._refusals(self.path):
            if restart or not self._disk.exists(self._journal_path):
                self._check_output(replace)
                create_journal(self._journal_path, manifest, self._disk)
            self._disk.fsync_folder(self.path)  # always: a process before may have been killed just here
            self._disk.fsync_folder(self.path.parent)
            self._journal = Journal(self._journal_path, manifest, self._disk, found=found)
            self._replace = replace
            self._was_finished = self._journal.is_finished  # then the output may be of this very run
            self._check_output(replace or self._was_finished)
        return self._journal

    def finish(self, encode: Encoding = iter) -> None:
        """Make the output of the journal's records, in order, durably and in one step; then remove the folder.

        Args:
            encode: encodes chunks of whole records for the file.

        Raises:
            BatchFileError: records are missing; or the output exists, must not be replaced, and was not made of
                these records by an earlier process.
            JournalError: the disk refuses.
        """
        journal = self._journal
        assert journal is not None, "begin comes first"
        journal.check_whole()
        with self._refusals(self._output):
            self._check_output(self._replace or self._was_finished)
            self._disk.write_file(self._merged_path, encode(_chunks(journal.records())))
            self._check_output(self._replace or self._is_made())
            journal.mark_finished()
            self._disk.replace(self._merged_path, self._output)
            self._disk.fsync_folder(self._output.parent)
        journal.close()
        with self._refusals(self.path, f"the output {self._output} is whole, but "):
            self._remove()

    def _make(self) -> RunLock:
        """Make the folder, if it is not there, and lock it."""
        self._disk.exists(self._aside_path)  # a too long name is refused before anything is made
        while True:
            try:
                self._disk.make_own_folder(self.path)
                lock = RunLock(self._lock_path, self._disk)
            except FileNotFoundError:
                self._disk.lstat(self.path.parent)  # there must be one
                continue  # its last holder has just removed the folder
            try:
                if not lock.is_at(self._lock_path):
                    lock.release()
                    continue
                self._disk.make_own_folder(self.scratch)
                self._take_back()
            except BaseException:
                lock.release()
                raise
            return lock

    def _check_output(self, replace: bool) -> None:
        if not replace and self._disk.exists(self._output):
            raise BatchFileError(f"the output {self._output} exists; --overwrite replaces it")

    def _is_made(self) -> bool:
        """Whether an earlier process has made the output of the same records."""
        return (
            self._was_finished
            and self._disk.exists(self._output)
            and _are_equal(self._disk, self._merged_path, self._output)
        )

    def _take_back(self) -> None:
        """Put the journal back into the folder if a process was killed while it removed the folder."""
        if self._disk.exists(self._aside_path):
            if self._disk.exists(self._journal_path):  # of a later run, and a power cut brought the other one back
                self._unlink(self._aside_path)
            else:
                with contextlib.suppress(FileNotFoundError):  # that process lives, and has just come to its end
                    self._disk.replace(self._aside_path, self._journal_path)

    def _remove(self) -> None:
        """Remove all that is radixrt's, and the folder unless something else is in it. The journal goes last."""
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove_tree(self.scratch)
        for path in (self._merged_path, partial_path(self._journal_path)):
            self._unlink(path)
        has_journal = self._disk.exists(self._journal_path)
        if has_journal:
            self._disk.replace(self._journal_path, self._aside_path)
        self._unlink(self._lock_path)
        try:
            self._disk.rmdir(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if has_journal:
            self._disk.fsync_folder(self.path.parent)  # a power cut leaves no folder and no journal, or both
            self._unlink(self._aside_path)

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder is not radixrt's
            self._disk.unlink(path)

    @contextmanager
    def _refusals(self, path: Path, prefix: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalError(f"{prefix}cannot write {path}: {refusal(error)}") from error


def run_path(output: Path) -> Path:
    """The folder of the run that makes an output."""
    return output.with_name(output.name + ".run")


def aside_path(output: Path) -> Path:
    """The path of the journal while the folder is removed."""
    return output.with_name(output.name + ".run.finished")


def has_run(output: Path) -> bool:
    """Whether the run of an output has left any file."""
    return os.path.exists(run_path(output)) or os.path.exists(aside_path(output))


def _chunks(records: Iterator[bytes]) -> Iterator[bytes]:
    """The records, joined to chunks of about `_CHUNK_BYTES`."""
    chunk: list[bytes] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record)
        if size >= _CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    yield b"".join(chunk)


def _are_equal(disk: Disk, path: Path, other: Path) -> bool:
    """Whether two files hold the same bytes."""
    with contextlib.ExitStack() as opened:
        fds = []
        for each in (path, other):
            fds.append(disk.open(each, os.O_RDONLY))
            opened.callback(disk.close, fds[-1])
        offset = 0
        while True:
            chunk, others = (disk.pread_all(fd, _CHUNK_BYTES, offset) for fd in fds)
            if chunk != others or not chunk:
                return chunk == others
            offset += len(chunk)
