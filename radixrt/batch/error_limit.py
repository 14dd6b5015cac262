"""Counts why lines have errors, and stops a batch in which too many have."""

# Tests: tests/batch/test_run.py

from __future__ import annotations

from collections import Counter

from radixrt.batch.formats.record import LineErrorType
from radixrt.batch.reading import Lines
from radixrt.checks import short
from radixrt.errors import ErrorRateError

_MAX_NAMED = 5  # reasons in a message
_MAX_REMEMBERED = 100
_REASON_LENGTH = 200


class ErrorLimit:
    """Counts the lines of a batch with error records.

    Args:
        max_error_rate: greatest share of lines that may have error records, 0 to 1; None: no limit.
        lines: the share is one of all, so there is no limit until they are known.
    """

    def __init__(self, max_error_rate: float | None, lines: Lines) -> None:
        self._rate = max_error_rate
        self._lines = lines
        self._num_errors = 0
        self._others: Counter[str] = Counter()  # of bad lines, and of earlier runs
        self._reasons: Counter[str] = Counter()

    @property
    def failures(self) -> list[str]:
        """Why sound lines have errors in this run: the most frequent reasons with their counts, a line each."""
        return _named(self._reasons)

    def check_bad_lines(self, *, has_run: bool = False) -> None:
        """Raise ErrorRateError if all lines are known, and too many are bad; `has_run`: other lines have run."""
        if self._lines.is_whole and self._is_exceeded_by(int(self._lines.is_bad.sum())):
            nothing = "" if has_run else " Nothing has run."
            raise ErrorRateError(
                f"{self._lines.whole().summary()}\n"
                f"That is more than a max_error_rate of {self._rate:g} allows.{nothing}"
            )

    def count(self, kind: LineErrorType, message: str, *, is_known: bool = False) -> None:
        """Count a line with an error record; `is_known`: it is bad, or an earlier run has made the record."""
        self._num_errors += 1
        reasons = self._others if is_known else self._reasons
        reason = f"{kind.value}: {short(message, _REASON_LENGTH)}"
        if reason in reasons or len(reasons) < _MAX_REMEMBERED:
            reasons[reason] += 1

    def enforce(self) -> None:
        """Raise ErrorRateError if there are too many."""
        if self._is_exceeded_by(self._num_errors):
            raise ErrorRateError(self._message())

    def _is_exceeded_by(self, num_errors: int) -> bool:
        if self._rate is None or not num_errors or not self._lines.is_whole:
            return False
        return num_errors / len(self._lines) > self._rate

    def _message(self) -> str:
        reasons = self._others + self._reasons
        lines = _named(reasons)
        if others := self._num_errors - sum(count for _, count in reasons.most_common(_MAX_NAMED)):
            lines.append(f"  {others:,} x something else")
        return "\n".join(
            [
                f"{self._num_errors:,} of {len(self._lines):,} lines have errors, more than a max_error_rate of "
                f"{self._rate:g} allows:",
                *lines,
            ]
        )


def _named(reasons: Counter[str]) -> list[str]:
    return [f"  {count:,} x {reason}" for reason, count in reasons.most_common(_MAX_NAMED)]
