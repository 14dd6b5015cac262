"""The lock that gives a run one writer."""

# Tests: tests/batch/journal/test_run_folder.py

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

from radixrt.errors import BatchFileError
from radixrt.files.disk import Disk

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_HOLDER_BYTES = 512  # always written in full, so that a shorter name replaces a longer one


class RunLock:
    """A lock on a file that this process holds until `release`, or until it ends for any reason.

    The file names the holder. The lock is flock(2)'s. On NFS, Linux has the server lock the whole file, unless it
    is mounted with `nolock` or `local_lock`. Then two hosts can both hold the lock, and the journal notices that
    its file has grown by other hands. A file system without locks is refused. A child that is forked while the
    lock is held holds it too, even after its parent has died.

    Raises:
        BatchFileError: another process holds the lock, or the file system has none.
        OSError: the disk refuses.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        self._fd = -1
        try:
            self._fd = disk.open_own(path, os.O_RDWR | os.O_CREAT)
            self._take(path)
            self._write_holder()
        except BaseException:
            self.release()
            raise

    def is_at(self, path: Path) -> bool:
        """Whether the locked file is still at `path`: its last holder may have removed it."""
        try:
            return os.path.samestat(self._disk.fstat(self._fd), self._disk.lstat(path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock, if it is held."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._disk.close(fd)

    def _take(self, path: Path) -> None:
        try:
            self._disk.flock(self._fd)
        except BlockingIOError:
            raise BatchFileError(
                f"another process writes to {path.parent}: {self._holder()}; wait until it has ended"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise BatchFileError(
                f"the file system of {path.parent} has no locks ({error.strerror}), so that two runs could write "
                "there at once: put the output on another one"
            ) from error

    def _write_holder(self) -> None:
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode().ljust(_HOLDER_BYTES)
        self._disk.write_all(self._fd, holder)

    def _holder(self) -> str:
        """The holder of the lock, for messages."""
        try:
            holder = json.loads(self._disk.pread(self._fd, _HOLDER_BYTES, 0))
            pid, host = int(holder["pid"]), str(holder["host"])
        except (ValueError, TypeError, KeyError):
            return "it has not said which"
        if host != socket.gethostname() or _is_alive(pid):
            return f"process {pid} on {host}"
        return (
            f"process {pid} is named there but has ended, so it is one that {pid} started, or that has just begun"
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True
