"""Where a JSON object ends, in text that comes in pieces."""

from __future__ import annotations

import re

_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_OF_SCALARS = frozenset("-+.0123456789eEtrufalsn")
_BLANKS = frozenset(" \t\n\r")
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonObject:
    """Reads an object, character by character, up to its end or to what is no JSON.

    Attributes:
        is_done: whether the object has ended.
        is_broken: whether a character came that no JSON has there.
    """

    def __init__(self) -> None:
        self.is_done = self.is_broken = False
        self._closers: list[str] = []  # of what is open, innermost last
        self._wanted = "object"  # what must come
        self._scalar = ""
        self._in_string = self._in_escape = False
        self._digits = 0  # of a \u that are still to come

    @property
    def is_in_string(self) -> bool:
        """Whether a string has begun and not ended."""
        return self._in_string and not self.is_broken

    def push(self, text: str) -> int:
        """Read on. Returns how many characters of `text` belong to the object."""
        for place, character in enumerate(text):
            if self.is_done or self.is_broken:
                return place
            if not self._takes(character):
                self.is_broken = True
                return place
        return len(text)

    def _takes(self, character: str) -> bool:
        if self._in_string:
            return self._takes_in_string(character)
        if self._scalar:
            if character in _OF_SCALARS:
                self._scalar += character
                return True
            if not _SCALAR.fullmatch(self._scalar):
                return False
            self._scalar, self._wanted = "", "comma or end"
        if character in _BLANKS:
            return True
        wanted = self._wanted
        if wanted == "comma or end" and character == ",":
            self._wanted = "key" if self._closers[-1] == "}" else "value"
            return True
        if wanted.endswith("or end") and self._closers and character == self._closers[-1]:
            self._closers.pop()
            self._wanted, self.is_done = "comma or end", not self._closers
            return True
        if wanted == "colon":
            self._wanted = "value"
            return character == ":"
        if wanted.startswith("key"):
            self._in_string = True
            self._wanted = "colon"
            return character == '"'
        if wanted == "object" and character != "{":
            return False
        if wanted == "comma or end":
            return False
        if character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
            self._wanted = "key or end" if character == "{" else "value or end"
        elif character == '"':
            self._in_string, self._wanted = True, "comma or end"
        else:
            self._scalar = character
            return character in "-0123456789tfn"
        return True

    def _takes_in_string(self, character: str) -> bool:
        if self._digits:
            self._digits -= 1
            return character in _HEX
        if self._in_escape:
            self._in_escape = False
            self._digits = 4 if character == "u" else 0
            return character == "u" or character in _ESCAPES
        self._in_escape = character == "\\"
        self._in_string = character != '"'
        return character >= " "
