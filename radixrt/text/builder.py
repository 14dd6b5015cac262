"""The text of one request: its stream, its stop strings, its end."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.text.detokenizer import Detokenizer
from radixrt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopStrings:
    """Non-empty strings that end a text.

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


class TextBuilder:
    """Makes the text of one request from its generated tokens.

    `push` each token, except one that ends the request by its id; call `finish` when the request has ended. All
    deltas, one after `finish` included, join to the text that `finish` returns. No delta shows part of a stop
    string that is later cut off.

    Without stop strings tokens are decoded only when `delta` or `finish` asks for text.

    Args:
        stop: the text ends before the first of these to be complete (`StopStrings`).
        include_stop_str: end after the stop instead.
        min_tokens: a stop that is complete before there are this many tokens is ordinary text.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop)
        self._include_stop = include_stop_str
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._fed = 0  # ids given to the detokenizer
        self._parts: list[str] = []  # of the text, safe to show
        self._taken = 0  # parts that delta has returned
        self._held = ""  # certain text after them that may be the beginning of a stop
        self._ordinary = 0  # no stop ends in these first characters of _held
        self._matched: str | None = None
        self._finished = False

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None. Final after `finish`."""
        return self._matched

    @property
    def text(self) -> str:
        """The text that is safe to show so far; after `finish`, all of it."""
        self._feed()
        return "".join(self._parts)

    def push(self, token_id: int) -> bool:
        """Take the next token. Returns whether a stop string is complete; later tokens are ignored."""
        if self._matched is None:
            self._ids.append(token_id)
            if self._stops.strings:
                self._feed()
        return self._matched is not None

    def delta(self) -> str:
        """Return the text that has become safe to show since the last call."""
        self._feed()
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def finish(self) -> str:
        """Return the final text. `matched` may be set only now, by text that was not certain before."""
        if not self._finished:
            if self._fed == 0:
                self._held = self._tokenizer.decode(self._ids, self._skip)
            elif self._matched is None:
                self._feed()
                self._held += self._detokenizer.finish()
                if self._fed >= self._min_tokens:
                    self._search(self._held)
            if self._matched is None:
                self._parts.append(self._held)
            self._finished = True
        return "".join(self._parts)

    def _feed(self) -> None:
        """Decode the tokens not yet fed, and divide their text between `_parts` and `_held`."""
        while self._fed < len(self._ids) and not self._finished and self._matched is None:
            self._held += self._detokenizer.push(self._ids[self._fed])
            self._fed += 1
            if self._stops.strings:
                # If a stop is complete here, tentative text is final.
                text = self._held + self._detokenizer.tentative()
                if self._fed < self._min_tokens:
                    self._ordinary = len(text)
                else:
                    self._search(text)
            if self._matched is None:
                safe = len(self._held) - self._stops.unsafe(self._held)
                if safe:
                    self._parts.append(self._held[:safe])
                    self._held = self._held[safe:]
                    self._ordinary = max(0, self._ordinary - safe)

    def _search(self, text: str) -> None:
        """End the text at the first stop in `text`, which follows `_parts`, if there is one."""
        found = self._stops.find(text, self._ordinary)
        if found is not None:
            start, end = found
            self._matched = text[start:end]
            self._parts.append(text[: end if self._include_stop else start])
