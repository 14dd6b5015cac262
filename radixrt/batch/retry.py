"""Retries of lines whose pass failed, until the faulty line is found."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Line = TypeVar("Line")


class Retries(Generic[Line]):
    """Groups of lines to run again, each by itself, after one of their passes failed.

    A failed group is halved, and each half is run, down to lines that fail alone. A failed pass of k lines costs
    at most 2k - 2 runs of groups, in which each line runs at most ceil(log2 k) times again; if k is 1, one run. A
    run takes the passes that its lines take together when nothing else runs.
    """

    def __init__(self) -> None:
        self._groups: deque[list[Line]] = deque()
        self._running = 0  # lines of the group that runs

    @property
    def is_active(self) -> bool:
        """Whether a group waits or runs."""
        return bool(self._groups or self._running)

    def take(self) -> list[Line]:
        """The next group to run, once the previous one has ended; empty if there is none."""
        group = self._groups.popleft() if self._groups else []
        self._running = len(group)
        return group

    def book(self, failed: list[Line]) -> bool:
        """Queue the lines of a failed pass. False if the line ran alone: it is not run again."""
        if self._running == 1:
            return False
        half = len(failed) // 2
        # The halves come before what failed earlier: few groups wait at a time.
        self._groups.extendleft(group for group in (failed[half:], failed[:half]) if group)
        return True
