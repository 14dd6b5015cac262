"""Calls of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import regex

from radixrt.checks import refuse_constant
from radixrt.parsers.json_value import JsonObject
from radixrt.parsers.source import Kind, Part, Source, Steps, Tools, content, match_next, skip_next, text_until
from radixrt.text.builder import find_stop

_HEAD = regex.compile(r"(?:<tool_call>\s{0,32})?<function=([^<>\s]{1,256})>")  # the outer tag is often left out
KEY = regex.compile(r"[^<>\n]{1,256}")
_NEXT = regex.compile(rf"\s{{0,32}}(?:<parameter=({KEY.pattern})>|</function>)")
_CLOSED = regex.compile(r"\s{0,32}</tool_call>")
# A new line after the first tag of a value and one before its last belong to the tags.
_NEW_LINE = regex.compile(r"\n")
_ENDS = ("\n</parameter>", "</parameter>")
# As the template writes them in the history, after str() of Python.
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_BEFORE = '{"": '  # any value may follow
_TYPES = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"integer", "number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}


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
        schema = properties.get(match[1])
        if not (yield from (_text(source) if is_plain_text(schema) else _value(source, schema))):
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


def _value(source: Source, schema: object) -> Steps[bool]:
    """Take JSON, or text where it is none, or where the schema wants that; it is known only when it has ended."""
    start, end = (yield from _closing(source)) or (len(source.text), 0)
    raw, tag = source.take(start), source.take(end - start)
    value = _OF_PYTHON.get(raw.strip(), raw.strip())
    if not tag:
        value = raw if _begins_json(raw) else _quoted(raw)[:-1]
    elif not _is_json(value) or _is_text_by(schema, json.loads(value)):
        value = _quoted(raw)
    if raw or tag:
        yield Part(Kind.ARGUMENTS, raw + tag, value)
    return bool(tag)


def _closing(source: Source) -> Steps[tuple[int, int] | None]:
    """Start and end of the tag that ends a value; None where none comes. It is the first one, unless that is in a
    string of JSON that is whole before a later one.
    """
    first = None
    found, read, searched = JsonObject(), 0, 0
    found.push(_BEFORE)
    while True:
        if (tag := find_stop(_ENDS, source.text, searched)) is None:
            if source.ended:
                return first
            searched = len(source.text)
            yield None
            continue
        first = first or tag
        found.push(source.text[read : tag[0]])
        if not found.is_in_string:
            return tag if _is_json(source.text[: tag[0]].strip()) else first
        read = searched = tag[1]
        found.push(source.text[tag[0] : read])
        if found.is_broken:
            return first


def _is_text_by(schema: object, value: object) -> bool:
    """Whether text is among the types of a schema, and that of a JSON value is not: 12 for text or null."""
    types = _types(schema)
    return "string" in types and types.isdisjoint(_TYPES[type(value)])


def _types(schema: object) -> set[str]:
    """Those that a schema names, in its alternatives too; none where these may have others."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if named is None:
        choices = schema.get("anyOf", schema.get("oneOf"))
        each = [_types(choice) for choice in choices] if isinstance(choices, list) else []
        return set().union(*each) if all(each) else set()
    return {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _begins_json(text: str) -> bool:
    found = JsonObject()
    found.push(_BEFORE + text)
    return not found.is_done and not found.is_broken


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
