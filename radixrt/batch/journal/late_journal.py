"""A journal that is begun once it is known of which run it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from radixrt.arrays import BoolArray
from radixrt.batch.journal.journal import Journal
from radixrt.batch.journal.waiting_lines import WaitingLines
from radixrt.engine.signals import deferred

_WAITING_FILE = "waiting"


class LateJournal:
    """Records by position: until `begin` they wait on the disk, and a kill loses them; from then on a journal has
    them.

    Args:
        folder: for a file of records that wait.
        opened: opens the journal. Raises as `RunFolder.begin` does.

    Raises:
        BatchFileError: there can be no such file.
        JournalError: the disk refuses.
    """

    def __init__(self, folder: Path, opened: Callable[[], Journal]) -> None:
        self._opened = opened
        self._waiting = WaitingLines(folder / _WAITING_FILE)
        self._journal: Journal | None = None

    def __enter__(self) -> LateJournal:
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.close()

    @property
    def keeps(self) -> bool:
        """Whether the journal is begun, and has all records."""
        return self._journal is not None

    @property
    def finished(self) -> BoolArray:
        """`[N]`, positions with a record in the journal; before there is one, N is 0."""
        return np.zeros(0, np.bool_) if self._journal is None else self._journal.finished

    @property
    def durable(self) -> int:
        """Records that will not be lost."""
        return 0 if self._journal is None else self._journal.durable

    def begin(self) -> None:
        """Open the journal, unless that is done, and give it the records that wait."""
        if self._journal is not None:
            return
        with deferred():  # a second Ctrl-C must not lose those that still wait
            journal = self._opened()
            for position in self._waiting.positions():
                journal.append(position, self._waiting.take(position))
            self._journal = journal  # last: whatever cuts this claims no record that was lost

    def append(self, position: int, line: bytes) -> None:
        """Take a record, with its newline."""
        if self._journal is None:
            self._waiting.put(position, line)
        else:
            self._journal.append(position, line)

    def sync_if_due(self) -> None:
        """See `Journal`."""
        if self._journal is not None:
            self._journal.sync_if_due()

    def sync(self) -> None:
        """See `Journal`."""
        if self._journal is not None:
            self._journal.sync()
