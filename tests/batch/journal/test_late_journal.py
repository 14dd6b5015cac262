"""Records that wait for their journal get there together."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from radixrt.batch.journal.late_journal import LateJournal


class FakeJournal:
    """Gets signals in the middle: so many with its first record."""

    def __init__(self, signals: int) -> None:
        self.signals = signals
        self.lines: dict[int, bytes] = {}

    def append(self, position: int, line: bytes) -> None:
        self.lines[position] = line
        signals, self.signals = self.signals, 0
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("signals", "is_whole"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_signal_while_records_are_moved(tmp_path: Path, signals: int, is_whole: bool) -> None:
    """Either all of them are kept, or it does not say so: a third signal acts at once."""
    lines = {position: b"%d\n" % position for position in (4, 0, 2)}
    opened: Any = FakeJournal(signals)
    with LateJournal(tmp_path, lambda: opened) as journal:
        for position, line in lines.items():
            journal.append(position, line)
        assert not journal.keeps
        try:
            journal.begin()
        except KeyboardInterrupt:
            assert signals
        else:
            assert not signals
        assert journal.keeps == is_whole
        assert (opened.lines == lines) == is_whole
        if is_whole:
            journal.begin()  # once is enough
            journal.append(1, b"1\n")
            assert opened.lines == {**lines, 1: b"1\n"}
