"""A file of a batch that a thread reads, while the lines that are known already run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from radixrt.arrays import BoolArray, Int32Array, Int64Array
from radixrt.batch.formats.record import LineError
from radixrt.batch.known_lines import KnownLines, SoundLine
from radixrt.batch.scan import Scan
from radixrt.engine.signals import Interrupt


class Lines(Protocol):
    """What a run needs of the lines of a file: a `Scan` has all, a `Reading` those that are known so far."""

    @property
    def is_whole(self) -> bool:
        """Whether the file has no others."""

    @property
    def lines(self) -> Int64Array: ...

    @property
    def is_bad(self) -> BoolArray: ...

    def __len__(self) -> int: ...

    def prompt(self, position: int) -> Int32Array: ...

    def read(self, positions: Iterable[int]) -> Iterator[SoundLine | LineError]: ...

    def wait(self, known: int, seconds: float) -> None:
        """Return once more lines than `known` are known, or all are, or so many seconds have passed."""

    def whole(self) -> Scan:
        """All lines, once they are known."""


class Reading:
    """Begins a thread that reads. Where that has failed, each question whether all is read raises its error.

    Args:
        known: gets the lines.
        read: returns all of them, unless its argument stops it.
    """

    def __init__(self, known: KnownLines, read: Callable[[Interrupt], Scan]) -> None:
        self._known, self._read = known, read
        self._scan: Scan | None = None
        self._error: BaseException | None = None
        self._ending = Interrupt()
        self._thread = threading.Thread(target=self._run, name="radixrt-reading", daemon=True)
        self._thread.start()

    @property
    def is_whole(self) -> bool:
        """See `Lines`."""
        if self._error is not None:
            raise self._error
        return self._scan is not None

    @property
    def lines(self) -> Int64Array:
        """See `Scan`, as the next ones."""
        lines: Int64Array = self._known.rows["line"]
        return lines

    @property
    def is_bad(self) -> BoolArray:
        is_bad: BoolArray = self._known.rows["is_bad"]
        return is_bad

    def __len__(self) -> int:
        return len(self._known)

    def prompt(self, position: int) -> Int32Array:
        return self._known.prompt(position)

    def read(self, positions: Iterable[int]) -> Iterator[SoundLine | LineError]:
        return self._known.read(positions)

    def wait(self, known: int, seconds: float) -> None:
        """See `Lines`."""
        self._known.wait(known, seconds)

    def whole(self) -> Scan:
        """See `Lines`."""
        while not self.is_whole:
            self.wait(sys.maxsize, 1.0)  # not for ever: a signal wakes nobody
        assert self._scan is not None
        return self._scan

    def stop(self) -> None:
        """No more lines are read. Returns once the thread has ended."""
        self._ending.set(at_once=True)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._scan = self._read(self._ending)
        except BaseException as error:  # for who asks: this thread has no one else to tell
            self._error = error
        finally:
            self._known.end()
