"""JSON as models write it, made valid as it comes."""

from __future__ import annotations

import json
import math
import re

import regex

from radixrt.parsers.source import Kind, Part, Source, Steps, collected, match_next

MOST_DEEP = 100  # arrays and objects within one another: Python's own reader takes no more than some hundreds

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_BLANKS = regex.compile(r"\s+")
_NO_BLANKS = re.compile(r"[^ \t\n\r]")  # among blanks: those that JSON does not know
_PLAIN = regex.compile(r'[^"\\\x00-\x1f]+')
_HEX = "[0-9a-fA-F]"
# Half of a surrogate pair is no character: its escape is none.
_ESCAPE = regex.compile(
    rf"""\\(?:["'\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"""
    rf"|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}))"
)
_LONGEST_WORD = 512  # what may go on is held back
_WORD = regex.compile(rf"[\w.+-]{{1,{_LONGEST_WORD}}}")


def json_value(source: Source) -> Steps[bool]:
    """Take a value as arguments, as far as it can be understood; what is told is valid JSON in any case. Returns
    whether the value is whole: else what it lacks was added, where the answer ends or what follows is no JSON. A
    key with whose value the answer has not begun is left out.

    What models do is taken: control characters, lone backslashes and halves of surrogate pairs in strings, which
    are escaped; words without quotes, which become strings; Python's True, False and None; commas before a
    closing bracket, and brackets that are missing within others.
    """
    reading = _Reading()
    while not reading.is_done:
        while not source.first and not source.ended:
            yield None
        if (steps := reading.step(source)) is None:
            yield _told("", reading.lacking(source))
            return False
        yield from steps
    return reading.is_whole


def whole_json(text: str) -> str:
    """`text` as valid JSON, with what it lacks at its end; "" if it is none beyond that."""
    source = Source(text, ended=True)
    told = "".join(part.text for part in json_value(source) if part is not None)
    source.run(_BLANKS)
    return "" if source.first else told


def quoted(text: str) -> str:
    """A string as JSON."""
    return json.dumps(text, ensure_ascii=False)


def is_number(text: str) -> bool:
    """Whether this is a number of JSON that a double can hold: others are read as they should not by many."""
    return _NUMBER.fullmatch(text) is not None and math.isfinite(float(text))


def _told(raw: str, text: str) -> Part:
    return Part(Kind.ARGUMENTS, raw, text)


class _Reading:
    """Where in a value one is."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_whole = True
        self._closers: list[str] = []  # of what is open, innermost last
        self._wanted = "value"  # "value", "item" of an array, "key", "colon", or "comma"
        self._held: list[str] = []  # a comma and a key, until a value follows

    def step(self, source: Source) -> Steps[None] | None:
        """Take what comes next; None if that is no JSON, or nothing comes."""
        character = source.first
        if _BLANKS.match(character):
            return self._blanks(source)
        if character == "," and self._wanted == "comma":
            return self._comma(source)
        if character == ":" and self._wanted == "colon":
            return self._colon(source)
        if character and character in self._closers:
            return self._close(source, character)
        if self._wanted in ("colon", "comma"):
            return None
        if character == '"':
            return self._key(source) if self._wanted == "key" else self._string(source)
        if character in _CLOSERS and self._wanted != "key" and len(self._closers) < MOST_DEEP:
            return self._open(source, character)
        return self._word(source) if _WORD.match(character) else None

    def lacking(self, source: Source) -> str:
        """What makes the text so far valid JSON, before what comes next."""
        is_over = source.ended and not source.first and self._closers
        return ("" if is_over else self._missing()) + "".join(reversed(self._closers))

    def _missing(self) -> str:
        """The value of a key that has none."""
        value = {"colon": ": null", "value": "null"}.get(self._wanted, "")
        return "".join(self._held) + value if value else ""

    def _hold(self, raw: str, text: str) -> Part:
        self._held.append(text)
        return _told(raw, "")

    def _begin(self, raw: str, text: str) -> Part:
        """A value begins."""
        held, self._held = "".join(self._held), []
        return _told(raw, held + text)

    def _end(self) -> None:
        """A value has ended."""
        self._wanted, self.is_done = "comma", not self._closers

    def _blanks(self, source: Source) -> Steps[None]:
        raw = source.run(_BLANKS)
        text = _NO_BLANKS.sub(" ", raw)
        yield self._hold(raw, text) if self._held else _told(raw, text)

    def _comma(self, source: Source) -> Steps[None]:
        self._wanted = "key" if self._closers[-1] == "}" else "item"
        yield self._hold(source.take(1), ",")

    def _colon(self, source: Source) -> Steps[None]:
        self._wanted = "value"
        yield self._hold(source.take(1), ":")

    def _key(self, source: Source) -> Steps[None]:
        yield self._hold(source.take(1), '"')
        parts, _ = yield from collected(_characters(source))
        for part in parts:
            yield self._hold(part.raw, part.text)
        self._wanted = "colon"

    def _open(self, source: Source, character: str) -> Steps[None]:
        self._closers.append(_CLOSERS[character])
        self._wanted = "key" if character == "{" else "item"
        yield self._begin(source.take(1), character)

    def _close(self, source: Source, character: str) -> Steps[None]:
        text, self._held = self._missing(), []
        while not text.endswith(character):
            text += self._closers.pop()
        self._end()
        yield _told(source.take(1), text)

    def _string(self, source: Source) -> Steps[None]:
        yield self._begin(source.take(1), '"')
        self.is_whole = yield from _characters(source)
        self._end()

    def _word(self, source: Source) -> Steps[None]:
        while not source.ended and source.is_half(_WORD):
            yield None
        raw = source.run(_WORD)
        if self._wanted == "key":
            self._wanted = "colon"
            yield self._hold(raw, quoted(raw))
        else:
            self._end()
            yield self._begin(raw, _scalar(raw, is_last=source.ended and not source.first))


def _characters(source: Source) -> Steps[bool]:
    """Take the rest of a string. Returns whether it has an end, which else is added."""
    while True:
        if raw := source.run(_PLAIN):
            yield _told(raw, raw)
        character = source.first
        if character == '"':
            yield _told(source.take(1), '"')
            return True
        if character == "\\":
            if match := (yield from match_next(source, _ESCAPE)):
                raw = source.take_to(match.end())
                yield _told(raw, "'" if raw == "\\'" else raw)
            else:
                yield _told(source.take(1), "\\\\")
        elif character:
            yield _told(source.take(1), quoted(character)[1:-1])
        elif source.ended:
            yield _told("", '"')
            return False
        else:
            yield None


def _scalar(word: str, *, is_last: bool) -> str:
    """A word as JSON. `is_last`: the answer ends with it, so that it may be the beginning of one."""
    if word in _LITERALS:
        return _LITERALS[word]
    if is_number(word) and len(word) < _LONGEST_WORD:
        return word
    if is_last:
        if begun := next((literal for literal in _LITERALS if literal.startswith(word)), None):
            return _LITERALS[begun]
        if is_number(word + "0"):
            return word + "0"
    return quoted(word)
