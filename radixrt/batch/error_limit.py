"""When so many lines of a batch have errors that it is not worth going on."""

from __future__ import annotations

from collections import Counter

from radixrt.batch.formats.record import LineErrorType
from radixrt.batch.formats.strict_json import short
from radixrt.batch.prescan import Prescan
from radixrt.checks import check_float
from radixrt.errors import ErrorRateError

_MOST_NAMED = 5  # reasons in a message
_MOST_REMEMBERED = 100
_REASON_LENGTH = 200


class ErrorLimit:
    """Counts the lines of a batch that have error records, and stops it where they are too many.

    Args:
        max_error_rate: the greatest share of all lines that may have error records, 0 to 1; None: all may.

    Raises:
        ParameterError: it is outside its bounds.
    """

    def __init__(self, max_error_rate: float | None) -> None:
        self._rate = None if max_error_rate is None else check_float("max_error_rate", max_error_rate, 0.0, 1.0)
        self._num_lines = self._num_errors = 0
        self._reasons: Counter[str] = Counter()

    def check(self, scan: Prescan) -> None:
        """Take the number of all lines. Raises ErrorRateError if the bad ones among them are too many."""
        self._num_lines = len(scan)
        if self._is_exceeded_by(int(scan.is_bad.sum())):
            raise ErrorRateError(
                f"{scan.summary()}\nThat is more than a max_error_rate of {self._rate:g} allows. Nothing has run."
            )

    def count(self, kind: LineErrorType, message: str) -> None:
        """Count a line that has an error record."""
        if self._rate is None:
            return
        self._num_errors += 1
        reason = f"{kind.value}: {short(message, _REASON_LENGTH)}"
        if reason in self._reasons or len(self._reasons) < _MOST_REMEMBERED:
            self._reasons[reason] += 1

    def enforce(self) -> None:
        """Raise ErrorRateError if there are too many."""
        if self._is_exceeded_by(self._num_errors):
            raise ErrorRateError(self._message())

    def _is_exceeded_by(self, num_errors: int) -> bool:
        return self._rate is not None and num_errors > 0 and num_errors / self._num_lines > self._rate

    def _message(self) -> str:
        named = self._reasons.most_common(_MOST_NAMED)
        lines = [f"  {count:,} x {reason}" for reason, count in named]
        if others := self._num_errors - sum(count for _, count in named):
            lines.append(f"  {others:,} x something else")
        return "\n".join(
            [
                f"{self._num_errors:,} of {self._num_lines:,} lines have errors, more than a max_error_rate of "
                f"{self._rate:g} allows:",
                *lines,
            ]
        )
