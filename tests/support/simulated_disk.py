"""A machine whose disk forgets what it may forget, and processes on it that can be killed at any call.

Files are in memory. What a process has written is seen by all processes at once, but is on the disk only after
fsync; names are on the disk after an fsync of their folder. A power cut keeps anything from what is on the disk to
what was seen: any of the changes of names, and of what was not synced of a file any part, with blocks of zeros.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from radixrt.files.disk import Disk

T = TypeVar("T")
BLOCK = 16  # bytes that a power cut keeps or loses together


class Killed(BaseException):
    """The process has ended: none of its code has any effect from now on."""


@dataclass(eq=False)
class Inode:
    """A file, or a folder where `names` is not None."""

    number: int
    names: dict[str, Inode] | None = None
    data: bytes = b""  # as processes see it
    on_disk: bytes = b""
    lost: list[tuple[int, int]] = field(default_factory=list)  # data that a failed fsync left only in memory
    links: int = 0
    holder: tuple[Process, int] | None = None  # of its lock: a file descriptor

    def without_lost(self) -> bytes:
        data = bytearray(self.data)
        for start, end in self.lost:
            data[start:end] = bytes(len(data[start:end]))
        return bytes(data)


@dataclass
class Renaming:
    """A change of names that the disk makes wholly or not at all."""

    changes: list[tuple[Inode, str, Inode | None]]
    is_durable: bool = False


class Machine:
    """A root folder `/`, and the processes that use it."""

    def __init__(self) -> None:
        self._next = 1
        self.root = self.make(names={})
        self.root.links = 1
        self.base: dict[Inode, dict[str, Inode]] = {self.root: {}}  # names on the disk, before `log`
        self.log: list[Renaming] = []

    def make(self, names: dict[str, Inode] | None = None) -> Inode:
        self._next += 1
        return Inode(self._next, names)

    def find(self, path: Path) -> Inode:
        node = self.root
        for name in path.parts[1:]:
            if node.names is None:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            node = node.names[name]
        return node

    def files(self) -> dict[str, bytes]:
        """What every file holds, by path."""
        found: dict[str, bytes] = {}

        def walk(path: str, folder: Inode) -> None:
            for name, node in (folder.names or {}).items():
                if node.names is None:
                    found[f"{path}/{name}"] = node.data
                else:
                    walk(f"{path}/{name}", node)

        walk("", self.root)
        return found

    def folders(self) -> set[str]:
        """The paths of all folders but the root."""

        def walk(path: str, folder: Inode) -> set[str]:
            below = {f"{path}/{n}": node for n, node in (folder.names or {}).items() if node.names is not None}
            return set(below).union(*(walk(p, node) for p, node in below.items()))

        return walk("", self.root)

    def rename(self, *changes: tuple[Inode, str, Inode | None]) -> None:
        for folder, name, node in changes:
            assert folder.names is not None
            before = folder.names.pop(name, None)
            if before is not None:
                before.links -= 1
            if node is not None:
                folder.names[name] = node
                node.links += 1
        self.log.append(Renaming(list(changes)))

    def fsync(self, node: Inode) -> None:
        if node.names is None:
            node.on_disk = node.without_lost()
            return
        for renaming in self.log:
            renaming.is_durable |= any(folder is node for folder, _, _ in renaming.changes)

    def cut_power(self, rng: random.Random, loss: float) -> None:
        """All processes are gone, and `loss` (0 to 1) of what was not durable, chosen at random."""
        names = {folder: dict(names) for folder, names in self.base.items()}
        for renaming in self.log:
            if renaming.is_durable or rng.random() >= loss:
                for folder, name, node in renaming.changes:
                    entries = names.setdefault(folder, {})
                    if node is None:
                        entries.pop(name, None)
                    else:
                        entries[name] = node
        reached: set[Inode] = set()

        def walk(folder: Inode) -> None:
            reached.add(folder)
            folder.names = names.setdefault(folder, {})
            for node in folder.names.values():
                node.links, node.holder = 1, None
                if node.names is not None:
                    walk(node)
                else:
                    node.data = node.on_disk = self._after_cut(node, rng, loss)
                    node.lost = []

        walk(self.root)
        self.base = {folder: dict(folder.names or {}) for folder in reached}
        self.log = []

    @staticmethod
    def _after_cut(node: Inode, rng: random.Random, loss: float) -> bytes:
        seen, kept = node.without_lost(), node.on_disk
        if not seen.startswith(kept):  # it was truncated or written over
            return rng.choice([seen, kept]) if loss < 1 else kept
        if loss >= 1:
            return kept
        rest = bytearray(seen[len(kept) : rng.choice([len(seen), rng.randint(len(kept), len(seen))])])
        for start in range(0, len(rest), BLOCK):
            if rng.random() < loss / 4:
                rest[start : start + BLOCK] = bytes(len(rest[start : start + BLOCK]))
        return kept + bytes(rest)


Fault = Callable[[str, int], BaseException | None]


def no_fault(kind: str, number: int) -> BaseException | None:
    return None


@dataclass
class Nth:
    """A fault of the call of a kind with that number, from 0, and with `on` of all later ones.

    Attributes:
        raised: how often.
    """

    kind: str
    number: int
    error: Callable[[], BaseException]
    on: bool = False
    raised: int = 0

    def __call__(self, kind: str, number: int) -> BaseException | None:
        if kind != self.kind or not (number == self.number or (self.on and number > self.number)):
            return None
        self.raised += 1
        return self.error()


class Process(Disk):
    """The calls of one process, until it is killed: then its locks are free, and further calls raise Killed.

    Attributes:
        calls: how often each kind of call was made; "all" are all of them.
        fault: the exception that a call raises instead of its effect, by its kind and its number in that kind.
        late_fault: what it raises after its effect.
        kill_at: the process ends at the call of that number among all: "before" it, "after" it, or in the "middle"
            if it is a write.
        most: bytes that a write takes at once.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        fault: Fault = no_fault,
        late_fault: Fault = no_fault,
        kill_at: tuple[int, str] | None = None,
        most: int = 2**31,
    ) -> None:
        self.machine = machine
        self.calls: Counter[str] = Counter()
        self.fault = fault
        self.late_fault = late_fault
        self.kill_at = kill_at
        self.most = most
        self.is_alive = True
        self._fds: dict[int, Inode] = {}
        self._ends: dict[int, int] = {}  # where the next write goes, unless it appends
        self._next_fd = 3

    def kill(self) -> None:
        self.is_alive = False
        for fd in list(self._fds):
            self._let_go(fd)

    @property
    def open_files(self) -> int:
        return len(self._fds)

    def open(self, path: Path, flags: int) -> int:
        def effect() -> int:
            folder = self.machine.find(path.parent)
            if flags & os.O_CREAT and path.name not in (folder.names or {}):
                self.machine.rename((folder, path.name, self.machine.make()))
            node = self.machine.find(path)
            if node.names is not None and not flags & os.O_DIRECTORY:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if flags & os.O_TRUNC:
                node.data, node.lost = b"", []
            self._next_fd += 1
            self._fds[self._next_fd] = node
            if not flags & os.O_APPEND:
                self._ends[self._next_fd] = 0
            return self._next_fd

        return self._call("open", effect)

    def close(self, fd: int) -> None:
        self._call("close", lambda: self._let_go(fd), instead=lambda: self._let_go(fd))

    def write(self, fd: int, data: bytes | memoryview) -> int:
        node, taken = self._fds[fd], bytes(data[: self.most])

        def effect(taken: bytes = taken) -> int:
            end = self._ends.get(fd, len(node.data))
            node.data = node.data[:end] + taken + node.data[end + len(taken) :]
            if fd in self._ends:
                self._ends[fd] = end + len(taken)
            return len(taken)

        return self._call("write", effect, half=lambda: effect(taken[: len(taken) // 2]))

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        return self._call("pread", lambda: self._fds[fd].data[offset : offset + count])

    def fsync(self, fd: int) -> None:
        node = self._fds[fd]

        def lose() -> None:
            if node.names is None:
                node.lost.append((len(node.on_disk), len(node.data)))

        self._call("fsync", lambda: self.machine.fsync(node), instead=lose)

    def truncate(self, fd: int, length: int) -> None:
        def effect() -> None:
            node = self._fds[fd]
            node.data = node.data[:length]
            node.lost = [(start, min(end, length)) for start, end in node.lost if start < length]

        self._call("truncate", effect)

    def replace(self, old: Path, new: Path) -> None:
        def effect() -> None:
            source, target = self.machine.find(old.parent), self.machine.find(new.parent)
            self.machine.rename((source, old.name, None), (target, new.name, self.machine.find(old)))

        self._call("replace", effect)

    def unlink(self, path: Path) -> None:
        def effect() -> None:
            assert self.machine.find(path).names is None
            self.machine.rename((self.machine.find(path.parent), path.name, None))

        self._call("unlink", effect)

    def mkdir(self, path: Path) -> None:
        def effect() -> None:
            folder = self.machine.find(path.parent)
            assert folder.names is not None
            if path.name in folder.names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self.machine.rename((folder, path.name, self.machine.make(names={})))

        self._call("mkdir", effect)

    def rmdir(self, path: Path) -> None:
        def effect() -> None:
            if self.machine.find(path).names:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            self.machine.rename((self.machine.find(path.parent), path.name, None))

        self._call("rmdir", effect)

    def flock(self, fd: int) -> None:
        def effect() -> None:
            node = self._fds[fd]
            if node.holder not in (None, (self, fd)):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            node.holder = (self, fd)

        self._call("flock", effect)

    def fstat(self, fd: int) -> os.stat_result:
        return self._call("fstat", lambda: _stat(self._fds[fd]))

    def lstat(self, path: Path) -> os.stat_result:
        return self._call("lstat", lambda: _stat(self.machine.find(path)))

    def list(self, path: Path) -> list[str]:
        return self._call("list", lambda: sorted(self.machine.find(path).names or {}))

    def drop_cache(self, fd: int) -> None:
        def effect() -> None:
            node = self._fds[fd]
            node.data, node.lost = node.without_lost(), []

        self._call("drop_cache", effect)

    def _call(
        self,
        kind: str,
        effect: Callable[[], T],
        *,
        half: Callable[[], object] = lambda: None,
        instead: Callable[[], object] = lambda: None,
    ) -> T:
        """Make a call. `half` is what one does in whose middle the process ends, `instead` one that fails."""
        if not self.is_alive:
            raise Killed
        at, when = self.kill_at or (-1, "")
        number = self.calls["all"]
        self.calls.update((kind, "all"))
        if number == at and when != "after":
            if when == "middle":
                half()
            self.kill()
            raise Killed
        error = self.fault(kind, self.calls[kind] - 1)
        if error is not None:
            if isinstance(error, OSError):
                instead()
            raise error
        try:
            result = effect()
        finally:
            if number == at:
                self.kill()
                raise Killed
        error = self.late_fault(kind, self.calls[kind] - 1)
        if error is not None:
            raise error
        return result

    def _let_go(self, fd: int) -> None:
        node = self._fds.pop(fd)
        self._ends.pop(fd, None)
        if node.holder == (self, fd):
            node.holder = None


def _stat(node: Inode) -> os.stat_result:
    mode = stat.S_IFREG if node.names is None else stat.S_IFDIR
    return os.stat_result((mode, node.number, 0, node.links, 0, 0, len(node.data), 0, 0, 0))
