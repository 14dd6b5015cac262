"""The operating system's file calls, as an object that tests replace."""

# Tests: tests/batch/journal/test_journal.py

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from radixrt.errors import BatchFileError, JournalError

_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ESTALE: "see what it was",
    errno.EIO: "see to the disk",
}
# What opening anything but a plain file ends with: a symbolic link, a FIFO or a socket, a folder.
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def refusal(error: OSError) -> str:
    """The disk's error and its remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "see to it")
    return f"{error.strerror or error}; {remedy}, then run the same command again"


def is_of_the_disk(error: OSError) -> bool:
    """Whether the disk is at fault, rather than a path or the rights of a user."""
    return error.errno in _REMEDIES


def file_error(what: str, error: OSError) -> BatchFileError:
    """The exception to raise if the system refuses `what`, such as "cannot write PATH".

    It is a JournalError if the disk is at fault, so that the same command can go on once it works; otherwise a
    BatchFileError.
    """
    if is_of_the_disk(error):
        return JournalError(f"{what}: {refusal(error)}")
    return BatchFileError(f"{what}: {error.strerror or error}")


def _in_the_way(path: Path, what: str) -> BatchFileError:
    return BatchFileError(
        f"{path} is in the way of radixrt's own {what}: it is a link or something else that radixrt has not made; "
        "move it away"
    )


class Disk:
    """Files through the `os` module. Tests replace it, to make calls fail or cut the power.

    All calls raise OSError. Python repeats a call that a signal interrupts (PEP 475).
    """

    def open(self, path: Path, flags: int) -> int:
        """A file descriptor that is not inherited."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def open_own(self, path: Path, flags: int) -> int:
        """`open` for a file of radixrt's own: a plain file without another name. It never waits, for a FIFO.

        Raises:
            BatchFileError: something else is there, such as a link or a FIFO; it was not changed.
        """
        try:
            fd = self.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in _NO_PLAIN_FILE:
                raise
            raise _in_the_way(path, "file") from error
        try:
            status = self.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise _in_the_way(path, "file")
            if flags & os.O_TRUNC and status.st_size:
                self.truncate(fd, 0)
        except BaseException:
            self.close(fd)
            raise
        return fd

    def make_own_folder(self, path: Path) -> None:
        """Make a folder of radixrt's own, unless it is there.

        Raises:
            BatchFileError: something else is there, such as a link to a folder.
        """
        with suppress(FileExistsError):
            self.mkdir(path)
            return
        if not stat.S_ISDIR(self.lstat(path).st_mode):
            raise _in_the_way(path, "folder")

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        return os.pread(fd, count, offset)

    def fsync(self, fd: int) -> None:
        """Wait until the file, or the names in the folder, are on the disk. (macOS waits for the drive alone.)"""
        os.fsync(fd)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def flock(self, fd: int) -> None:
        """Lock the open file, or raise BlockingIOError if another holder has."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def list(self, path: Path) -> list[str]:
        return os.listdir(path)

    def drop_cache(self, fd: int) -> None:
        """Read the file from the disk next time, if the system has this call and heeds it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def write_all(self, fd: int, data: bytes | memoryview) -> None:
        """Write all of `data`, in one call unless the system takes only a part."""
        count = self.write(fd, data)
        if count == len(data):
            return
        rest = memoryview(data)[count:]
        while len(rest):
            if not count:
                raise OSError(errno.EIO, "the system writes nothing and says no error")
            count = self.write(fd, rest)
            rest = rest[count:]

    def pread_all(self, fd: int, count: int, offset: int) -> bytes:
        """`count` bytes at an offset, or fewer at the end of the file."""
        data = self.pread(fd, count, offset)
        while len(data) < count and (more := self.pread(fd, count - len(data), offset + len(data))):
            data += more
        return data

    def write_file(self, path: Path, chunks: Iterator[bytes]) -> None:
        """Write a file and make its bytes durable, but not its name. Raises BatchFileError as `open_own` does."""
        fd = self.open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for chunk in chunks:
                self.write_all(fd, chunk)
            self.fsync(fd)
        finally:
            self.close(fd)

    def fsync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd)
        finally:
            self.close(fd)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with its content. Links are removed, not followed."""
        for name in self.list(path):
            if stat.S_ISDIR(self.lstat(path / name).st_mode):
                self.remove_tree(path / name)
            else:
                self.unlink(path / name)
        self.rmdir(path)

    def exists(self, path: Path) -> bool:
        """Whether something has that name, even a dangling link."""
        try:
            self.lstat(path)
        except FileNotFoundError:
            return False
        return True


DISK = Disk()


def new_file(path: Path) -> BinaryIO:
    """An empty file of radixrt's own to write to. Raises OSError, and BatchFileError as `Disk.open_own` does."""
    return open(DISK.open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of the system's temporary files, removed afterwards.

    Raises:
        BatchFileError: it cannot be made; a JournalError if the disk is at fault.
    """
    try:
        folder = tempfile.TemporaryDirectory()
    except OSError as error:
        raise file_error("cannot make a temporary folder; TMPDIR names another place", error) from error
    with folder as name:
        yield Path(name)
