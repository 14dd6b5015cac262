"""Strings at which a text ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text as soon as one of them is complete.

    The stop whose last character comes first in the text wins; of several that end there, the longest. So the
    end does not depend on where one token's text ends and the next one's begins.

    Attributes:
        strings: none of them empty.
    """

    strings: tuple[str, ...]

    def find(self, text: str, after: int = 0) -> tuple[int, int] | None:
        """Start and end of the stop that is complete first in `text`, of those that end beyond `after`."""
        best: tuple[int, int] | None = None
        for string in self.strings:
            start = text.find(string, max(0, after + 1 - len(string)))
            if start < 0:
                continue
            end = start + len(string)
            if best is None or (end, start) < (best[1], best[0]):
                best = start, end
        return best

    def unsafe(self, text: str) -> int:
        """How many of the last characters of `text` could be the beginning of a stop."""
        longest = 0
        for string in self.strings:
            start = max(0, len(text) - len(string) + 1)
            while len(text) - start > longest:
                start = text.find(string[0], start)
                if start < 0:
                    break
                if string.startswith(text[start:]):
                    longest = max(longest, len(text) - start)
                    break
                start += 1
        return longest
