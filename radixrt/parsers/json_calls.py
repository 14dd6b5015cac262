"""Calls as JSON: those of Hermes and Qwen, in tags, and those of Llama 3."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import regex

from radixrt.parsers.json_value import json_value
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
    syntax,
    text_until,
)

_B = r"\s{0,32}"  # blanks, not without end: what may begin a call is held back
_NAME = rf'"name"{_B}:{_B}"(?P<name>[^"\\\x00-\x1f]{{1,256}})"'
_TAG = regex.compile("<tool_call>")
_HERMES = regex.compile(rf'<tool_call>{_B}\{{{_B}{_NAME}{_B},{_B}"arguments"{_B}:{_B}(?=\{{)')
# Hermes 2 Pro's own order.
_NAME_LAST = regex.compile(rf'<tool_call>{_B}\{{{_B}"arguments"{_B}:{_B}(?=\{{)')
_LAST_NAME = regex.compile(rf"{_B},{_B}{_NAME}{_B}\}}")
_LLAMA = regex.compile(
    rf'{_B};?{_B}(?:<\|python_tag\|>{_B})?\{{{_B}(?:"type"{_B}:{_B}"function"{_B},{_B})?'
    rf'{_NAME}{_B},{_B}"(?:parameters|arguments)"{_B}:{_B}(?=\{{)'
)
_OBJECT = regex.compile(rf"{_B}(?=\{{)")
_BRACE = regex.compile(rf"{_B}\}}")
_LAST_BRACE = regex.compile(rf"{_B}\}}\s*")
_CLOSED = regex.compile(rf"{_B}</tool_call>")


def hermes(source: Source, tools: Tools) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""
    while (yield from text_until(source, content, _TAG)):
        if match := (yield from match_next(source, _HERMES)):
            yield Part(Kind.NAME, source.take_to(match.end()), match["name"])
            if is_whole := (yield from arguments(source)):
                yield from skip_closing(source, _BRACE)
        elif not (is_whole := (yield from _name_last(source))):
            yield content(source.take(1))
            continue
        yield from skip_closing(source, _CLOSED)
        if is_whole:
            yield END
        if tools.only_one:
            return


def _name_last(source: Source) -> Steps[bool]:
    """Take a call whose name follows its arguments; it is known to be one only then."""
    if not (match := (yield from match_next(source, _NAME_LAST))):
        return False
    begun = source.take_to(match.end())
    parts, is_whole = yield from collected(json_value(source))
    match = (yield from match_next(source, _LAST_NAME)) if is_whole else None
    if match is None:
        source.put_back(begun + "".join(part.raw for part in parts))
        return False
    last = source.take_to(match.end())
    yield Part(Kind.NAME, begun, match["name"])
    yield from parts
    yield syntax(last)
    return True


def llama3_json(source: Source, tools: Tools) -> Steps[None]:
    """`{"name": ..., "parameters": {...}}`, where the answer begins with it, and calls a function that there is.

    Such an answer without a tag could be an object that is no call.
    """
    while (match := (yield from match_next(source, _LLAMA))) and match["name"] in tools.parameters:
        yield Part(Kind.NAME, source.take_to(match.end()), match["name"])
        if not (yield from arguments(source)):
            return
        yield from skip_closing(source, _BRACE)
        yield END
        if tools.only_one:
            return


def is_llama_call(source: Source, tools: Tools) -> Steps[bool]:
    """Whether the whole text that comes is a call, and not another object that begins as one. If it may be one, it
    is known only when it has ended.
    """
    match = yield from match_next(source, _LLAMA)
    if match is None or match["name"] not in tools.parameters:
        return False
    begun = source.take_to(match.end())
    parts, is_whole = yield from collected(json_value(source))
    while is_whole and not source.ended and source.is_half(_LAST_BRACE):
        yield None
    is_call = source.is_half(_LAST_BRACE) if is_whole else source.ended
    source.put_back(begun + "".join(part.raw for part in parts))
    return is_call


def arguments(source: Source) -> Steps[bool]:
    """Take an object as the arguments of a call, which ends with it. Returns whether it is whole."""
    if match := (yield from match_next(source, _OBJECT)):
        if raw := source.take_to(match.end()):
            yield Part(Kind.ARGUMENTS, raw, "")
        return (yield from json_value(source))
    yield Part(Kind.ARGUMENTS, "", "{}")
    return source.is_over
