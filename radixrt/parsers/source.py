"""The text of an answer as it comes, and what its parsers make of it."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import regex

from radixrt.text.builder import find_stop, unfinished_stop

T = TypeVar("T")


class Kind(Enum):
    """What a part of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    NAME = "name"  # of a function: a call begins
    ARGUMENTS = "arguments"  # more of the JSON of the call that has begun
    SYNTAX = "syntax"  # tags, and blanks beside them, which nobody is shown


@dataclass(frozen=True)
class Part:
    """A piece of an answer. The `raw` texts of all parts join to what the model wrote: nothing is lost.

    Attributes:
        kind: what it is.
        raw: as the model wrote it.
        text: as clients get it.
    """

    kind: Kind
    raw: str
    text: str


def content(raw: str) -> Part:
    """Text for the user."""
    return Part(Kind.CONTENT, raw, raw)


def reasoning(raw: str) -> Part:
    """Text of a thought."""
    return Part(Kind.REASONING, raw, raw)


def syntax(raw: str) -> Part:
    """What is not shown."""
    return Part(Kind.SYNTAX, raw, "")


# A parser takes its source's text and yields parts; None where only more text can tell how it goes on. What it
# decides must follow from the text alone, not from where pieces of it end.
Steps = Generator[Part | None, None, T]


@dataclass
class Source:
    """An answer's text.

    Attributes:
        text: what has come and was not taken yet.
        ended: whether no more comes.
    """

    text: str = ""
    ended: bool = False

    def take(self, count: int) -> str:
        """The first characters, which are gone then."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken


@dataclass(frozen=True)
class Tools:
    """What an answer may call.

    Attributes:
        parameters: the JSON schema of each function's arguments, by its name.
        only_one: whether a second call is no call, but text.
    """

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only_one: bool = False


def text_until(source: Source, made: Callable[[str], Part], tags: tuple[str, ...]) -> Steps[bool]:
    """Take the text before the first tag, or to the end. Returns whether a tag comes next."""
    while True:
        found = find_stop(tags, source.text)
        held = 0 if found or source.ended else unfinished_stop(tags, source.text)
        if safe := found[0] if found else len(source.text) - held:
            yield made(source.take(safe))
        if found or source.ended:
            return found is not None
        yield None


def match_next(source: Source, pattern: regex.Pattern[str], start: int = 0) -> Steps[regex.Match[str] | None]:
    """A match of the text that comes next, which is not taken; None if there is none.

    No match of `pattern` may begin a longer one: the result would depend on what has come.
    """
    while True:
        match = pattern.match(source.text, start, partial=not source.ended)
        if match is None or not match.partial:
            return match
        yield None


def skip_next(source: Source, pattern: regex.Pattern[str]) -> Steps[bool]:
    """Take a match as syntax, if one comes next."""
    if match := (yield from match_next(source, pattern)):
        yield syntax(source.take(match.end()))
    return match is not None
