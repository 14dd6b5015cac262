"""Destinations of a batch's records, which come in any order."""

# Tests: tests/batch/journal/test_standard_output.py

from __future__ import annotations

from typing import Protocol

import numpy as np

from radixrt.arrays import BoolArray
from radixrt.batch.journal.journal import Journal
from radixrt.batch.journal.standard_output import StandardOutput


class Sink(Protocol):
    """Takes records by position."""

    @property
    def finished(self) -> BoolArray:
        """Positions with a record, `[N]`."""

    @property
    def durable(self) -> int:
        """Records that will not be lost."""

    def put(self, position: int, record: bytes) -> None: ...

    def end_pass(self) -> None:
        """Write what is due after a pass."""

    def sync(self) -> None:
        """Make all records durable."""


class JournalSink:
    """Records in a journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    @property
    def finished(self) -> BoolArray:
        return self._journal.finished

    @property
    def durable(self) -> int:
        return self._journal.durable

    def put(self, position: int, record: bytes) -> None:
        self._journal.append(position, record)

    def end_pass(self) -> None:
        self._journal.sync_if_due()

    def sync(self) -> None:
        self._journal.sync()


class StreamSink:
    """Records on standard output, where no earlier run has left any."""

    def __init__(self, output: StandardOutput) -> None:
        self._output = output

    @property
    def finished(self) -> BoolArray:
        return np.zeros(self._output.num_lines, np.bool_)

    @property
    def durable(self) -> int:
        return self._output.printed

    def put(self, position: int, record: bytes) -> None:
        self._output.put(position, record)

    def end_pass(self) -> None:
        self._output.flush()

    def sync(self) -> None:
        self._output.flush()
