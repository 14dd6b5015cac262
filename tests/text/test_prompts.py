"""Texts and chats of a list, encoded together, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt.arrays import Int32Array
from radixrt.errors import ContextLengthError, PromptError
from radixrt.text.chat import Chat
from radixrt.text.codec import JsonCodec
from radixrt.text.prompts import encode_prompts
from radixrt.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import CHATML, chat_tokenizer, small_tokenizer

HEAD = "Mira likes Oslo. Tarek counts 37. "


def chat(text: str) -> Chat:
    return Chat.of([{"role": "system", "content": HEAD * 3}, {"role": "user", "content": text}])


def ids_of(found: Int32Array | PromptError) -> list[int]:
    assert not isinstance(found, PromptError)
    assert found.dtype == np.int32
    ids: list[int] = found.tolist()
    return ids


def test_each_is_as_if_it_were_alone(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    prompts: list[str | Chat] = []
    for n in range(20):
        prompts += [HEAD + f"Hugo {n}", chat(f"Hugo {n}"), HEAD[: 3 * n]]
    together = encode_prompts(tokenizer, prompts, [None] * len(prompts))
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = encode_prompts(tokenizer, [prompt], [None])
        assert ids_of(found) == ids_of(alone)
        expected = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        assert ids_of(found) == expected.tolist()


def test_what_prompts_share_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, characters = JsonCodec.encode, list[int]()

    def noted(self: JsonCodec, texts: list[str]) -> Any:
        characters.extend(map(len, texts))
        return encode(self, texts)

    monkeypatch.setattr(JsonCodec, "encode", noted)
    prompts = [HEAD * 30 + f"Hugo {n}" for n in range(100)]
    encode_prompts(small_tokenizer("byte level"), prompts, [None] * len(prompts))
    assert sum(characters) < len(HEAD) * 30 + 100 * 20


def test_bad_ones_are_told_in_their_places_and_others_encoded(tmp_path: Path) -> None:
    refusing = "{% if messages[1].content == 'no' %}{{ raise_exception('never') }}{% endif %}"
    tokenizer = chat_tokenizer(tmp_path, refusing + CHATML)
    long = HEAD * 1000
    prompts: list[Any] = [HEAD, "half \ud800", chat("no"), chat("yes"), long, chat(long), long, ""]
    limits = [None, None, None, None, 10, 10, None, 10]
    found = encode_prompts(tokenizer, prompts, limits)
    refused = {place: str(one) for place, one in enumerate(found) if isinstance(one, PromptError)}
    assert refused.keys() == {1, 2, 4, 5}
    assert refused[1].startswith("cannot be encoded: the text holds U+D800, half of a surrogate pair")
    assert "never" in refused[2]
    assert "by far more tokens than fit" in refused[4]
    assert "in its messages" in refused[5]
    assert isinstance(found[4], ContextLengthError)
    assert ids_of(found[0]) == tokenizer.encode(HEAD).tolist()
    assert len(ids_of(found[6])) > 1000
    assert ids_of(found[7]) == tokenizer.encode("").tolist()


def test_one_that_the_vocabulary_lacks_is_found_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = JsonCodec.encode

    def lacking(self: JsonCodec, texts: Sequence[str]) -> Any:
        if any("@" in text for text in texts):
            raise ValueError("there is no @")
        return encode(self, list(texts))

    monkeypatch.setattr(JsonCodec, "encode", lacking)
    prompts = [f"{HEAD}{n}" for n in range(40)]
    prompts[17] += "@"
    found = encode_prompts(small_tokenizer("byte level"), prompts, [None] * 40)
    assert [place for place, one in enumerate(found) if isinstance(one, PromptError)] == [17]


def test_without_a_chat_template_texts_are_encoded() -> None:
    tokenizer: Tokenizer = small_tokenizer("byte level")
    text, refused = encode_prompts(tokenizer, [HEAD, chat("Hugo")], [None, 100])
    assert ids_of(text) == tokenizer.encode(HEAD).tolist()
    assert isinstance(refused, PromptError)
    assert "has no chat template" in str(refused)
