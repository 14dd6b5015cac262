"""What the scheduler knows of a form: a matcher for each answer, which fills the mask of its next token."""

# Tests: tests/test_forms.py, tests/schedule/test_masks.py

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

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

    def push_each(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[Exception | None]:
        """Push the next token of each answer, which may take less time than one by one. Returns what pushing it
        raised, or None. Matchers are those of any forms of the same kind.
        """

    def fill(self, matchers: Mapping[int, Matcher], masks: Int32Array) -> None:
        """Fill rows of `masks` `[M, mask_words(vocab_size)]` with the tokens that may come next: by each row, the
        matcher of its answer.

        Matchers are those of any forms of the same kind. Where a form is complete, tokens that end an answer are
        allowed; where it may end, they are among others.
        """
