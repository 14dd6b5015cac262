"""Which characters one match of a regular expression can hold side by side.

The expressions are those by which tokenizers split texts: alternatives of classes with quantifiers. Where no match
holds two neighbours, the matches up to the first do not depend on what follows, nor those after it on what comes
before.

They are read as Oniguruma reads them, which the package tokenizers has, in Ruby's syntax: `{1,3}+` repeats, and is
not possessive; `{2}?` is optional, and not lazy; `$` is the end of a line; `(?i:ss)` takes the letter U+00DF.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import regex

MAX_ATOMS = 256
_MAX_DEPTH = 32  # of brackets
_HEX = {"x": 2, "u": 4}
_ESCAPES = frozenset("rntfvsSdDwW")
_SET_OPERATIONS = ("--", "||", "~~")  # of the package regex alone
_REPEATED = regex.compile(r"\{(\d{1,4})(?:(,)(\d{0,4}))?\}")
# Properties that a settled character has everywhere or nowhere: its category.
_CATEGORIES = regex.compile(
    r"\\[pP]\{\^?(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|Han|Letter|Mark|Number|Punctuation|Symbol)\}"
)
_FOLDED = ("ss", "ff", "fi", "fl", "st")  # neighbours that one letter stands for where case is ignored
_WITHOUT_CASE = regex.compile(r"\\[rntfvsSdD]|\\[^\p{L}]|[^\\]")  # of ASCII


class UnknownPattern(ValueError):
    """An expression has what is not taken, such as a look behind."""


@dataclass(frozen=True, eq=False)
class _Atom:
    """What takes one character: a class, or a letter."""

    members: regex.Pattern[str]
    ignores_case: bool

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
            raise UnknownPattern("it can match nothing at all")
        followers: dict[_Node, set[_Node]] = {}
        for before, after in part.follows:
            followers.setdefault(before, set()).add(after)
        conditions = {node for node in part.first if isinstance(node, _Look)}
        reached = conditions.union(*(_reached(node, followers) for node in conditions))
        if any(isinstance(node, _Look) for node in reached.intersection(part.last)):
            raise UnknownPattern("it can match nothing but a condition")
        self._pairs: list[tuple[_Atom, _Atom]] = []
        self._looks: list[tuple[_Atom, _Look]] = []  # with what may come just before each
        for atom in followers:
            if isinstance(atom, _Atom):
                for other in _reached(atom, followers):
                    if isinstance(other, _Atom):
                        _check_case(atom, other)
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


def _check_case(one: _Atom, other: _Atom) -> None:
    if one.ignores_case and other.ignores_case:
        for folded in _FOLDED:
            if one.takes(folded[0]) and other.takes(folded[1]):
                raise UnknownPattern(f"one letter stands for {folded!r} where case is ignored")


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
        self._depth = self._num_atoms = 0

    def whole(self) -> _Part:
        part = self._alternatives(ignores_case=self._skip("(?i)"))
        if self._at != len(self._text):
            raise UnknownPattern(f"a bracket is not opened before place {self._at}")
        return part

    def _alternatives(self, *, ignores_case: bool) -> _Part:
        if self._depth > _MAX_DEPTH:
            raise UnknownPattern(f"more than {_MAX_DEPTH} brackets are open at place {self._at}")
        self._depth += 1
        found = [self._sequence(ignores_case)]
        while self._skip("|"):
            found.append(self._sequence(ignores_case))
        self._depth -= 1
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
        least, more, is_possessive = 1, False, False
        if self._skip("?"):
            least = 0
        elif self._skip("*"):
            least, more = 0, True
        elif self._skip("+"):
            more = True
        elif match := _REPEATED.match(self._text, self._at):
            return self._repeated_between(part, match)
        else:
            return part
        if self._skip("+"):
            is_possessive = True
        else:
            self._skip("?")
        self._check_end_of_repeat()
        return self._times(part, least, more=more, is_possessive=is_possessive)

    def _repeated_between(self, part: _Part, match: regex.Match[str]) -> _Part:
        self._at = match.end()
        least, has_comma, most = int(match[1]), match[2] is not None, int(match[3] or match[1])
        if most == 0 or most < least or (has_comma and match[3] and most == least):
            raise UnknownPattern(f"it repeats by {match[0]}")
        more = has_comma or least > 1
        if self._skip("+"):
            more = True
        elif self._skip("?") and not has_comma:
            least = 0
        self._check_end_of_repeat()
        return self._times(part, least, more=more, several=int(match[1]) > 1)

    def _check_end_of_repeat(self) -> None:
        if self._at < len(self._text) and self._text[self._at] in "?*+{":
            raise UnknownPattern(f"it repeats what is repeated at place {self._at}")

    @staticmethod
    def _times(
        part: _Part, least: int, *, more: bool, is_possessive: bool = False, several: bool = False
    ) -> _Part:
        """A part that is repeated; `several`: one alone is no match."""
        return _Part(
            part.first,
            part.last,
            part.is_empty or least == 0,
            skips=not is_possessive and (least == 0 or part.skips),
            follows=part.follows + ([*product(part.last, part.first)] if more else []),
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
        source = self._text[start : self._at]
        if ignores_case and not (source.isascii() and regex.fullmatch(rf"(?:{_WITHOUT_CASE.pattern})+", source)):
            raise UnknownPattern(f"it ignores the case of {source!r}")
        self._num_atoms += 1
        if self._num_atoms > MAX_ATOMS:
            raise UnknownPattern(f"it has more than {MAX_ATOMS} classes and letters")
        try:
            return _Atom(regex.compile(source, regex.V1 | (regex.IGNORECASE if ignores_case else 0)), ignores_case)
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
        if letter in ("p", "P"):
            if match := _CATEGORIES.match(self._text, at):
                end: int = match.end()
                return end
        elif letter in _HEX:
            digits = self._text[at + 2 : at + 2 + _HEX[letter]]
            is_whole = len(digits) == _HEX[letter] and all(digit in "0123456789abcdefABCDEF" for digit in digits)
            if is_whole and (letter == "u" or digits < "8"):  # a byte that is not ASCII is no letter by itself
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

