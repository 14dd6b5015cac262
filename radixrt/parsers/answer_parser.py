"""`AnswerParser`: one answer, taken apart as it comes."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import regex

from radixrt.parsers.harmony import harmony
from radixrt.parsers.json_calls import hermes, is_llama_call, llama3_json
from radixrt.parsers.names import HARMONY, THINK
from radixrt.parsers.source import Kind, Part, Source, Steps, Tools, all_text, content, match_next, syntax
from radixrt.parsers.thinking import think
from radixrt.parsers.xml_calls import qwen3_coder

_BEGINS_CALL = {
    "hermes": regex.compile(r"\s{0,32}<tool_call>"),
    "qwen3_coder": regex.compile(r"\s{0,32}<(?:tool_call|function=)"),
}
_CALLS = {"hermes": hermes, "llama3_json": llama3_json, "qwen3_coder": qwen3_coder}


class AnswerParser:
    """Takes the text of one answer in pieces, and gives its parts as soon as they are certain.

    What they are does not depend on where pieces end, and no text is lost: what is no call in the syntax of the
    parser is content. Only a call whose arguments break off stays a call, as its beginning was told: they are
    completed, and the call has no end. Arguments are valid JSON in any case. Blanks that follow a tag, or come
    between it and the beginning, are no content.

    Args:
        tool_parser: one of TOOL_PARSERS; None: calls are content.
        reasoning_parser: one of REASONING_PARSERS; None: thoughts are content.
        tools: what may be called; None: nothing.
        is_thinking: whether the prompt has opened the thoughts.
        said: the beginning of the answer, which the prompt has and nobody is told again; only a call that it
            leaves open is told whole, with the rest of it.
        has_form: whether what follows the thoughts is in a form, unless it begins with a call: then all of it is
            content, whatever it spells.
    """

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tools: Tools | None = None,
        is_thinking: bool = False,
        said: str = "",
        *,
        has_form: bool = False,
    ) -> None:
        self._source, self._has_form = Source(), has_form
        self._steps = self._read(tool_parser, reasoning_parser, tools, is_thinking)
        self._blanks: list[str] = []  # that the answer begins with: not known yet to be content
        self._after_tag = is_thinking
        self._at_start = not is_thinking
        self._new_lines = 2  # that a grammar lets stand between thoughts and a form
        self._repeats = not said  # thoughts that have no end, as content
        before = self._pushed(said)
        self._held = len(said) - sum(len(part.raw) for part in before)  # of it, whose parts are still to come
        self._open_call = [replace(part, raw="") for part in _call_left_open(before) if part.text]

    @property
    def has_open_call(self) -> bool:
        """Whether nothing but `said` has come, which ends within a call."""
        return bool(self._open_call)

    def push(self, text: str) -> list[Part]:
        """Take more text."""
        return self._unsaid(self._pushed(text))

    def finish(self, *, is_cut: bool) -> list[Part]:
        """The rest, after all text. `is_cut`: the answer was ended by its length or a stop string, and not by a
        token of the model's.
        """
        self._source.ended, self._source.is_cut = True, is_cut
        rest = [*self._parts()]
        return self._unsaid([*rest, content("".join(self._blanks))] if self._blanks else rest)

    def _pushed(self, text: str) -> list[Part]:
        self._source.add(text)
        return [*self._parts()] if text else []

    def _unsaid(self, parts: list[Part]) -> list[Part]:
        """What of these parts is new, after a call that was left open."""
        told, self._open_call = self._open_call, []
        for part in parts:
            count = min(self._held, len(part.raw))
            self._held -= count
            shown = part.text[count if part.kind in (Kind.CONTENT, Kind.REASONING) else 0 :]
            if count < len(part.raw) or shown or part.kind is Kind.END:
                told.append(replace(part, raw=part.raw[count:], text=shown) if count else part)
        return told

    def _parts(self) -> Iterator[Part]:
        for part in self._steps:
            if part is None:
                return
            yield from self._without_blanks(part)

    def _without_blanks(self, part: Part) -> Iterator[Part]:
        if not part.raw:  # told again, or added
            yield part
            return
        if part.kind not in (Kind.CONTENT, Kind.REASONING):
            if self._blanks:
                yield syntax("".join(self._blanks))
            self._blanks, self._at_start, self._after_tag = [], False, True
            yield part
            return
        if self._at_start:
            self._blanks.append(part.raw)
            if not part.raw.isspace():
                yield Part(part.kind, text := "".join(self._blanks), text)
                self._blanks, self._at_start = [], False
            return
        shown = self._without_leading(part.text) if self._after_tag else part.text
        if blanks := part.raw[: len(part.raw) - len(shown)]:
            yield syntax(blanks)
        if shown:
            self._after_tag = False
            yield replace(part, raw=shown, text=shown)

    def _without_leading(self, text: str) -> str:
        """A text without the blanks that follow a tag. A form may begin with some: only the grammar's own go."""
        if not self._has_form:
            return text.lstrip()
        count = min(self._new_lines, len(text) - len(text.lstrip("\n")))
        self._new_lines -= count
        return text[count:]

    def _read(
        self, tool_parser: str | None, reasoning_parser: str | None, tools: Tools | None, is_thinking: bool
    ) -> Steps[None]:
        source = self._source
        if reasoning_parser == HARMONY:
            yield from harmony(source, tools if tool_parser == HARMONY else None, self._has_form)
            return
        if reasoning_parser == THINK and (unclosed := (yield from think(source, is_thinking))):
            if self._repeats and not source.is_cut:  # the model has answered, without thoughts
                again = AnswerParser(tool_parser, None, tools, has_form=self._has_form)
                for part in (*again.push(unclosed.lstrip()), *again.finish(is_cut=False)):
                    yield replace(part, raw="")
            return
        if tools is not None and tool_parser is not None:
            yield from self._read_calls(tool_parser, tools)
        yield from all_text(source, content)

    def _read_calls(self, parser: str, tools: Tools) -> Steps[None]:
        if not self._has_form or (yield from _calls(self._source, parser, tools)):
            yield from _CALLS[parser](self._source, tools)


def _call_left_open(parts: list[Part]) -> list[Part]:
    """The last call of some parts, if it has no end and nothing but a part of that follows it."""
    names = [place for place, part in enumerate(parts) if part.kind is Kind.NAME]
    last = parts[names[-1] :] if names else []
    return last if {part.kind for part in last} <= {Kind.NAME, Kind.ARGUMENTS, Kind.SYNTAX} else []


def _calls(source: Source, parser: str, tools: Tools) -> Steps[bool]:
    """Whether an answer in a form is a call instead."""
    if parser == "llama3_json":
        return (yield from is_llama_call(source, tools))
    return (yield from match_next(source, _BEGINS_CALL[parser])) is not None
