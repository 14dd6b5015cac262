"""The text of an answer as it comes, and what its parsers make of it."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import regex

T = TypeVar("T")


class Kind(Enum):
    """What a part of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    NAME = "name"  # of a function: a call begins
    ARGUMENTS = "arguments"  # more of the JSON of the call that has begun
    END = "end"  # the call that has begun is whole; one that is not has no such part
    SYNTAX = "syntax"  # tags, and blanks beside them, which nobody is shown


@dataclass(frozen=True)
class Part:
    """A piece of an answer. The `raw` texts of all parts join to what the model wrote: nothing is lost.

    Attributes:
        kind: what it is.
        raw: as the model wrote it; "" where the text was completed, or is told a second time.
        text: as clients get it.
    """

    kind: Kind
    raw: str
    text: str


END = Part(Kind.END, "", "")


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


class Source:
    """An answer's text, of which parsers take the beginning. To take all of it costs time in proportion to its
    length, as long as little is left where more is added.

    Attributes:
        ended: whether no more comes.
        is_cut: whether it has ended otherwise than by a token of the model's: by its length or a stop string.
    """

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self.ended, self.is_cut = ended, False
        self._text, self._at = text, 0

    def add(self, text: str) -> None:
        """More text, after which no match of before holds."""
        self._text, self._at = self._text[self._at :] + text, 0

    def put_back(self, text: str) -> None:
        """What was taken last comes next again."""
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:  # more has come in between
            self._text, self._at = text + self._text[self._at :], 0

    def take(self, count: int) -> str:
        """The first characters, which are gone then."""
        return self.take_to(self._at + count)

    def take_to(self, end: int) -> str:
        """The text up to the end or the start of a match, which is gone then."""
        taken, self._at = self._text[self._at : end], end
        return taken

    def rest(self) -> str:
        """All that is left, which is gone then."""
        return self.take_to(len(self._text))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of a text that the model has ended itself."""
        return self.ended and not self.is_cut and not self.first

    @property
    def first(self) -> str:
        """The next character; "" if there is none yet."""
        return self._text[self._at : self._at + 1]

    def match(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """A match of the text that comes next, partial if more text may decide otherwise."""
        return pattern.match(self._text, self._at, partial=not self.ended)

    def search(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """The first match, partial like `match`."""
        return pattern.search(self._text, self._at, partial=not self.ended)

    def run(self, pattern: regex.Pattern[str]) -> str:
        """The text that matches so far, which is gone then: more of it may come."""
        match = pattern.match(self._text, self._at)
        return "" if match is None else self.take_to(match.end())

    def is_half(self, pattern: regex.Pattern[str]) -> bool:
        """Whether all that is left is the beginning of a match."""
        return pattern.fullmatch(self._text, self._at, partial=True) is not None


@dataclass(frozen=True)
class Tools:
    """What an answer may call.

    Attributes:
        parameters: the JSON schema of each function's arguments, by its name.
        only_one: whether a second call is no call, but text.
    """

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only_one: bool = False


def text_until(
    source: Source,
    made: Callable[[str], Part],
    pattern: regex.Pattern[str],
    at_end: regex.Pattern[str] | None = None,
) -> Steps[regex.Match[str] | None]:
    """Take the text before the first match, or to the end. Returns the match, which is not taken.

    Once the source has ended, `at_end` is looked for, if it is given.
    """
    while True:
        match = source.search(at_end if at_end is not None and source.ended else pattern)
        if raw := source.rest() if match is None else source.take_to(match.start()):
            yield made(raw)
        if match is None or not match.partial:
            return match
        yield None


def all_text(source: Source, made: Callable[[str], Part]) -> Steps[None]:
    """Take what comes, to the end."""
    while not source.ended or source.first:
        if raw := source.rest():
            yield made(raw)
        yield None


def match_next(source: Source, pattern: regex.Pattern[str]) -> Steps[regex.Match[str] | None]:
    """A match of the text that comes next, which is not taken; None if there is none.

    No match of `pattern` may begin a longer one: the result would depend on what has come.
    """
    while True:
        match = source.match(pattern)
        if match is None or not match.partial:
            return match
        yield None


def skip_next(source: Source, pattern: regex.Pattern[str]) -> Steps[bool]:
    """Take a match as syntax, if one comes next."""
    if match := (yield from match_next(source, pattern)):
        yield syntax(source.take_to(match.end()))
    return match is not None


def skip_closing(source: Source, pattern: regex.Pattern[str]) -> Steps[None]:
    """`skip_next` of what closes a call or a message, or of the beginning of that, if the answer ends with it."""
    is_there = yield from skip_next(source, pattern)
    if not is_there and source.ended and source.first and source.is_half(pattern):
        yield syntax(source.rest())


def collected(steps: Steps[T]) -> Steps[tuple[list[Part], T]]:
    """The parts that are yielded by `steps`, which nobody is told of yet, and what they return."""
    parts: list[Part] = []
    while True:
        try:
            part = next(steps)
        except StopIteration as end:
            return parts, end.value
        if part is None:
            yield None
        else:
            parts.append(part)
