"""The text of one request: token by token, up to a stop or its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from radixrt.sampling_params import SamplingParams
from radixrt.text.hidden_tokens import HiddenTokens
from radixrt.text.stop_regex import LOOK_BACK, StopRegex
from radixrt.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CONTEXT = 8  # tokens
_MAX_WINDOW = 64  # tokens
_NOTHING: Mapping[int, str] = MappingProxyType({})


class Detokenizer:
    """Decodes a growing list of token ids, and returns text as it becomes certain.

    All results of `push` and the one of `finish` join to `tokenizer.decode` of all ids. Text that another token
    may still change is held back: the bytes of an unfinished character, and a whole run of byte-fallback tokens,
    which one bad byte turns into replacements.

    A push costs the decoding of a few tokens: the `_window` of those whose text is not certain yet, and a
    `_context` of some before them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text
        self._in_bytes = False  # the window ends in a run of byte-fallback tokens
        self._due = 1  # length at which the window is decoded next

    def push(self, *token_ids: int) -> str:
        """Take the next tokens. Returns the text that has become certain, often ""."""
        for token_id in token_ids:
            self._window.append(token_id)
            # After bytes decoding may drop a token that spells nothing, and join the bytes around it.
            self._in_bytes = token_id in self._tokenizer.byte_ids or (self._in_bytes and self._is_silent(token_id))
        if self._in_bytes or len(self._window) < self._due:
            return ""
        text = self._window_text()
        certain = text.removesuffix(_REPLACEMENT)  # one for all bytes of an unfinished character
        new = certain[self._returned :]
        if text and certain == text:  # the window becomes context
            while len(self._window) > 1 and self._is_silent(self._window[-1]):
                self._window.pop()  # it came with others: the last of a context decides about what follows
            self._context += self._window
            self._context_text += text
            anchor = self._tokenizer.anchor
            if len(self._context) > _MAX_CONTEXT and anchor is not None:
                self._context = [anchor, self._context[-1]]
                self._context_text = self._tokenizer.decode(self._context, self._skip)
            self._window, self._returned, self._due = [], 0, 1
        elif not text and self._is_silent(self._window[-1]):
            self._window.pop()
        else:  # half a character, or a leading blank, which spells nothing by itself
            self._returned = max(self._returned, len(certain))
            size = len(self._window)
            # Beyond the limit only when the size has doubled, so endless nonsense costs no more than text.
            self._due = size + 1 if size < _MAX_WINDOW else 2 * size
        return new

    def tentative(self) -> str:
        """Return what `finish` would now, if it is whole characters; "" beyond 64 uncertain tokens."""
        if not self._window or len(self._window) > _MAX_WINDOW:
            return ""
        text = self._window_text()
        return "" if text.endswith(_REPLACEMENT) else text[self._returned :]

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        rest = self._window_text()[self._returned :]
        self._window.clear()
        return rest

    def state(self) -> list[Any]:
        """All that it remembers, as JSON has it."""
        return [self._context, self._context_text, self._window, self._returned, self._in_bytes, self._due]

    def restore(self, state: list[Any]) -> None:
        """Go on from the `state` of another one, of the same tokenizer."""
        self._context, self._context_text, self._window, self._returned, self._in_bytes, self._due = state

    @property
    def at_boundary(self) -> bool:
        """Whether all text so far has been returned, so that the next token's begins here."""
        return not self._window

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._context + self._window, self._skip)[len(self._context_text) :]

    def _is_silent(self, token_id: int) -> bool:
        """Whether a token spells nothing in the middle of a text, like a skipped special token."""
        return self._tokenizer.decode_inside([token_id], self._skip) == ""


def find_stop(stops: tuple[str, ...], text: str, after: int = 0) -> tuple[int, int] | None:
    """Start and end of the stop string that ends first in `text`, beyond `after`; None if there is none.

    It is the longest of several that end there, so the result does not depend on the boundaries between tokens.
    """
    found = []
    for stop in stops:
        start = text.find(stop, max(0, after + 1 - len(stop)))
        if start >= 0:
            found.append((start + len(stop), start))
    if not found:
        return None
    end, start = min(found)
    return start, end


def unfinished_stop(stops: tuple[str, ...], text: str) -> int:
    """Count the last characters of `text` that could begin a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest


class TextBuilder:
    """Makes the text of one request from its generated tokens.

    `push` each token, but one that ends the request by its id: that is left out, or goes to `end_with` where there
    is `include_stop_str`. Call `finish` when the request has ended. All deltas, one after `finish` included, join
    to the text that `finish` returns. No delta shows part of a stop that is later cut off.

    The text ends before the first stop string or match of a `stop_regex` to be complete, or after it with
    `include_stop_str`; one that is complete before there are `min_new_tokens` tokens is ordinary text.
    `matched` is the text of the stop that ended it, or None; it is final after `finish`. A search that takes too
    long raises ParameterError once; the text then goes on without stops.

    `hidden`: special tokens that are not shown and that stop strings name, with their texts, by id. Stop strings
    are looked for in the text with them, regular expressions in the text as it is shown.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, hidden: Mapping[int, str] = _NOTHING) -> None:
        self.matched: str | None = None
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._regexes = tuple(StopRegex(pattern) for pattern in params.stop_regex)
        self._searches = bool(params.stop or params.stop_regex)  # for stops, still
        self._count = 0  # tokens
        self._parts: list[str] = []  # of the text, safe to show
        self._taken = 0  # parts that delta has returned
        # The end of the certain text: what may begin a stop, and before it what regular expressions look back at.
        self._tail = ""
        self._shown = 0  # characters of the tail that are in _parts
        self._ordinary = 0  # no stop ends in these first characters of the tail
        self._hidden = HiddenTokens(hidden, params.stop)  # in the tail

    def push(self, token_id: int) -> bool:
        """Take the next token. Returns whether a stop is complete; later tokens are ignored."""
        if self.matched is not None:
            return True
        self._count += 1
        self._tail += self._detokenizer.push(token_id)
        if self._searches:
            text = self._tail + self._detokenizer.tentative()  # which is final if it completes a stop
            if self._hidden.stops and self._count >= self._params.min_new_tokens:
                self._hidden.take(token_id, len(text))
            self._search(text)
        if self.matched is None:
            self._show_what_is_safe()
        return self.matched is not None

    def end_with(self, token_id: int) -> None:
        """Take the token that ended the request by its id. The whole of its text stays."""
        self._tail += self._detokenizer.push(token_id)
        self._searches = False

    def delta(self) -> str:
        """Return the text that has become safe to show since the last call."""
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def finish(self) -> str:
        """Return the final text. `matched` may be set only now, by text that was not certain before."""
        if self.matched is None:
            self._tail += self._detokenizer.finish()
            if self._searches:
                self._search(self._tail)
        if self.matched is None:
            self._parts.append(self._tail[self._shown :])
            self._shown = len(self._tail)
        return "".join(self._parts)

    def _search(self, text: str) -> None:
        """End the text at the first stop in `text`, the tail and what may follow it, if there is one."""
        if self._count < self._params.min_new_tokens:
            self._ordinary = len(text)
        self._searches = False  # if this raises
        matches = [one.find(text, len(self._tail), self._ordinary) for one in self._regexes]
        found = [(*match, text[match[1] : match[2]]) for match in matches if match is not None]
        after = max(self._ordinary, self._shown)
        if stop := find_stop(self._params.stop, text, after):
            found.append((stop[1], *stop, text[slice(*stop)]))
        if self._hidden:
            whole = self._hidden.put_into(text)
            if stop := find_stop(self._hidden.stops, whole, self._hidden.place_of(after)):
                start, end = map(self._hidden.before, stop)
                found.append((end, start, end, whole[slice(*stop)]))
        self._searches = True
        if found:
            _, start, _, self.matched = min(found, key=lambda stop: (stop[0], stop[1], -stop[2]))
            self._parts.append(text[self._shown : start] + (self.matched if self._params.include_stop_str else ""))

    def _show_what_is_safe(self) -> None:
        safe = len(self._tail)
        if self._searches:
            safe -= unfinished_stop(self._params.stop, self._tail)
            safe = min([safe, *(one.begun for one in self._regexes)])
            if self._hidden:
                whole = self._hidden.put_into(self._tail)
                safe = min(safe, self._hidden.before(len(whole) - unfinished_stop(self._hidden.stops, whole)))
        if safe <= self._shown:
            return
        self._parts.append(self._tail[self._shown : safe])
        cut = max(0, safe - LOOK_BACK) if self._regexes else safe
        self._tail, self._shown, self._ordinary = self._tail[cut:], safe - cut, max(0, self._ordinary - cut)
        self._hidden.forget(cut)
        for one in self._regexes:
            one.forget(cut)
