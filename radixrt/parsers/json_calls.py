"""Calls as JSON: those of Hermes and Qwen, in tags, and those of Llama 3."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import regex

from radixrt.parsers.json_value import JsonObject
from radixrt.parsers.source import (
    Kind,
    Part,
    Source,
    Steps,
    Tools,
    content,
    match_next,
    skip_next,
    syntax,
    text_until,
)

_B = r"\s{0,32}"  # blanks, not without end: what may begin a call is held back
_NAME = rf'"name"{_B}:{_B}"(?P<name>[^"\\\x00-\x1f]{{1,256}})"'
_HERMES = regex.compile(rf'(<tool_call>{_B}\{{{_B}{_NAME}{_B},{_B}"arguments"{_B}:{_B})\{{')
# Hermes 2 Pro's own order.
_NAME_LAST = regex.compile(rf'(<tool_call>{_B}\{{{_B}"arguments"{_B}:{_B})\{{')
_LAST_NAME = regex.compile(rf"{_B},{_B}{_NAME}{_B}\}}")
_LLAMA = regex.compile(
    rf'({_B};?{_B}(?:<\|python_tag\|>{_B})?\{{{_B}(?:"type"{_B}:{_B}"function"{_B},{_B})?'
    rf'{_NAME}{_B},{_B}"(?:parameters|arguments)"{_B}:{_B})\{{'
)
_BRACE = regex.compile(rf"{_B}\}}")
_LAST_BRACE = regex.compile(rf"{_B}\}}\s*")
_CLOSED = regex.compile(rf"{_B}</tool_call>")


def hermes(source: Source, tools: Tools) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""
    while (yield from text_until(source, content, ("<tool_call>",))):
        if match := (yield from match_next(source, _HERMES)):
            yield Part(Kind.NAME, source.take(match.end(1)), match["name"])
            is_call = True
            if (yield from arguments(source)):
                yield from skip_next(source, _BRACE)
        else:
            is_call = yield from _name_last(source)
        if not is_call:
            yield content(source.take(1))
            continue
        yield from skip_next(source, _CLOSED)
        if tools.only_one:
            return


def _name_last(source: Source) -> Steps[bool]:
    """Take a call whose name follows its arguments; it is known to be one only then."""
    if not (match := (yield from match_next(source, _NAME_LAST))):
        return False
    start = end = match.end(1)
    found = JsonObject()
    while True:
        end += found.push(source.text[end:])
        if found.is_done:
            break
        if found.is_broken or source.ended:
            return False
        yield None
    if not (match := (yield from match_next(source, _LAST_NAME, end))):
        return False
    last = match.end() - end
    yield Part(Kind.NAME, source.take(start), match["name"])
    raw = source.take(end - start)
    yield Part(Kind.ARGUMENTS, raw, raw)
    yield syntax(source.take(last))
    return True


def llama3_json(source: Source, tools: Tools) -> Steps[None]:
    """`{"name": ..., "parameters": {...}}`, where the answer begins with it, and calls a function that there is.

    Such an answer without a tag could be an object that is no call.
    """
    while (match := (yield from match_next(source, _LLAMA))) and match["name"] in tools.parameters:
        yield Part(Kind.NAME, source.take(match.end(1)), match["name"])
        if not (yield from arguments(source)):
            return
        yield from skip_next(source, _BRACE)
        if tools.only_one:
            return


def is_llama_call(source: Source, tools: Tools) -> Steps[bool]:
    """Whether the whole text that comes is a call, and not another object that begins as one. If it may be one, it
    is known only when it has ended.
    """
    match = yield from match_next(source, _LLAMA)
    if not match or match["name"] not in tools.parameters:
        return False
    end, found = match.end(1), JsonObject()
    while True:
        end += found.push(source.text[end:])
        if found.is_broken or (found.is_done and not _LAST_BRACE.fullmatch(source.text, end, partial=True)):
            return False
        if source.ended:
            return True
        yield None


def arguments(source: Source) -> Steps[bool]:
    """Take an object as arguments, as far as it is JSON. Returns whether it is whole."""
    found = JsonObject()
    while True:
        if count := found.push(source.text):
            raw = source.take(count)
            yield Part(Kind.ARGUMENTS, raw, raw)
        if found.is_done or found.is_broken or source.ended:
            return found.is_done
        yield None
