"""Which characters one match of a regular expression can hold side by side.

The expressions are those by which tokenizers split texts: alternatives of classes with quantifiers. Where no match
holds two neighbours, the matches up to the first do not depend on what follows, nor those after it on what comes
before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import regex

_HEX = {"x": 2, "u": 4}
_ESCAPES = frozenset("rntfvsSdDwW")
_SET_OPERATIONS = ("--", "||", "~~")  # of the package regex alone
_REPEATED = regex.compile(r"\{(\d+)(?:(,)(\d*))?\}")


class UnknownPattern(ValueError):
    """An expression has what is not taken, such as a look behind."""


@dataclass(frozen=True, eq=False)
class _Atom:
    """What takes one character: a class, or a letter."""

    members: regex.Pattern[str]

    def takes(self, letter: str) -> bool:
        return self.members.fullmatch(letter) is not None


@dataclass(frozen=True, eq=False)
class _Look:
    """A condition on what comes next: that it is one of `members`, or none of them if not `is_wanted`; without
    members, that it is the end.
    """

    members: regex.Pattern[str] | None
    is_wanted: bool

    def is_alike(self, letter: str) -> bool:
        """Whether it holds before `letter` if, and only if, it holds at the end."""
        return self.members is not None and self.members.fullmatch(letter) is None


_Node = _Atom | _Look


@dataclass
class _Part:
    """A part of an expression: the nodes that it can begin and end with, and whether it can be empty.

    `follows` has each pair of nodes of which the second can come next. `skips` is whether it can be left out where
    it could take something, which a possessive one cannot.
    """

    first: list[_Node] = field(default_factory=list)
    last: list[_Node] = field(default_factory=list)
    is_empty: bool = True
    skips: bool = True
    follows: list[tuple[_Node, _Node]] = field(default_factory=list)
    begins: list[_Node] = field(default_factory=list)  # those of `first` before which nothing had to give way
    ends: list[_Node] = field(default_factory=list)  # those of `last` after which nothing need follow


class SplitPattern:
    """A regular expression, as far as two neighbouring characters are concerned.

    Raises UnknownPattern for what is not taken.
    """

    def __init__(self, expression: str) -> None:
        part = _Parser(expression).whole()
        if part.is_empty:
            raise UnknownPattern("it matches nothing at all")
        followers: dict[_Node, set[_Node]] = {}
        for before, after in part.follows:
            followers.setdefault(before, set()).add(after)
        self._pairs: list[tuple[_Atom, _Atom]] = []
        self._looks: list[tuple[_Atom, _Look]] = []  # with what may come just before each
        for atom in followers:
            if isinstance(atom, _Atom):
                for other in _reached(atom, followers):
                    if isinstance(other, _Atom):
                        self._pairs.append((atom, other))
                    else:
                        self._looks.append((atom, other))
        alone = set(part.begins) & set(part.ends)
        self._alone = [atom for atom in alone if isinstance(atom, _Atom)]
        self._atoms = {atom for atom in (*followers, *part.first, *part.last) if isinstance(atom, _Atom)}
        self._atoms |= {after for _, after in part.follows if isinstance(after, _Atom)}

    def is_local(self, before: str, after: str) -> bool:
        """Whether no match holds both neighbours, and those up to the first are alike if the text ends there."""
        crosses = any(a.takes(before) and b.takes(after) for a, b in self._pairs)
        return not crosses and all(look.is_alike(after) for atom, look in self._looks if atom.takes(before))

    def always_takes(self, letter: str) -> bool:
        """Whether each such character is in a match, whatever is around it."""
        return any(atom.takes(letter) for atom in self._alone)

    def takes(self, letter: str) -> bool:
        """Whether such a character can be in a match."""
        return any(atom.takes(letter) for atom in self._atoms)


def _reached(node: _Node, followers: dict[_Node, set[_Node]]) -> set[_Node]:
    """What can come next after a node, conditions on the way included."""
    reached: set[_Node] = set()
    left = [node]
    while left:
        for other in followers.get(left.pop(), ()):
            if other not in reached:
                reached.add(other)
                if isinstance(other, _Look):
                    left.append(other)
    return reached


class _Parser:
    def __init__(self, expression: str) -> None:
        self._text, self._at = expression, 0

    def whole(self) -> _Part:
        part = self._alternatives(ignores_case=self._skip("(?i)"))
        if self._at != len(self._text):
            raise UnknownPattern(f"a bracket is not opened before place {self._at}")
        return part

    def _alternatives(self, *, ignores_case: bool) -> _Part:
        found = [self._sequence(ignores_case)]
        while self._skip("|"):
            found.append(self._sequence(ignores_case))
        return _Part(
            [node for part in found for node in part.first],
            [node for part in found for node in part.last],
            is_empty=any(part.is_empty for part in found),
            skips=all(part.skips for part in found),
            follows=[pair for part in found for pair in part.follows],
            begins=[node for part in found for node in part.begins],
            ends=[node for part in found for node in part.ends],
        )

    def _sequence(self, ignores_case: bool) -> _Part:
        whole = _Part()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            whole = _joined(whole, self._repeated(self._element(ignores_case)))
        return whole

    def _element(self, ignores_case: bool) -> _Part:
        for opening, wanted in (("(?=", True), ("(?!", False)):
            if self._skip(opening):
                atom = self._atom(ignores_case)
                self._expect(")")
                return _of(_Look(atom.members, wanted))
        if self._skip("$"):
            return _of(_Look(None, True))
        for opening, ignores in (("(?i:", True), ("(?:", ignores_case)):
            if self._skip(opening):
                part = self._alternatives(ignores_case=ignores)
                self._expect(")")
                return part
        if self._text[self._at] == "(" and not self._text.startswith("(?", self._at):
            self._at += 1
            part = self._alternatives(ignores_case=ignores_case)
            self._expect(")")
            return part
        return _of(self._atom(ignores_case))

    def _repeated(self, part: _Part) -> _Part:
        least, more = 1, False
        if self._skip("?"):
            least = 0
        elif self._skip("*"):
            least, more = 0, True
        elif self._skip("+"):
            more = True
        elif match := _REPEATED.match(self._text, self._at):
            self._at = match.end()
            least, more = int(match[1]), match[2] is not None or int(match[1]) > 1
        else:
            return part
        is_possessive = self._skip("+")
        if not is_possessive:
            self._skip("?")
        if self._at < len(self._text) and self._text[self._at] in "?*+{":
            raise UnknownPattern(f"it repeats what is repeated at place {self._at}")
        follows = part.follows + ([*product(part.last, part.first)] if more else [])
        is_empty = part.is_empty or least == 0
        several = least > 1  # one alone is no match
        return _Part(
            part.first,
            part.last,
            is_empty,
            skips=not is_possessive,
            follows=follows,
            begins=[] if several else part.begins,
            ends=[] if several else part.ends,
        )

    def _atom(self, ignores_case: bool) -> _Atom:
        start = self._at
        if start == len(self._text):
            raise UnknownPattern("it ends within a bracket")
        letter = self._text[start]
        if letter == "[":
            self._at = self._end_of_class(start)
        elif letter == "\\":
            self._at = self._end_of_escape(start)
        elif letter in "(){}*+?|^$":
            raise UnknownPattern(f"it has {letter!r} at place {start}")
        else:
            self._at += 1
        flags = regex.V1 | (regex.IGNORECASE if ignores_case else 0)
        try:
            return _Atom(regex.compile(self._text[start : self._at], flags))
        except regex.error as error:
            raise UnknownPattern(str(error)) from error

    def _end_of_class(self, start: int) -> int:
        at, depth = start, 0
        while at < len(self._text):
            letter = self._text[at]
            if letter == "\\":
                at = self._end_of_escape(at)
                continue
            if self._text.startswith("[:", at) or self._text[at : at + 2] in _SET_OPERATIONS:
                raise UnknownPattern(f"it has {self._text[at : at + 2]!r} in a class at place {at}")
            at += 1
            if letter == "[":
                depth += 1
                at += self._text.startswith("^", at)
                if self._text.startswith("]", at):
                    raise UnknownPattern(f"it has a class that begins with a bracket at place {at}")
            elif letter == "]":
                depth -= 1
                if not depth:
                    return at
        raise UnknownPattern("it ends within a class")

    def _end_of_escape(self, at: int) -> int:
        letter = self._text[at + 1 : at + 2]
        if letter in ("p", "P") and self._text.startswith("{", at + 2):
            end = self._text.find("}", at)
            if end < 0:
                raise UnknownPattern("it ends within a bracket")
            return end + 1
        if letter in _HEX:
            digits = self._text[at + 2 : at + 2 + _HEX[letter]]
            if len(digits) == _HEX[letter] and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                return at + 2 + len(digits)
        elif letter in _ESCAPES or (letter and letter.isascii() and letter.isprintable() and not letter.isalnum()):
            return at + 2
        raise UnknownPattern(f"it has '\\{letter}' at place {at}")

    def _skip(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise UnknownPattern(f"it has no {text!r} at place {self._at}")


def _of(node: _Node) -> _Part:
    return _Part([node], [node], False, follows=[], begins=[node], ends=[node])


def _joined(one: _Part, other: _Part) -> _Part:
    """One part and then the other."""
    return _Part(
        one.first + (other.first if one.is_empty else []),
        other.last + (one.last if other.is_empty else []),
        one.is_empty and other.is_empty,
        one.skips and other.skips,
        [*one.follows, *other.follows, *product(one.last, other.first)],
        one.begins + (other.begins if one.is_empty and one.skips else []),
        other.ends + (one.ends if other.is_empty else []),
    )


def literal(text: str) -> SplitPattern:
    """The pattern of a text that stands for itself."""
    return SplitPattern("".join(map(_escaped, text)))


def _escaped(letter: str) -> str:
    return "\\" + letter if letter.isascii() and not letter.isalnum() and letter.isprintable() else letter

