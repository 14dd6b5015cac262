"""Counts why lines have errors, and stops a batch in which too many have."""

# Tests: tests/batch/test_run.py

from __future__ import annotations

from collections import Counter

from radixrt.batch.formats.record import LineErrorType
from radixrt.batch.scan import Scan
from radixrt.checks import short
from radixrt.errors import ErrorRateError

_MAX_NAMED = 5  # reasons in a message
_MAX_REMEMBERED = 100
_REASON_LENGTH = 200


class ErrorLimit:
    """Counts the lines of a batch with error records.

    Args:
        max_error_rate: greatest share of lines that may have error records, 0 to 1; None: no limit.
        scan: all lines.
    """

    def __init__(self, max_error_rate: float | None, scan: Scan) -> None:
        self._rate = max_error_rate
        self._scan = scan
        self._num_errors = 0
        self._of_bad_lines: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    @property
    def failures(self) -> list[str]:
        """Why sound lines have errors: the most frequent reasons with their counts, a line each."""
        return _named(self._reasons)

    def check_bad_lines(self) -> None:
        """Raise ErrorRateError if the scan has found too many bad lines."""
        if self._is_exceeded_by(int(self._scan.is_bad.sum())):
            raise ErrorRateError(
                f"{self._scan.summary()}\n"
                f"That is more than a max_error_rate of {self._rate:g} allows. Nothing has run."
            )

    def end_bad_lines(self) -> None:
        """What is counted from now on are errors of sound lines."""
        self._of_bad_lines, self._reasons = self._reasons, Counter()

    def count(self, kind: LineErrorType, message: str) -> None:
        """Count a line with an error record."""
        self._num_errors += 1
        reason = f"{kind.value}: {short(message, _REASON_LENGTH)}"
        if reason in self._reasons or len(self._reasons) < _MAX_REMEMBERED:
            self._reasons[reason] += 1

    def enforce(self) -> None:
        """Raise ErrorRateError if there are too many."""
        if self._is_exceeded_by(self._num_errors):
            raise ErrorRateError(self._message())

    def _is_exceeded_by(self, num_errors: int) -> bool:
        return self._rate is not None and num_errors > 0 and num_errors / len(self._scan) > self._rate

    def _message(self) -> str:
        reasons = self._of_bad_lines + self._reasons
        lines = _named(reasons)
        if others := self._num_errors - sum(count for _, count in reasons.most_common(_MAX_NAMED)):
            lines.append(f"  {others:,} x something else")
        return "\n".join(
            [
                f"{self._num_errors:,} of {len(self._scan):,} lines have errors, more than a max_error_rate of "
                f"{self._rate:g} allows:",
                *lines,
            ]
        )


def _named(reasons: Counter[str]) -> list[str]:
    return [f"  {count:,} x {reason}" for reason, count in reasons.most_common(_MAX_NAMED)]
