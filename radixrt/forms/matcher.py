"""What the scheduler knows of a form: a matcher for each answer, which fills the mask of its next token."""

# Tests: tests/test_forms.py, tests/schedule/test_masks.py

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from radixrt.arrays import Int32Array

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Words of a mask: token t has bit t % 32, from the lowest, of word t // 32."""
    return -(-vocab_size // WORD_BITS)


class Matcher(Protocol):
    """How far an answer's tokens have come in its form."""

    @property
    def is_complete(self) -> bool:
        """Whether the form has ended: no token may follow but one that ends the answer."""

    def push(self, token_id: int) -> None:
        """Take the answer's next token. Raises ValueError where the form does not allow it."""

    def forced(self) -> list[int]:
        """Tokens that must come next, one after the other, as far as is known: masks would allow nothing else."""


class Form(Protocol):
    """A form, compiled once for all answers that are to have it."""

    @property
    def vocab_size(self) -> int:
        """Of the model's logits."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""

    def joined(self, matchers: Mapping[int, Matcher]) -> Matchers:
        """Matchers of answers that are drawn together, by their places among these draws: of any forms of the same
        kind, at least one.
        """


class Matchers(Protocol):
    """Matchers that go on together, which takes less time than one by one; each has one place or several."""

    def push(self, token_ids: Int32Array) -> dict[int, Exception | None]:
        """Push the next token of each, or none where it is negative; `token_ids` are by their places. None has
        several places then. Returns the places of answers that end with it: what pushing it raised, or None where
        the form is complete.
        """

    def fill(self, masks: Int32Array, ended: Collection[int] = ()) -> None:
        """Fill rows of `masks` `[M, mask_words(vocab_size)]`, by their places, with the tokens that may come next.
        What is in the rows of `ended` is of no meaning.

        Where a form is complete, tokens that end an answer are allowed; where it may end, they are among others.
        """


class OneByOne:
    """`Matchers` that cannot but go on one after the other; `fill_row` fills a row of masks by a matcher."""

    def __init__(self, matchers: Mapping[int, Any], fill_row: Callable[[Any, Int32Array, int], None]) -> None:
        self._matchers, self._fill_row = matchers, fill_row

    def push(self, token_ids: Int32Array) -> dict[int, Exception | None]:
        """See `Matchers`."""
        ended: dict[int, Exception | None] = {}
        for place, matcher in self._matchers.items():
            if (token_id := int(token_ids[place])) >= 0:
                push_one(matcher, token_id, place, ended)
        return ended

    def fill(self, masks: Int32Array, ended: Collection[int] = ()) -> None:
        """See `Matchers`."""
        for place, matcher in self._matchers.items():
            if place not in ended:
                self._fill_row(matcher, masks, place)


def push_one(matcher: Matcher, token_id: int, place: int, ended: dict[int, Exception | None]) -> None:
    """Push a token, and note in `ended` if its answer ends with it."""
    try:
        matcher.push(token_id)
        if matcher.is_complete:
            ended[place] = None
    except Exception as error:  # of any kind, also from C++: it is one answer's
        ended[place] = error
