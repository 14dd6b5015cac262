"""Makes the record of each line from its request's output or its error, and counts the records."""

# Tests: tests/batch/test_run.py

from __future__ import annotations

import json
import logging
import time
from typing import Protocol

import numpy as np

from radixrt.arrays import BoolArray, Int64Array
from radixrt.batch.error_limit import ErrorLimit
from radixrt.batch.formats.line_format import error_line, output_line, record_error, record_tally
from radixrt.batch.formats.openai_batch import ChatReader
from radixrt.batch.formats.record import FORM_ENGINE, LineError, LineErrorType, Reply
from radixrt.batch.reading import Lines
from radixrt.batch.tally import ERROR_RECORD, Tally
from radixrt.output import FinishReason, RequestOutput
from radixrt.text.token_spelling import TokenSpelling

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes records by position: a `LateJournal`, or `StandardOutput`."""

    @property
    def finished(self) -> BoolArray:
        """`[N]`, whether each position has a record of an earlier run; N is 0 if none has."""

    @property
    def keeps(self) -> bool:
        """Whether what it has stays after an end at any moment."""

    def begin(self) -> None:
        """All lines are known now; it may be told so again."""

    @property
    def durable(self) -> int:
        """Records that will not be lost."""

    def append(self, position: int, line: bytes) -> None:
        """Take a record, with its newline."""

    def sync_if_due(self) -> None:
        """`sync`, if there is much to lose or it has waited long."""

    def sync(self) -> None:
        """Make all records durable."""


class RecordCounts:
    """Counts of the records that need no runtime, and the errors of all.

    Attributes:
        error_limit: told of each record with an error.
        kept: records of earlier runs.
        refused: records of lines that did not run.
    """

    def __init__(self, error_limit: ErrorLimit) -> None:
        self.error_limit = error_limit
        self.kept = self.refused = Tally()

    def add_kept(self, record: bytes) -> None:
        """Count a record of an earlier run."""
        value = json.loads(record)
        self.kept += record_tally(value)
        if (error := record_error(value)) is not None:
            self.error_limit.count(*error, is_known=True)

    def add_refused(self, error: LineError, *, is_bad: bool) -> None:
        """Count the record of a line that did not run."""
        self.refused += ERROR_RECORD
        self.error_limit.count(error.type, error.message, is_known=is_bad)


class RecordWriter:
    """Puts one record for each line into a sink.

    Args:
        lines: may become more.
        sink: takes the records.
        counts: told of each record.
        spelling: of the model's tokens.
        created, strict_form: see `BatchConfig`.
        chats: takes answers to chats apart, see `LineParser`.

    Attributes:
        written: lines with a record, including those of earlier runs.
    """

    def __init__(
        self,
        lines: Lines,
        sink: Sink,
        counts: RecordCounts,
        spelling: TokenSpelling,
        created: int | None,
        *,
        strict_form: bool = False,
        chats: ChatReader | None = None,
    ) -> None:
        self._lines, self._chats = lines, chats
        self._sink = sink
        self._counts = counts
        self._spelling = spelling
        self._created = created
        self._strict_form = strict_form
        self._finished = np.flatnonzero(sink.finished)
        self._num_looked_at = 0  # leading lines whose error records are there, if they are bad
        self.written = len(self._finished)

    @property
    def missing(self) -> int:
        """Known lines without a record."""
        return len(self._lines) - self.written

    @property
    def is_complete(self) -> bool:
        """Whether each line of the file has its record."""
        return self._lines.is_whole and not self.missing

    def unfinished(self, positions: Int64Array) -> Int64Array:
        """Those of some lines that had no record when this writer was made."""
        return positions[~np.isin(positions, self._finished)]

    @property
    def durable(self) -> int:
        """Records that will not be lost."""
        return self._sink.durable

    @property
    def keeps(self) -> bool:
        """See `Sink`."""
        return self._sink.keeps

    def refuse_bad_lines(self) -> None:
        """Write the error records of the bad lines that are known now; the sink is told once these are all.

        Raises ErrorRateError if too many lines have errors. If too many are bad, no record is kept: none may tie
        the run to an input that is to be mended.
        """
        is_whole, first = self._lines.is_whole, self._num_looked_at
        is_bad = self._lines.is_bad[first:]
        self._num_looked_at += len(is_bad)
        if len(bad := self.unfinished(first + np.flatnonzero(is_bad))):
            for position, error in zip(bad.tolist(), self._lines.read(bad.tolist()), strict=True):
                assert isinstance(error, LineError)
                self.refuse(position, error, is_bad=True)
        if is_whole:
            if not self._sink.keeps:
                self._counts.error_limit.check_bad_lines(has_run=first > 0)
            self._sink.begin()
        self.enforce_error_limit()

    def refuse(self, position: int, error: LineError, *, is_bad: bool = False) -> None:
        """Write the error record of a line without an answer."""
        self._put(position, error_line(int(self._lines.lines[position]), error))
        self._counts.add_refused(error, is_bad=is_bad)

    def answer(self, position: int, reply: Reply, output: RequestOutput) -> bool:
        """Write the record of an output. False if none can be made: then the line has an error record."""
        if self._strict_form and FORM_ENGINE in reply and output.failure is None:
            cut = [answer for answer in output.outputs if answer.finish_reason is FinishReason.LENGTH]
            if cut:
                count = len(cut[0].token_ids)
                why = f"the answer ended by its length, after {count} tokens, before its form had ended"
                self.refuse(position, LineError(LineErrorType.INCOMPLETE_FORM, why, reply))
                return False
        created = int(time.time()) if self._created is None else self._created
        try:
            record = output_line(
                output.index, reply, output, created=created, spelling=self._spelling, chats=self._chats
            )
        except Exception as error:  # one line's record must not cost the others theirs
            _log.exception("no record can be made of the answer to line %d", output.index + 1)
            why = f"no record can be made of its answer: {type(error).__name__}: {error}"
            self.refuse(position, LineError(LineErrorType.FAILED, why, reply))
            return False
        self._put(position, record)
        if output.failure is not None:
            self._counts.error_limit.count(LineErrorType.FAILED, output.failure)
        return True

    def enforce_error_limit(self) -> None:
        """Raise ErrorRateError if more lines have errors than the limit allows, and records stay."""
        if self._sink.keeps:
            self._counts.error_limit.enforce()

    def end_pass(self) -> None:
        """Tell the sink that a pass has ended."""
        self._sink.sync_if_due()

    def sync(self) -> None:
        """Make all records durable."""
        self._sink.sync()

    def _put(self, position: int, record: bytes) -> None:
        self._sink.append(position, record)
        self.written += 1
