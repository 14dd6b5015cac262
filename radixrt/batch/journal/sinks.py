"""Where the records of a batch go as they come, in any order."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from radixrt.batch.journal.journal import Journal
from radixrt.batch.journal.standard_output import StandardOutput


class Records(Protocol):
    """Where records go."""

    @property
    def finished(self) -> npt.NDArray[np.bool_] | None:
        """Which positions have a record; None: none has."""

    @property
    def counted(self) -> int:
        """Records that will not be lost."""

    def put(self, position: int, line: bytes) -> None: ...

    def settle(self) -> None:
        """A pass has ended: what is due is due now."""

    def sync(self) -> None:
        """Make sure of all that was put."""


class Journaled:
    """In a journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.put, self.settle, self.sync = journal.append, journal.sync_if_due, journal.sync

    @property
    def finished(self) -> npt.NDArray[np.bool_] | None:
        return self._journal.finished

    @property
    def counted(self) -> int:
        return self._journal.durable


class Streamed:
    """On standard output."""

    def __init__(self, output: StandardOutput) -> None:
        self._output = output
        self.put, self.settle, self.sync = output.put, output.flush, output.flush
        self.finished = None

    @property
    def counted(self) -> int:
        return self._output.printed
