"""What a stream shows is what decoding all of it gives, and never half a character."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixrt.errors import TokenizerError
from radixrt.text.builder import Detokenizer
from radixrt.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import KINDS, small_tokenizer

TEXTS = [
    "日本語 😀👩‍👩‍👧 é e\u0301 x",
    "  two  blanks ",
    "é" * 30,
    "\ufffd\ufffdx\ufffd",
    " Mira likes Oslo.\n\n",
    "🇳🇴" * 9,
]


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@cache
def token_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Anything, with many bytes, special tokens, blanks and ids that the tokenizer does not know."""
    tokenizer = small_tokenizer(kind)
    blanks = [i for i in range(tokenizer.vocab_size) if not tokenizer.piece(i).strip("▁Ġ")]
    kinds = [
        st.integers(0, tokenizer.vocab_size + 1),
        st.integers(0, min(7, tokenizer.vocab_size)),
        st.sampled_from([0, *blanks]),
        st.sampled_from(tokenizer.encode("é日😀").tolist() or [0]),
    ]
    if tokenizer.byte_ids:
        kinds.append(st.sampled_from(sorted(tokenizer.byte_ids)))
    one = st.one_of(kinds).map(lambda i: [i])
    text = st.sampled_from([tokenizer.encode(text).tolist() for text in TEXTS])
    return st.lists(one | one | one | one | text, max_size=20).map(lambda parts: list(chain.from_iterable(parts)))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_stream_of_anything_is_its_decoding(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = small_tokenizer(kind)
    ids = data.draw(token_ids(kind))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_tokens_may_come_together(kind: str, data: st.DataObject) -> None:
    tokenizer = small_tokenizer(kind)
    ids = data.draw(token_ids(kind))
    detokenizer, shown = Detokenizer(tokenizer), ""
    for part in np.split(ids, sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))):
        shown += detokenizer.push(*part.astype(int).tolist())
    assert shown + detokenizer.finish() == tokenizer.decode(ids)


def test_a_silent_token_behind_a_word_that_came_with_it() -> None:
    tokenizer = small_tokenizer("ends of words")
    words = tokenizer.encode("Mira likes Oslo " * 9).tolist()
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(*ids) for ids in ([*words, 1], words))
    assert shown + detokenizer.finish() == tokenizer.decode(words + words)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(text=st.text(max_size=30))
def test_a_stream_of_text_is_its_decoding(kind: str, text: str) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode(text).tolist()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bare"])
@settings(max_examples=50)
@given(data=st.data())
def test_what_has_been_shown_stays(kind: str, data: st.DataObject) -> None:
    """Whatever follows: what is shown after any number of tokens begins every longer decoding."""
    tokenizer = small_tokenizer(kind)
    ids = data.draw(token_ids(kind))
    shown = ""
    for count, piece in enumerate(stream(tokenizer, ids)[:-1], 1):
        shown += piece
        for more in ([], [count % tokenizer.vocab_size], tokenizer.encode("é").tolist()[-1:]):
            assert tokenizer.decode(ids[:count] + more).startswith(shown)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "byte fallback, no strip", "bare"])
@pytest.mark.parametrize("text", TEXTS)
def test_sound_text_never_shows_half_a_character(kind: str, text: str) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode(text).tolist()
    whole = tokenizer.decode(ids)
    assert whole.strip() == text.strip()  # Llama's tokenizer gives up a leading blank
    shown = ""
    for piece in stream(tokenizer, ids):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_shown_at_once(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode("Mira likes Oslo.").tolist()
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id)
        assert shown == tokenizer.decode(ids[:count])
    assert detokenizer.at_boundary


def test_bytes_wait_for_the_end_of_their_character_or_run() -> None:
    level = small_tokenizer("byte level")
    ids = [level.encode(part).tolist() for part in ("a", "ß", "b")]
    assert [len(part) for part in ids] == [1, 2, 1]
    assert stream(level, list(chain(*ids))) == ["a", "", "ß", "b", ""]
    fallback = small_tokenizer("byte fallback")  # by sentencepiece itself one bad byte spoils one character
    ids = fallback.encode("aßb", add_special_tokens=False).tolist()
    assert fallback.piece(ids[-2]) == "<0x9F>"
    assert stream(fallback, ids)[-4:] == ["", "", "ßb", ""]
    # one bad byte makes replacements of the whole run: none of it may have been shown
    assert stream(fallback, [*ids[:-1], ids[-2], ids[-1]])[-5:] == ["", "", "", "\ufffd" * 3 + "b", ""]


def test_a_special_token_between_two_bytes() -> None:
    for kind, special in (("byte level", 1), ("byte fallback", 2), ("bare", 2)):
        tokenizer = small_tokenizer(kind)
        *_, first, second = tokenizer.encode("ß").tolist()
        assert "".join(stream(tokenizer, [first, special, second])) == "ß"
        assert "".join(stream(tokenizer, [first, special, second], skip=False)) == "\ufffd</s>\ufffd"


def test_what_ends_unfinished_becomes_replacements() -> None:
    for kind in ("byte level", "byte fallback", "bare"):
        tokenizer = small_tokenizer(kind)
        ids = tokenizer.encode("a😃").tolist()[:-1]
        *shown, rest = stream(tokenizer, ids)
        assert "".join(shown) == tokenizer.decode(ids).rstrip("\ufffd") != tokenizer.decode(ids)
        assert set(rest) == {"\ufffd"}


@pytest.mark.parametrize("kind", KINDS)
def test_silent_tokens_delay_nothing(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode("Mira", add_special_tokens=False).tolist()
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for token_id in [1] * 100 + ids + [1, tokenizer.vocab_size] * 100 + ids:
        shown += detokenizer.push(token_id)
    assert shown == tokenizer.decode(ids + ids)


def test_tentative_text() -> None:
    tokenizer = small_tokenizer("byte fallback")
    detokenizer = Detokenizer(tokenizer)
    seen = []
    for token_id in tokenizer.encode("x😃ß", add_special_tokens=False).tolist():
        detokenizer.push(token_id)
        seen.append(detokenizer.tentative())
    assert seen[-6:] == ["", "", "", "😃", "", "😃ß"]
    assert not detokenizer.at_boundary
    assert detokenizer.finish() == "😃ß"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["text", "bytes", "bad bytes", "special", "blanks", "unknown", "one by one"])
def test_the_work_for_a_token_does_not_grow(kind: str, what: str) -> None:
    """Counted in tokens decoded, for 1500 of text and of everything that never ends a character."""
    tokenizer = small_tokenizer(kind)
    byte = sorted(tokenizer.byte_ids) or [tokenizer.encode("😃").tolist()[-1]]
    blank = tokenizer.encode("a  b").tolist()[-2]
    cycle = {
        "text": tokenizer.encode("Mira likes Oslo. 日本 ").tolist(),
        "bytes": tokenizer.encode("😃").tolist()[-4:],
        "bad bytes": [byte[-1]],
        "special": [1],
        "blanks": [blank],
        "unknown": [tokenizer.vocab_size],
        "one by one": list(range(tokenizer.vocab_size)),
    }[what]
    ids = (cycle * 1500)[:1500]
    decoded = 0

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer.codec, name)

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.codec.decode(ids, skip_special_tokens)

    counted = replace(tokenizer, codec=Counting())  # type: ignore[arg-type]
    assert counted.anchor is not None
    decoded = 0
    assert "".join(stream(counted, ids)) == tokenizer.decode(ids)
    assert decoded <= 25 * len(ids)


def test_a_negative_id_is_refused() -> None:
    for kind in ("byte level", "bare"):
        with pytest.raises(TokenizerError, match=r"token id -5 .* is negative"):
            Detokenizer(small_tokenizer(kind)).push(-5)


@example(ids=[])
@given(ids=st.lists(st.integers(0, 20)))
def test_a_vocabulary_without_letters(ids: list[int]) -> None:
    """Nothing can stand in for the text before, so all of it stays."""
    tokenizer = small_tokenizer("byte level")
    letterless = replace(tokenizer)
    letterless.__dict__["anchor"] = None
    assert "".join(stream(letterless, ids)) == tokenizer.decode(ids)
