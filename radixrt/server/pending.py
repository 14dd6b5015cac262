"""Answers that clients wait for: those that run, those that wait, and those whose prompts are being read."""

# Tests: tests/server/test_refusals.py

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from radixrt.server.refusal import Refusal


class Pending:
    """Counts them; `most` may be pending at once. Used from the event loop's thread alone."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0

    @contextmanager
    def held(self, count: int) -> Iterator[None]:
        """So many more are pending inside. Raises Refusal where that is too many."""
        if self._count + count > self._most:
            told = f"{self._count} answers are pending, and {self._most} are the most; come again"
            raise Refusal(429, told, "too_many_requests", {"Retry-After": "1"})
        self._count += count
        try:
            yield
        finally:
            self._count -= count
