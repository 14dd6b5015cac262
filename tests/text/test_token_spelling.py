"""What single tokens spell, over tokenizers of every kind."""

from __future__ import annotations

import pytest

from radixrt.text.token_spelling import Spelled, TokenSpelling, _part
from tests.support.small_tokenizers import KINDS, small_tokenizer


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("wordpiece", "ends of words", "no decoder")]
)
def test_the_tokens_of_a_text_spell_it(kind: str) -> None:
    """Behind its first word, whose blank is the tokenizer's business."""
    tokenizer, spelling = small_tokenizer(kind), TokenSpelling(small_tokenizer(kind))
    first, rest = "Oslo", " likes the 日本 é quick 😀 fox."
    if kind == "bare, no byte fallback":  # which has no tokens for all of it
        rest = " likes the quick fox."
    before = tokenizer.encode(first, add_special_tokens=False)
    ids = tokenizer.encode(first + rest, add_special_tokens=False)
    assert ids[: len(before)].tolist() == before.tolist()
    spelled = [spelling.of(int(token)) for token in ids[len(before) :]]
    parts = [one.bytes for one in spelled if one.bytes is not None]
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert decoded.startswith(first)
    assert b"".join(parts).decode() == decoded[len(first) :]
    assert len(parts) == len(spelled)
    assert all(one.text == one.bytes.decode("utf-8", "replace") for one in spelled if one.bytes is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_a_spelling(kind: str) -> None:
    tokenizer, spelling = small_tokenizer(kind), TokenSpelling(small_tokenizer(kind))
    for token_id in range(tokenizer.vocab_size + 3):  # a model may have more rows
        spelled = spelling.of(token_id)
        assert spelled.bytes is None or spelled.bytes.decode("utf-8", "replace") == spelled.text
        assert spelling.of(token_id) is spelled


def test_parts_of_characters_have_their_bytes() -> None:
    tokenizer = small_tokenizer("byte level")
    spelling = TokenSpelling(tokenizer)
    spelled = [spelling.of(int(token)) for token in tokenizer.encode("\u00ff\u2603", add_special_tokens=False)]
    assert len(spelled) > 2
    assert any(one.text == "\ufffd" for one in spelled)
    assert b"".join(one.bytes or b"?" for one in spelled) == "\u00ff\u2603".encode()


def test_bytes_are_not_guessed() -> None:
    """A piece that could be bytes in letters, of a token that spells something else."""
    assert _part("Ã", "\ufffd") == b"\xc3"
    assert _part("Ã", "\ufffd!") is None
    assert _part("▁Ã", "\ufffd") is None


def test_special_tokens_are_spelled() -> None:
    tokenizer = small_tokenizer("byte level")
    assert tokenizer.eos_token_id is not None
    assert TokenSpelling(tokenizer).of(tokenizer.eos_token_id) == Spelled("</s>", b"</s>")


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert TokenSpelling(None).of(5) == Spelled("token_id:5", b"token_id:5")
