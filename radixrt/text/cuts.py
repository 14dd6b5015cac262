"""Places where a text may be cut, so that the tokens of its parts are the tokens of the whole."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum

import regex

from radixrt.text.added_token import AddedToken

FARTHEST = 4096  # characters that are looked at to find a place
BLANK = "▁"  # what stands for a blank in vocabularies of sentencepiece's kind
_MAX_KNOWN = 1 << 16  # pairs
_DISPUTED = "²³¹¼½¾İı"  # whether the first are parts of words, and the last the letter i where case is ignored


class Border(IntEnum):
    """What a step of a tokenizer does with two neighbouring characters, whatever is around them."""

    CROSSED = 0  # it may look at both together
    LOCAL = 1  # what it does with one does not depend on the other
    DIVIDED = 2  # moreover, each later step sees them in different pieces


Step = Callable[[str, str], Border]
Letters = Callable[[str, str], "tuple[str, str] | None"]
"""Two neighbours as a normalizer leaves them: the end of what the first becomes, and the beginning of the second.
None: that depends on others, or on both."""


class NoCuts(ValueError):
    """It cannot be told where texts may be cut, and why."""


class Cuts:
    """Where a tokenizer's texts may be cut: between neighbours that no step looks at together.

    Whether they are such is decided by the two alone, so that a cut holds whatever comes before or after.

    Attributes:
        drops_blank: whether the tokenizer puts a blank before each text. What follows a cut begins with a blank
            then, and is encoded without it.
    """

    def __init__(
        self, letters: Letters, steps: Iterable[Step], added: Iterable[AddedToken], *, drops_blank: bool = False
    ) -> None:
        """`steps` follow one another, from the normalised text to its tokens. Before them texts are searched for
        `added` tokens, whose contents are given as they are written and as they are normalised.
        """
        self.drops_blank = drops_blank
        self._letters, self._steps = letters, tuple(steps)
        tokens = tuple(added)
        self._inside = {token.content[i : i + 2] for token in tokens for i in range(len(token.content) - 1)}
        # Tokens that take blanks, or look at their neighbours, must not be at a cut; nor where a blank is put.
        bound = [token for token in tokens if token.lstrip or token.rstrip or token.single_word or drops_blank]
        self._firsts = {self._first_of(token.content) for token in bound} - {""}
        self._lasts = {token.content[-1] for token in bound if token.content}
        self._strips = any(token.lstrip or token.rstrip for token in tokens)
        self._known: dict[str, bool] = {}

    def _first_of(self, content: str) -> str:
        """What a text that begins with it begins with. Where a cut is a blank, that is what follows the blank."""
        return (content.lstrip(" " + BLANK) if self.drops_blank and len(content) > 1 else content)[:1]

    def last(self, text: str, begin: int, end: int) -> int:
        """The last place after `begin` where each text that begins with text[:end] may be cut; `begin`: none."""
        known, size = self._known, 3 if self.drops_blank else 2
        for place in range(end - size + 1, max(begin, end - FARTHEST), -1):
            around = text[place - 1 : place - 1 + size]
            is_one = known.get(around)
            if is_one is None:
                if len(known) >= _MAX_KNOWN:
                    known.clear()
                is_one = known[around] = self._is_one(*around)
            if is_one:
                return place
        return begin

    def _is_one(self, before: str, after: str, third: str = "") -> bool:
        if not (is_settled(before) and is_settled(after)):
            return False
        if (letters := self._letters(before, after)) is None or not all(map(is_settled, letters)):
            return False
        if self._strips and (before.isspace() or letters[0].isspace()):
            return False
        if self.drops_blank and not (
            after == " " and letters[1] == BLANK and not _is_blank(before) and self._begins_a_word(third)
        ):
            return False
        for one, other in ((before, after), letters):
            if one + other in self._inside or one in self._lasts or other in self._firsts:
                return False
        for step in self._steps:
            border = step(*letters)
            if border is not Border.LOCAL:
                return border is Border.DIVIDED
        return False

    def _begins_a_word(self, letter: str) -> bool:
        """Whether a text that begins with it has no blank before that, and gets one."""
        if not is_settled(letter) or (letters := self._letters(" ", letter)) is None:
            return False
        found = (letter, letters[1])
        return not any(map(_is_blank, found)) and self._firsts.isdisjoint(found)


def _is_blank(letter: str) -> bool:
    return letter == BLANK or letter.isspace()


def is_settled(letter: str) -> bool:
    """Whether all libraries know a character alike: since Unicode 3.2 it is in the same category. No controls."""
    category = unicodedata.category(letter)
    if category[0] == "C":
        return letter in "\t\n\r"
    if letter in _DISPUTED:
        return False
    is_kept = category == unicodedata.ucd_3_2_0.category(letter)
    return is_kept and regex.fullmatch(rf"\p{{{category}}}", letter) is not None  # of a later Unicode


def divided_by_vocabulary(pieces: Collection[str]) -> Step:
    """Byte-pair encoding makes no token across neighbours that no piece holds side by side.

    The second must be a piece: what the vocabulary lacks is bytes, or unknown together with what is before it.
    """
    known, joined = {piece for piece in pieces if len(piece) == 1}, "\0".join(pieces)  # no cut is at a NUL

    def step(before: str, after: str) -> Border:
        if after not in known:
            return Border.CROSSED
        last = before if before in known else ">"  # of a byte's piece
        return Border.CROSSED if last + after in joined else Border.DIVIDED

    return step
