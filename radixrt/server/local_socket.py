"""A Unix socket for this user alone."""

# Tests: tests/server/test_admin.py

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from radixrt.errors import ParameterError


@contextmanager
def local_socket(path: Path) -> Iterator[socket.socket]:
    """A socket that listens at a path, of mode 0600, until the end. One that a server has left there is replaced.

    Raises ParameterError where a server listens there, something else is there, or the path cannot be had.
    """
    try:
        _make_room(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)  # nobody else may come even before a chmod
            try:
                listening.bind(os.fspath(path))
            finally:
                os.umask(before)
            made = path.stat()
            listening.listen()
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ParameterError(f"the server cannot listen at {path}: {error.strerror or error}") from error
    try:
        yield listening
    finally:
        listening.close()
        with suppress(OSError):
            if os.path.samestat(path.lstat(), made):  # else it is another server's by now
                path.unlink()


def _make_room(path: Path) -> None:
    """Take a socket away that no server listens at."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ParameterError(f"{path} is there and is no socket; give another name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(5)
        try:
            asking.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass  # it is busy
    raise ParameterError(f"a server listens at {path} already; give another name")
