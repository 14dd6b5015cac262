"""Lines whose pass failed, on their way to the one that is at fault."""

from __future__ import annotations

from collections import deque


class Retries:
    """Groups of lines that are run again, each apart from all else, after a pass of theirs has failed.

    What fails is halved, and each half is run, down to lines that fail alone. A pass of k lines that fails costs
    at most 2k - 2 runs of groups, in which each line runs at most ceil(log2 k) times again; if k is 1, one run. A
    run takes the passes that its lines take together when nothing else runs.

    True as long as a group waits or runs.
    """

    def __init__(self) -> None:
        self._groups: deque[list[int]] = deque()
        self._running = 0  # lines of the group that runs apart

    def __bool__(self) -> bool:
        return bool(self._groups or self._running)

    def take(self) -> list[int]:
        """The next group to run, once the one before has ended; none if there is no other."""
        group = self._groups.popleft() if self._groups else []
        self._running = len(group)
        return group

    def book(self, failed: list[int]) -> bool:
        """Note the lines that one pass has failed. False if it is a line that ran alone: it is not run again."""
        if self._running == 1:
            return False
        half = len(failed) // 2
        # The halves come before what failed earlier: few groups wait at a time.
        self._groups.extendleft(group for group in (failed[half:], failed[:half]) if group)
        return True
