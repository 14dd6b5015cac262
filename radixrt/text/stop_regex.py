"""A regular expression that is looked for in a text as it grows."""

from __future__ import annotations

import time

import regex

from radixrt.errors import ParameterError
from radixrt.sampling_params import MAX_STOP_LENGTH

LOOK_BACK = MAX_STOP_LENGTH  # characters before a match that a pattern sees
SECONDS = 0.1  # of work on one text that may come at once
SECONDS_PER_CHARACTER = 0.001  # and in the long run


class StopRegex:
    """One regular expression, and how far a text has been searched for it.

    After each character, the text so far is searched as if it ended there, so that what is found does not depend
    on the pieces in which the text comes. Only the last `MAX_STOP_LENGTH` characters can be part of a match, and
    of these only the ones from the first that may begin one: those before are never searched again.

    Positions count from the beginning of the text, or of what is left of it after `forget`.
    """

    def __init__(self, pattern: str) -> None:
        self.begun = 0  # no match that is still possible begins before
        self._searched = 0  # characters
        self._pattern = pattern
        self._regex = regex.compile(pattern)
        self._seconds = SECONDS  # left for searching

    def find(self, text: str, certain: int, ordinary: int) -> tuple[int, int, int] | None:
        """The first match beyond the first `ordinary` characters: at how many it is found, its start and its end.

        Other text may yet come in place of that after the first `certain` characters. A match that is found within
        the ordinary ones counts as none, and no later one begins with it. Raises ParameterError if the search
        takes too long.
        """
        begun = self.begun
        for seen in range(self._searched + 1, len(text) + 1):
            begun = max(begun, seen - MAX_STOP_LENGTH)
            found = self._search(text, begun, seen)
            while found is not None and not found[2] and seen <= ordinary:
                begun = found[0] + 1
                found = self._search(text, begun, seen) if begun <= seen else None
            if found is not None and not found[2]:
                return seen, *found[:2]
            begun = max(begun, seen) if found is None else found[0]
            if seen <= certain:
                self.begun, self._searched = begun, seen
        return None

    def forget(self, count: int) -> None:
        """Count positions without the first `count` characters, all at least LOOK_BACK before `begun`."""
        self.begun -= count
        self._searched -= count

    def _search(self, text: str, begun: int, seen: int) -> tuple[int, int, bool] | None:
        """The first match in text[begun:seen], or one that may begin there: where, and whether it only begins."""
        first, before = max(0, begun - LOOK_BACK), time.thread_time()
        try:
            if self._seconds <= 0:
                raise TimeoutError
            found = self._regex.search(
                text[first:seen], begun - first, partial=True, concurrent=False, timeout=self._seconds
            )
        except TimeoutError:
            self._seconds = 0.0
            raise ParameterError(
                f"looking for stop_regex {self._pattern!r} takes more than {SECONDS_PER_CHARACTER * 1000:g} ms a "
                "character; write one that can match in fewer ways"
            ) from None
        spent = time.thread_time() - before
        self._seconds = min(SECONDS, self._seconds - spent + SECONDS_PER_CHARACTER)
        return None if found is None else (first + found.start(), first + found.end(), found.partial)
