"""`AnswerReader`: one answer, taken apart as it comes."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import regex

from radixrt.parsers.harmony import harmony
from radixrt.parsers.json_calls import hermes, is_llama_call, llama3_json
from radixrt.parsers.names import HARMONY, THINK
from radixrt.parsers.source import Kind, Part, Source, Steps, Tools, content, match_next, syntax, text_until
from radixrt.parsers.thinking import think
from radixrt.parsers.xml_calls import qwen3_coder

_BEGINS_CALL = {
    "hermes": regex.compile(r"\s{0,32}<tool_call>"),
    "qwen3_coder": regex.compile(r"\s{0,32}<(?:tool_call|function=)"),
}
_CALLS = {"hermes": hermes, "llama3_json": llama3_json, "qwen3_coder": qwen3_coder}


class AnswerReader:
    """Takes the text of one answer in pieces, and gives its parts as soon as they are certain.

    What they are does not depend on where pieces end, and no text is lost: what is no call in the syntax of the
    parser is content. Only a call whose arguments stop being JSON midway stays a call, as its beginning was told.
    Blanks that follow a tag, or come between it and the beginning, are no content.

    Args:
        tool_parser: one of TOOL_PARSERS; None: calls are content.
        reasoning_parser: one of REASONING_PARSERS; None: thoughts are content.
        tools: what may be called; None: nothing.
        is_thinking: whether the prompt has opened the thoughts.
        has_form: whether what follows the thoughts is in a form, unless it begins with a call: then all of it is
            content, whatever it spells.
    """

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tools: Tools | None = None,
        is_thinking: bool = False,
        has_form: bool = False,
    ) -> None:
        self._source = Source()
        self._steps = _steps(self._source, tool_parser, reasoning_parser, tools, is_thinking, has_form)
        self._blanks = ""  # that the answer begins with: not known yet to be content
        self._after_tag = is_thinking
        self._at_start = not is_thinking

    def push(self, text: str) -> list[Part]:
        """Take more text."""
        self._source.text += text
        return [*self._parts()] if text else []

    def finish(self) -> list[Part]:
        """The rest, after all text."""
        self._source.ended = True
        rest = [*self._parts()]
        return [*rest, content(self._blanks)] if self._blanks else rest

    def _parts(self) -> Iterator[Part]:
        for part in self._steps:
            if part is None:
                return
            yield from self._without_blanks(part)

    def _without_blanks(self, part: Part) -> Iterator[Part]:
        if part.kind not in (Kind.CONTENT, Kind.REASONING):
            if self._blanks:
                yield syntax(self._blanks)
            self._blanks, self._at_start, self._after_tag = "", False, True
            yield part
            return
        if self._at_start:
            self._blanks += part.raw
            if not self._blanks.isspace():
                yield replace(part, raw=self._blanks, text=self._blanks)
                self._blanks, self._at_start = "", False
            return
        shown = part.text.lstrip() if self._after_tag else part.text
        if blanks := part.raw[: len(part.raw) - len(shown)]:
            yield syntax(blanks)
        if shown:
            self._after_tag = False
            yield replace(part, raw=shown, text=shown)


def _steps(
    source: Source,
    tool_parser: str | None,
    reasoning_parser: str | None,
    tools: Tools | None,
    is_thinking: bool,
    has_form: bool,
) -> Steps[None]:
    if reasoning_parser == HARMONY:
        yield from harmony(source, tools if tool_parser == HARMONY else None, has_form)
        return
    if reasoning_parser == THINK:
        yield from think(source, is_thinking)
    if tools is not None and tool_parser is not None:
        begins = _BEGINS_CALL.get(tool_parser)
        is_call = is_llama_call(source, tools) if begins is None else _is_next(source, begins)
        if not has_form or (yield from is_call):
            yield from _CALLS[tool_parser](source, tools)
    yield from text_until(source, content, ())


def _is_next(source: Source, pattern: regex.Pattern[str]) -> Steps[bool]:
    return (yield from match_next(source, pattern)) is not None
