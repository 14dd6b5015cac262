"""Strings at which a text ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopStrings:
    """Non-empty strings, the first of which to be complete ends a text.

    The stop that ends first in the text wins, the longest of several that end there, so the result does not depend
    on the boundaries between tokens.
    """

    strings: tuple[str, ...]

    def find(self, text: str, after: int = 0) -> tuple[int, int] | None:
        """Return start and end of the first stop in `text` that ends beyond `after`."""
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
        """Count the last characters of `text` that could begin a stop."""
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
