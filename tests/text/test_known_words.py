"""Texts put together of words that are remembered have the ids of the same texts encoded whole."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.text import known_words, tokenizer
from radixrt.text.codec import Codec
from radixrt.text.known_words import KnownWords
from radixrt.text.tokenizer import Tokenizer
from tests.support.pipelines import PIPELINES, TEXT_MARKERS
from tests.support.shared_texts import shared_texts
from tests.support.small_tokenizers import small_tokenizer


@cache
def codec_of(name: str) -> Codec:
    return PIPELINES[name]()


NAMES = ["gpt-2", "llama 3", "tekken", "o200k", "digits together", "punctuation", "whitespace", "words and marks"]
NAMES += ["nfkc, every letter", "gemma"]


@pytest.mark.parametrize("name", NAMES)
def test_lists_of_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at random, with marks, blanks of all kinds and special tokens; whatever was encoded before."""
    monkeypatch.setattr(known_words, "MOST_NEW", 1.0)
    monkeypatch.setattr(known_words, "MOST", 200)
    codec, rng = codec_of(name), random.Random(name)
    words = KnownWords(codec.encode, codec.cuts())
    for _ in range(4):
        texts = shared_texts(rng, TEXT_MARKERS)
        texts += [" " + one for one in texts]
        for one, found, expected in zip(texts, words.encode(texts), codec.encode(texts), strict=True):
            assert found == expected, repr(one)


@settings(max_examples=150)
@given(texts=st.lists(st.text("ab'. 1\n<>ts", max_size=12).map(lambda one: " " + one), min_size=1, max_size=8))
def test_lists_of_short_texts(texts: list[str]) -> None:
    codec = codec_of("llama 3")
    words = KnownWords(codec.encode, codec.cuts())
    for _ in range(2):
        assert words.encode(texts) == codec.encode(texts)


def test_each_word_is_encoded_once_where_many_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, given = codec_of("llama 3"), list[str]()

    def encode(texts: list[str]) -> list[list[int]]:
        given.extend(texts)
        return codec.encode(texts)

    words = KnownWords(encode, codec.cuts())
    texts = [" one two three" * 9 for _ in range(4)]
    assert words.encode(texts) == words.encode(texts) == codec.encode(texts)
    assert sorted(given) == [" one", " three", " two"]
    given.clear()
    mixed = ["no blank before", " one  two", " " + "long" * 9, " one two"]
    assert words.encode(mixed) == codec.encode(mixed)
    assert given == mixed[:3]
    given.clear()
    others = [f" {n} {n + 10}" for n in range(9)]
    assert words.encode(others) == codec.encode(others)
    assert given == others, "nearly all words are new"
    monkeypatch.setattr(known_words, "MOST", 4)
    for n in range(9):
        words.encode([f" one w{n} w{n} w{n}"] * 3)
        assert len(words._ids) <= 5
    with pytest.raises(ValueError, match="puts a blank before"):
        KnownWords(codec.encode, codec_of("llama 2").cuts())


@pytest.mark.parametrize(("processors", "is_used"), [(2, True), (5, False)])
def test_with_few_processors_alone(processors: int, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "usable_cpus", lambda: processors)
    seen: list[int] = []
    encode = KnownWords.encode

    def watched(self: KnownWords, texts: list[str]) -> list[list[int]]:
        seen.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(KnownWords, "encode", watched)
    own: Tokenizer = replace(small_tokenizer("byte level"))  # as new
    texts = [f"a b {n} a b" for n in range(5)]
    found = [ids.tolist() for ids in own.encode_batch(texts)]
    assert found == [[*own.lead, *ids] for ids in own.codec.encode(texts)]
    assert bool(seen) == is_used
