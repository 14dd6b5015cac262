"""Calls of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import regex

from radixrt.checks import refuse_constant
from radixrt.parsers.source import Kind, Part, Source, Steps, Tools, content, match_next, skip_next, text_until

_HEAD = regex.compile(r"(?:<tool_call>\s{0,32})?<function=([^<>\s]{1,256})>")  # the outer tag is often left out
KEY = regex.compile(r"[^<>\n]{1,256}")
_NEXT = regex.compile(rf"\s{{0,32}}(?:<parameter=({KEY.pattern})>|</function>)")
_CLOSED = regex.compile(r"\s{0,32}</tool_call>")
# A new line after the first tag of a value and one before its last belong to the tags.
_NEW_LINE = regex.compile(r"\n")
_ENDS = ("\n</parameter>", "</parameter>")
# As the template writes them in the history, after str() of Python.
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


def qwen3_coder(source: Source, tools: Tools) -> Steps[None]:
    """Calls anywhere in the text. Values are of the types that the function's schema says."""
    while (yield from text_until(source, content, ("<tool_call>", "<function="))):
        if not (match := (yield from match_next(source, _HEAD))):
            yield content(source.take(1))
            continue
        yield Part(Kind.NAME, source.take(match.end()), match[1])
        properties = tools.parameters.get(match[1], {}).get("properties")
        if (yield from _arguments(source, properties if isinstance(properties, Mapping) else {})):
            yield from skip_next(source, _CLOSED)
        if tools.only_one:
            return


def _arguments(source: Source, properties: Mapping[str, Any]) -> Steps[bool]:
    """Take parameters as an object. Returns whether it is whole."""
    before = "{"
    while match := (yield from match_next(source, _NEXT)):
        raw = source.take(match.end())
        if match[1] is None:
            yield Part(Kind.ARGUMENTS, raw, "{}" if before == "{" else "}")
            return True
        yield Part(Kind.ARGUMENTS, raw, f"{before}{_quoted(match[1])}: ")
        if (yield from match_next(source, _NEW_LINE)):
            yield Part(Kind.ARGUMENTS, source.take(1), "")
        is_text = is_plain_text(properties.get(match[1]))
        if not (yield from (_text(source) if is_text else _value(source))):
            return False
        before = ", "
    return False


def is_plain_text(schema: object) -> bool:
    """Whether a value of this schema is text whatever it looks like."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _text(source: Source) -> Steps[bool]:
    yield Part(Kind.ARGUMENTS, "", '"')
    if not (yield from text_until(source, lambda raw: Part(Kind.ARGUMENTS, raw, _quoted(raw)[1:-1]), _ENDS)):
        return False
    yield Part(Kind.ARGUMENTS, source.take(source.text.index(">") + 1), '"')
    return True


def _value(source: Source) -> Steps[bool]:
    """Take JSON, or text where it is none; it is known only when it has ended."""
    pieces: list[str] = []

    def kept(raw: str) -> Part:
        pieces.append(raw)
        return Part(Kind.ARGUMENTS, raw, "")

    is_whole = yield from text_until(source, kept, _ENDS)
    raw = "".join(pieces)
    if not is_whole:
        yield Part(Kind.ARGUMENTS, "", raw)
        return False
    value = _OF_PYTHON.get(raw.strip(), raw.strip())
    tag = source.take(source.text.index(">") + 1)
    yield Part(Kind.ARGUMENTS, tag, value if _is_json(value) else _quoted(raw))
    return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
