"""Texts that are far too long are found without encoding them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from radixrt.builtin import MODEL_PATH
from radixrt.text.excess import exceeds
from radixrt.text.tokenizer import Tokenizer, load_tokenizer


@dataclass
class Words:
    """Encodes a text to its words, and notes how much it was asked for."""

    lengths: list[int] = field(default_factory=list)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.lengths.append(len(text))
        return [len(word) for word in text.split()]


def far(text: str, num_tokens: int) -> tuple[bool, list[int]]:
    words = Words()
    return exceeds(words, text, num_tokens), words.lengths  # type: ignore[arg-type]


def test_short_texts_are_not_looked_at() -> None:
    assert far("a " * 200, 100) == (False, [])


def test_the_beginning_of_a_long_text_settles_it() -> None:
    assert far("a " * 10**6, 100) == (True, [1312])


def test_a_longer_beginning_is_needed_where_tokens_are_long() -> None:
    found, lengths = far(("x" * 50 + " ") * 10**5, 100)
    assert found
    assert lengths == [1312, 5248, 20992]


def test_a_text_of_few_tokens_is_not_too_long() -> None:
    assert far(" " * 10**6 + "a " * 100, 100)[0] is False
    assert far(("x" * 100 + " ") * 100, 100)[0] is False


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL_PATH)


@pytest.mark.parametrize("piece", ["Mira likes Oslo. ", " ", "a", "é", "\n", "Q: Mira likes?\n"])
def test_only_texts_that_are_too_long(tokenizer: Tokenizer, piece: str) -> None:
    for count in (10, 1000, 20_000):
        text = piece * count
        if exceeds(tokenizer, text, 1000):
            assert len(tokenizer.encode(text)) > 1000
        assert not exceeds(tokenizer, text, len(tokenizer.encode(text)))


def test_halves_of_surrogate_pairs_are_left_to_the_encoder(tokenizer: Tokenizer) -> None:
    assert not exceeds(tokenizer, "\ud800" * 10**5, 100)
