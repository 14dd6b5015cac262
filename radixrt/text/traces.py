"""Which parts of a chat a template leaves out: a text shows it where parts are marked.

A content such as "yes" may be anywhere in a text. So each part gets a mark that nobody can have written, and the
chat is rendered once more: a part whose marks do not come out has left no trace. Templates look for tags at the
beginning and at the end of contents, so marks stand behind the first word and before the last one, and what is
between them must come out, too. Of calls each name and each text of the arguments has a mark. Where a mark
may have changed what a template does, the lost parts are marked alone, and in the end the text is searched. Long
contents, each of which is in no other one, prove themselves: lists of single questions are rendered once.

Thoughts are not looked for: templates leave out those of earlier messages on purpose.

The process that renders chat templates loads this file by itself: it imports nothing of radixrt.
"""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Callable, Collection
from typing import Any

Part = tuple[Any, ...]  # ("message", i), ("call", i, j) or ("tool", k)
Render = Callable[[dict[str, Any]], "str | None"]  # variables -> text, None where the template fails on them

_THOUGHTS = r"(?:[a-z]+:)?think(?:ing)?|thought|reasoning"
_THOUGHTS_END = re.compile(rf"</(?:{_THOUGHTS})>|\[/THINK\]")
_THOUGHTS_BEGIN = re.compile(rf"<(?:{_THOUGHTS})>|\[THINK\]")
_SWITCH = re.compile(r"/(?:no_)?think\b|\s", re.IGNORECASE)  # with blanks: what templates take out of contents
_FEW, _LONG = 4, 24  # messages; characters of a content
_STEM = f"_{secrets.randbelow(10**16):016}"  # of marks, after which come their numbers
_MARK = re.compile(rf"{_STEM}(\d+)_")


def told(message: dict[str, Any]) -> tuple[int, int]:
    """Where in the content of a message what must not be lost begins and ends, without blanks around it: all but
    the assistant's thoughts.
    """
    content: str = message.get("content") or ""
    first, end = 0, len(content)
    if message["role"] == "assistant":
        for found in _THOUGHTS_END.finditer(content):
            first = found.end()
        if begins := _THOUGHTS_BEGIN.search(content, first):
            end = begins.start()
    first += len(content[first:end]) - len(content[first:end].lstrip())
    return first, max(first, len(content[:end].rstrip()))


def lost(variables: dict[str, Any], text: str, render: Render) -> list[Part]:
    """The parts of a chat that are not in its `text`; `render` makes others of the same template."""
    if _prove_themselves(variables, text):
        return []
    missing, _ = _missing(variables, None, render)
    if not missing:
        return []
    missing, marked = _missing(variables, frozenset(missing), render)
    if not missing or (marked is not None and _MARK.sub("", marked) == text):
        return missing
    search = _Search(text)
    return [part for part in missing if not search.finds(variables, part, failed=marked is None)]


def _prove_themselves(variables: dict[str, Any], text: str) -> bool:
    """Whether a chat is a few messages of long contents, which are in no other one, and in the text."""
    messages = variables["messages"]
    if len(messages) > _FEW or variables.get("tools") or any(message.get("tool_calls") for message in messages):
        return False
    contents = [message.get("content") or "" for message in messages]
    thoughts = [message.get("reasoning_content") or "" for message in messages]
    at = 0
    for place, message in enumerate(messages):
        content = contents[place][slice(*told(message))]
        others = [*contents[:place], *contents[place + 1 :], *thoughts]
        if len(content) < _LONG or any(content in other for other in others):
            return False
        # Mostly it is where its beginning is first: a short text is found sooner than a long one.
        begin = text.find(content[:_LONG], at)
        if text.startswith(content, begin):
            at = begin + len(content)
        elif content not in text:
            return False
    return True


def _missing(
    variables: dict[str, Any], only: Collection[Part] | None, render: Render
) -> tuple[list[Part], str | None]:
    """The parts, of all or of some `only`, without a trace in the text of the marked chat, and that text."""
    marks = _Marks(only)
    text = render(marks.marked(variables))
    if text is None:
        return list(dict.fromkeys(marks.parts)), None
    found = marks.found(text)
    return list(dict.fromkeys(part for i, part in enumerate(marks.parts) if i not in found)), text


class _Marks:
    """Numbered marks, and the part of each."""

    def __init__(self, only: Collection[Part] | None) -> None:
        self.parts: list[Part] = []
        self._only = only
        self._between: dict[int, str] = {}  # a mark, and what stands between the mark before it and this one

    def found(self, text: str) -> set[int]:
        """The marks in a text: of two of one content the second only if all between them is there."""
        found: set[int] = set()
        ends: dict[int, int] = {}
        for mark in _MARK.finditer(text):
            i = int(mark[1])
            ends[i] = mark.end()
            if i not in self._between:
                found.add(i)
                continue
            begin = ends.pop(i - 1, None)
            if begin is not None and _is_written(self._between[i], text[begin : mark.start()]):
                found.add(i)
        return found

    def marked(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A copy whose parts have marks."""
        more: dict[str, Any] = {"messages": [self._message(*one) for one in enumerate(variables["messages"])]}
        if variables.get("tools"):
            more["tools"] = [self._tool(*one) for one in enumerate(variables["tools"])]
        return {**variables, **more}

    def _new(self, part: Part) -> str:
        self.parts.append(part)
        return f"{_STEM}{len(self.parts) - 1}_"

    def _wants(self, part: Part) -> bool:
        return self._only is None or part in self._only

    def _message(self, i: int, message: dict[str, Any]) -> dict[str, Any]:
        part, calls = ("message", i), message.get("tool_calls")
        first, end = told(message)
        if self._wants(part) and (end > first or not calls):
            message = {**message, "content": self._content(part, message.get("content") or "", first, end)}
        if calls:
            message = {**message, "tool_calls": [self._call(("call", i, j), c) for j, c in enumerate(calls)]}
        return message

    def _content(self, part: Part, content: str, first: int, end: int) -> str:
        if end == first:
            return self._new(part)  # nothing can be lost but the message itself
        words = content[first:end].split(maxsplit=1)
        if len(words) == 1:
            return content[:end] + self._new(part) + content[end:]
        begin = first + len(words[0])
        last = end - len(content[first:end].rsplit(maxsplit=1)[1])
        marked = content[:begin] + self._new(part) + content[begin:last] + self._new(part) + content[last:]
        self._between[len(self.parts) - 1] = content[begin:last]
        return marked

    def _call(self, part: Part, call: dict[str, Any]) -> dict[str, Any]:
        if not self._wants(part):
            return call
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and len(arguments):  # as many as it has names
            return {**call, "function": {**function, "arguments": self._text(part, arguments)}}
        if isinstance(arguments, dict) and arguments:
            marked = {
                name + self._new(part): value + self._new(part) if isinstance(value, str) and value else value
                for name, value in arguments.items()
            }
            return {**call, "function": {**function, "arguments": marked}}
        if function["name"] in str(call.get("id")):  # some templates write that in place of the name
            return call
        return {**call, "function": {**function, "name": function["name"] + self._new(part)}}

    def _text(self, part: Part, arguments: Any) -> Any:
        """Arguments that are a text, with marks behind names and values, or at the end if it has none of them."""
        text, pieces, at = str(arguments), [], 0
        for one in (one for item in arguments.items() for one in item if isinstance(one, str) and one):
            for spelled in _spellings(one):
                if (begin := text.find(f'"{spelled}', at)) >= 0:
                    end = begin + 1 + len(spelled)
                    pieces += [text[at:end], self._new(part)]
                    at = end
                    break
        return type(arguments)("".join([*pieces, text[at:], "" if pieces else self._new(part)]))

    def _tool(self, k: int, tool: dict[str, Any]) -> dict[str, Any]:
        part, function = ("tool", k), tool.get("function")
        if self._wants(part) and isinstance(function, dict) and isinstance(function.get("name"), str):
            return {**tool, "function": {**function, "name": function["name"] + self._new(part)}}
        if self._wants(part) and isinstance(tool.get("name"), str):
            return {**tool, "name": tool["name"] + self._new(part)}
        return tool


class _Search:
    """Looks for parts in a text, each first behind the one before: so a long chat is read about once."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def finds(self, variables: dict[str, Any], part: Part, *, failed: bool) -> bool:
        """Whether a part is there. If the template `failed` on the marks, an empty content counts as there."""
        kind, place, *more = part
        if kind == "tool":
            tool = variables["tools"][place]
            return self._has(str((tool.get("function") or tool).get("name")))
        message = variables["messages"][place]
        if kind == "message":
            first, end = told(message)
            return self._has((message.get("content") or "")[first:end]) if end > first else failed
        call = message["tool_calls"][more[0]]
        function = call["function"]
        given = function["arguments"]
        values = [str(given)] if isinstance(given, str) else [*map(str, given), *map(_spelled, given.values())]
        return all(map(self._has, filter(None, values or [function["name"]])))

    def _has(self, wanted: str) -> bool:
        for one in _spellings(wanted):
            at = self._text.find(one, self._at)
            at = self._text.find(one) if at < 0 else at
            if at >= 0:
                self._at = at
                return True
        return False


def _spellings(text: str) -> list[str]:
    """A text as it is, and as in JSON."""
    return list(dict.fromkeys((text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])))


def _is_written(given: str, written: str) -> bool:
    """Whether `written` is what was given: as it is, in other letters, or escaped."""
    known = {_folded(one) for one in (*_spellings(given), repr(given)[1:-1])}
    return _folded(written) in known or _folded(html.unescape(written)) in known


def _folded(text: str) -> str:
    return _SWITCH.sub("", text).casefold()


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else ""
