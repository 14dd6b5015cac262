"""The text of one request: stream, stop strings, end."""

from __future__ import annotations

from radixrt.sampling_params import SamplingParams
from radixrt.text.detokenizer import Detokenizer
from radixrt.text.tokenizer import Tokenizer


def find_stop(stops: tuple[str, ...], text: str, after: int = 0) -> tuple[int, int] | None:
    """Start and end of the stop string that ends first in `text`, beyond `after`; None if there is none.

    It is the longest of several that end there, so the result does not depend on the boundaries between tokens.
    """
    starts = {stop: text.find(stop, max(0, after + 1 - len(stop))) for stop in stops}
    found = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
    if not found:
        return None
    end, start = min(found)
    return start, end


def unfinished_stop(stops: tuple[str, ...], text: str) -> int:
    """Count the last characters of `text` that could begin a stop string."""
    longest = max(map(len, stops), default=1)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        rest = text[start:]
        if any(stop.startswith(rest) and stop != rest for stop in stops):
            return len(rest)
    return 0


class TextBuilder:
    """Makes the text of one request from its generated tokens.

    `push` each token, except one that ends the request by its id; call `finish` when the request has ended. All
    deltas, one after `finish` included, join to the text that `finish` returns. No delta shows part of a stop
    string that is later cut off.

    The text ends before the first stop string to be complete, or after it with `include_stop_str`; one that is
    complete before there are `min_new_tokens` tokens is ordinary text. Without stop strings, tokens are decoded
    only when `delta` or `finish` asks for text.

    Attributes:
        matched: the stop string that ended the text, or None. Final after `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.matched: str | None = None
        self._tokenizer, self._params = tokenizer, params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._ids: list[int] = []
        self._fed = 0  # ids given to the detokenizer
        self._parts: list[str] = []  # of the text, safe to show
        self._taken = 0  # parts that delta has returned
        self._held = ""  # certain text after them that may be the beginning of a stop
        self._ordinary = 0  # no stop ends in these first characters of _held

    def push(self, token_id: int) -> bool:
        """Take the next token. Returns whether a stop string is complete; later tokens are ignored."""
        if self.matched is None:
            self._ids.append(token_id)
            if self._params.stop:
                self._feed()
        return self.matched is not None

    def delta(self) -> str:
        """Return the text that has become safe to show since the last call."""
        self._feed()
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def finish(self) -> str:
        """Return the final text. `matched` may be set only now, by text that was not certain before."""
        if self._fed == 0:
            self._held = self._tokenizer.decode(self._ids, self._params.skip_special_tokens)
            self._fed = len(self._ids)
        elif self.matched is None:
            self._feed()
            self._held += self._detokenizer.finish()
            self._search(self._held)
        if self.matched is None:
            self._parts.append(self._held)
        self._held = ""
        return "".join(self._parts)

    def _feed(self) -> None:
        """Decode the tokens not yet fed, and divide their text between `_parts` and `_held`."""
        stops = self._params.stop
        while self._fed < len(self._ids) and self.matched is None:
            self._held += self._detokenizer.push(self._ids[self._fed])
            self._fed += 1
            if stops:
                self._search(self._held + self._detokenizer.tentative())  # which is final if it completes a stop
            if self.matched is None:
                safe = len(self._held) - unfinished_stop(stops, self._held)
                if safe:
                    self._parts.append(self._held[:safe])
                    self._held = self._held[safe:]
                    self._ordinary = max(0, self._ordinary - safe)

    def _search(self, text: str) -> None:
        """End the text at the first stop in `text`, which follows `_parts`, if there is one and it counts."""
        if self._fed < self._params.min_new_tokens:
            self._ordinary = len(text)
        elif found := find_stop(self._params.stop, text, self._ordinary):
            start, end = found
            self.matched = text[start:end]
            self._parts.append(text[: end if self._params.include_stop_str else start])
