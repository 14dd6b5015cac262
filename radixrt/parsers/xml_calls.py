"""Calls of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

import regex

from radixrt.checks import finite, nests_deeper, refuse_constant
from radixrt.parsers.argument_types import ArgumentTypes, types_of
from radixrt.parsers.json_value import MOST_DEEP, quoted, whole_json
from radixrt.parsers.source import (
    END,
    Kind,
    Part,
    Source,
    Steps,
    Tools,
    collected,
    content,
    match_next,
    skip_closing,
    text_until,
)

KEY = regex.compile(r"[^<>\n]{1,256}")
_B = r"\s{0,32}"
_TAG = regex.compile("<tool_call>|<function=")
# The outer tag is often left out, and the bracket before a new line sometimes.
_FUNCTION = rf"(?:<tool_call>{_B})?<function=(?P<function>[^<>\s]{{1,256}})(?P<bracket>>|(?=\n))"
_HEAD = regex.compile(_FUNCTION)
_PARAMETER = rf"<parameter=(?P<key>{KEY.pattern})(?:>|(?=\n))"
_NEXT = regex.compile(rf"{_B}(?:{_PARAMETER}|(?P<closing></function>|</tool_call>))")
_OUTER = regex.compile(rf"{_B}</tool_call>")
_CALL = rf"(?:<tool_call>{_B})?<function="
_NEXT_CALL = regex.compile(rf"(?={_B}{_CALL})")
# A new line after the first tag of a value and one before its last belong to the tags.
_NEW_LINE = regex.compile(r"\n")
_HALF_TAG = regex.compile(r"\s*</?[a-z]*\Z")
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write them in the history


def _ends(over: str) -> regex.Pattern[str]:
    """Where a value may end: at a tag that only another one follows, as text could hold it; `over`: or the end.

    Models leave closing tags out, or write them only nearly. Of tags that open something those are ends whose
    names are known: see `_Call`.
    """
    closing = r"</parameter[^<>\n]{0,9}>?"
    return regex.compile(
        rf"\n?(?:{closing}(?={_B}(?:<parameter=|</function>|</tool_call>|{_CALL}{over}))"
        rf"|(?=</function>{_B}(?:</tool_call>|{_CALL}{over}))"
        rf"|(?=</tool_call>{_B}(?:{_CALL}{over}))"
        rf"|(?P<bare></parameter>)(?={_B}[^\s<])"
        rf"|(?={_PARAMETER})|(?={_FUNCTION}))"
    )


def _halves(tags: Sequence[str], least: int) -> str:
    """The beginnings of tags, with which answers end that are cut."""
    return "|".join(tag[:size] for tag in tags for size in range(least, len(tag)))


_CLOSING, _OPENING = ("</parameter>", "</function>", "</tool_call>"), ("<parameter=", "<function=", "<tool_call>")
_ENDS = _ends("")
_LAST_ENDS = regex.compile(
    _ends(rf"|(?:{_halves((*_CLOSING, *_OPENING), 1)})?\Z").pattern
    + rf"|\n?(?:{_halves(_CLOSING, 2)})\Z"
    + rf"|\n(?:{_halves(_OPENING, 4)}|<(?:parameter|function)=[^<>\n]{{0,256}})\Z"
)


def qwen3_coder(source: Source, tools: Tools) -> Steps[None]:
    """Calls anywhere in the text. Values are of the types that the function's schema says."""
    types: dict[str, ArgumentTypes] = {}
    while (yield from text_until(source, content, _TAG)):
        match = yield from match_next(source, _HEAD)
        if match is None or not (match["bracket"] or match["function"] in tools.parameters):
            yield content(source.take(1))
            continue
        name = match["function"]
        yield Part(Kind.NAME, source.take_to(match.end()), name)
        own = types.setdefault(name, ArgumentTypes(tools.parameters.get(name, {})))
        yield from _Call(source, own, tools.parameters).arguments()
        if tools.only_one:
            return


class _Call:
    """One whose arguments are read."""

    def __init__(self, source: Source, types: ArgumentTypes, functions: Collection[str]) -> None:
        self._source, self._types, self._functions = source, types, functions
        self._given: set[str] = set()  # parameters that it has had
        self._has_begun = False  # one of them was told

    def arguments(self) -> Steps[None]:
        """Take parameters as an object, which is closed in any case."""
        source = self._source
        while (match := (yield from match_next(source, _NEXT))) and (key := match["key"]) is not None:
            yield _told(source.take_to(match.end()), "")
            self._given.add(key)
            if (yield from match_next(source, _NEW_LINE)):
                yield _told(source.take(1), "")
            yield from self._text(key) if self._types.is_plain_text(key) else self._value(key)
        brace = "}" if self._has_begun else "{}"
        if match:
            yield _told(source.take_to(match.end()), brace)
            if match["closing"] == "</function>":
                yield from skip_closing(source, _OUTER)
            yield END
            return
        is_half = source.ended and source.is_half(_NEXT)
        yield _told(source.rest() if is_half else "", brace)
        if source.is_over or (yield from match_next(source, _NEXT_CALL)):
            yield END

    def _begin(self, key: str) -> str:
        """What stands before a value."""
        before, self._has_begun = ", " if self._has_begun else "{", True
        return f"{before}{quoted(key)}: "

    def _text(self, key: str) -> Steps[None]:
        """Take a value that is text whatever it looks like."""
        yield _told("", self._begin(key) + '"')
        tag = yield from self._until_end(lambda raw: _told(raw, quoted(raw)[1:-1]), lambda: False)
        yield _told(tag, '"')

    def _value(self, key: str) -> Steps[None]:
        """Take a value that is known only when it has ended; one that has not begun is left out."""
        held: list[str] = []

        def made(raw: str) -> Part:
            held.append(raw)
            return _told(raw, "")

        _, tag = yield from collected(self._until_end(made, lambda: _is_json("".join(held).strip())))
        if (raw := "".join(held)).strip() or tag:
            yield _told(raw + tag, self._begin(key) + _as_json(raw, self._types.of(key), is_last=not tag))
        elif raw:
            yield _told(raw, "")

    def _until_end(self, made: Callable[[str], Part], is_json: Callable[[], bool]) -> Steps[str]:
        """Take a value up to its end. Returns the tag there, "" if there is none.

        `is_json` tells whether the text so far is a whole value: then the first closing tag ends it anyway.
        """
        source, is_first = self._source, True
        while match := (yield from text_until(source, made, _ENDS, _LAST_ENDS)):
            if match["bare"]:
                is_end, is_first = is_first and is_json(), False
            elif match["key"]:
                known = self._types.properties
                is_end = match["key"] not in self._given and (not known or match["key"] in known)
            else:
                is_end = not match["function"] or match["function"] in self._functions
            if is_end:
                return source.take_to(match.end())
            yield made(source.take(1))
        return ""


def _told(raw: str, text: str) -> Part:
    return Part(Kind.ARGUMENTS, raw, text)


def _as_json(raw: str, types: frozenset[str], *, is_last: bool) -> str:
    """JSON of one of these types, or text where it is none, or where that is among the types and it is not.
    `is_last`: the answer ends with it.
    """
    value = _OF_PYTHON.get(raw.strip(), raw.strip())
    if _is_json(value):
        is_text = "string" in types and types.isdisjoint(types_of(json.loads(value)))
        return quoted(raw) if is_text else value
    if "string" not in types and (is_last or value[:1] in ("[", "{")):
        return whole_json(_HALF_TAG.sub("", value) if is_last else value) or quoted(raw)
    return quoted(raw)


def _is_json(text: str) -> bool:
    """Whether this is JSON that everybody can read."""
    try:
        value = json.loads(text, parse_constant=refuse_constant, parse_float=finite, parse_int=finite)
        json.dumps(value, ensure_ascii=False).encode()  # halves of surrogate pairs have no UTF-8
    except (ValueError, RecursionError):
        return False
    return not nests_deeper(value, MOST_DEEP)
