"""Writes a file that appears whole or not at all."""

# Tests: tests/kept_cache/test_kept_cache.py

from __future__ import annotations

import errno
import os
from pathlib import Path

from radixrt.files.disk import DISK


def partial_path(path: Path) -> Path:
    """Where a file is until it is whole."""
    return path.with_name(path.name + ".partial")


class AtomicFile:
    """A file at `PATH.partial`, which `finish` makes durable and renames to PATH.

    A process that is killed leaves PATH as it was, and a partial file that the next one overwrites. Leaving the
    context without `finish` removes the partial file.

    Raises:
        OSError: the disk refuses. Nothing is tried again, since a second fsync may succeed with data lost. If only
            the folder cannot be made durable, PATH is the new file. BlockingIOError: another process is writing
            to PATH.
        BatchFileError: what is at PATH.partial is no file that could have been left there.
    """

    def __init__(self, path: Path) -> None:
        if not path.name or "\0" in str(path):
            raise OSError(errno.EINVAL, f"{str(path)!r} is no name of a file")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        self.path = path
        self.partial = partial_path(path)
        self._fd = DISK.open_own(self.partial, os.O_RDWR | os.O_CREAT)
        try:
            self._lock()
            os.ftruncate(self._fd, 0)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            self.partial.unlink(missing_ok=True)
            self._close()

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        DISK.write_all(self._fd, data)

    def finish(self) -> None:
        """Make the file durable, then give it its name, then make that durable."""
        os.fsync(self._fd)
        os.replace(self.partial, self.path)
        self._close()
        DISK.fsync_folder(self.path.parent)

    def _lock(self) -> None:
        """Become the only writer; the lock ends with the process."""
        try:
            DISK.flock(self._fd)
            # Since it was opened, another process may have finished this very file.
            is_ours = os.path.samestat(os.fstat(self._fd), os.stat(self.partial))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise BlockingIOError(errno.EAGAIN, "another process is writing it")

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
