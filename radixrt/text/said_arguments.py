"""Arguments of a call that are no JSON object, such as those of an answer that was cut.

The process that renders chat templates loads this file by itself: it imports nothing of radixrt.
"""

from __future__ import annotations

import json
import re
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from functools import cached_property
from typing import Any

UNNAMED = "arguments"  # names a text that is not even the beginning of an object

_ESCAPE = r"\\(?:[^u]|u[0-9a-fA-F]{4})"
_TOKEN = re.compile(
    rf'(?P<string>"(?:[^"\\]|{_ESCAPE})*)(?P<end>"|\\(?:u[0-9a-fA-F]{{0,3}})?\Z|\Z)?'
    r'|[{}\[\],:]|(?P<bare>[^\s{}\[\],:"]+)',
    re.DOTALL,
)
_CLOSERS = {"{": "}", "[": "]"}


class SaidArguments(str):
    """The text of the arguments; to a template that looks for names and values, what the text has of them.

    Some templates write arguments as JSON, some look whether they are text, some walk through an object: all three
    can have this one.
    """

    @cached_property  # as templates ask for each value by its name
    def _object(self) -> dict[str, Any]:
        return object_of(str(self))

    def __getitem__(self, key: Any) -> Any:
        return self._object[key] if isinstance(key, str) else super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._object)

    def __len__(self) -> int:
        return len(self._object)

    def get(self, key: str, default: Any = None) -> Any:
        return self._object.get(key, default)

    def items(self) -> ItemsView[str, Any]:
        return self._object.items()

    def keys(self) -> KeysView[str]:
        return self._object.keys()

    def values(self) -> ValuesView[Any]:
        return self._object.values()


Mapping.register(SaidArguments)


def object_of(text: str) -> dict[str, Any]:
    """Names and values of a text: those of the object that it begins, or the text itself under the name
    `arguments`; none of null.
    """
    for one in (text, _completed(text)):
        try:
            value = None if one is None else json.loads(one, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return _without_halves(value)
        if value is None and one is not None:
            return {}
    return {UNNAMED: text}


def _without_halves(value: dict[str, Any]) -> dict[str, Any]:
    """A value with U+FFFD in place of halves of surrogate pairs, which no text may have."""
    text = json.dumps(value, ensure_ascii=False)
    whole: dict[str, Any] = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return whole


def _completed(text: str) -> str | None:
    """JSON that was cut, with an end: what is open is closed, a name without a value gets an empty text, and the
    beginning of a name is left out. None if its brackets do not fit.
    """
    pieces: list[str] = []
    open_brackets: list[str] = []
    last, is_name = "", False  # of the pieces
    for found in _TOKEN.finditer(text):
        piece = found[0]
        if found["string"] is not None:
            piece = found["string"] + '"'
        elif found["bare"] is not None:
            piece = _value(piece)
        elif piece in _CLOSERS:
            open_brackets.append(piece)
        elif piece in "}]" and (not open_brackets or _CLOSERS[open_brackets.pop()] != piece):
            return None
        is_value = found["string"] is not None or found["bare"] is not None
        is_name = is_value and last in ("{", ",") and open_brackets[-1:] == ["{"]
        if is_name and found["end"] != '"' and found.end() == len(text):
            is_name = False
            break
        pieces.append(piece)
        last = piece
    if last == ",":
        pieces.pop()
    elif last == ":" or is_name:
        pieces.append('""' if last == ":" else ':""')
    return "".join([*pieces, *(_CLOSERS[one] for one in reversed(open_brackets))])


def _value(piece: str) -> str:
    """A number or a name of JSON, or a text if it is cut."""
    try:
        json.loads(piece)
    except ValueError:
        return json.dumps(piece)
    return piece
