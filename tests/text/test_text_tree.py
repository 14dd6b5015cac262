"""The tree of texts: what lists of every shape, several threads and bad texts make of it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from radixrt.errors import TokenizerError
from radixrt.text import text_tree
from radixrt.text.codec import Codec, JsonCodec
from radixrt.text.text_tree import TextTree
from radixrt.text.tokenizer import Tokenizer
from tests.support.pipelines import PIPELINES, TEXT_MARKERS
from tests.support.shared_texts import shared_texts


class Words(JsonCodec):
    """It cannot encode a word."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        if any("bad" in one for one in texts):
            raise RuntimeError("there is no such word")
        return super().encode(texts)


def words() -> Words:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Words(backend)


NAMES = ("llama 3", "llama 2", "metaspace first, words", "sentencepiece")  # two of which put a blank before texts


@cache
def codec_of(name: str) -> Codec:
    return PIPELINES[name]()


def ids_of(codec: Codec, texts: list[str], lead: tuple[int, ...] = ()) -> list[list[int]]:
    tree = TextTree(texts, codec.cuts())
    found = [ids.tolist() for block in tree.encoded(codec.encode, lead) for ids in block]
    by_number = dict(zip(tree.order, found, strict=True))
    return [by_number[number] for number in range(len(texts))]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(texts=st.lists(st.text("ab'. 1\n<>ts", max_size=12), min_size=1, max_size=8))
def test_lists_of_short_texts(name: str, texts: list[str]) -> None:
    assert ids_of(codec_of(name), texts) == codec_of(name).encode(texts)


LISTS = {
    "one": ["a b c"],
    "an empty one": [""],
    "empty ones": ["", "", ""],
    "the same": ["a b c"] * 5,
    "the same blanks": ["   "] * 3,
    "the same, and longer ones": ["a b c", "a b c", "a b c d", "a b c d", "a b", "", ""],
    "each the beginning of the next": ["a quick brown fox"[:end] for end in range(18)],
    "the last ones the same": ["b c", "a", "z z z z", "z z z z"],
    "nothing shared": ["a b", "b c", "c d"],
    "only their beginnings": [f"a{n} b" for n in range(20)],
    "of all planes": ["\U0010ffff b c", "\U0010ffff b d", "\uffff b", "\uffff c"],
}


@pytest.mark.parametrize("lead", [(), (7, 8)])
@pytest.mark.parametrize("block", [1, 9, 1 << 20])
@pytest.mark.parametrize("case", LISTS)
def test_lists(case: str, block: int, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of a block is."""
    monkeypatch.setattr(text_tree, "FIRST", block)
    for codec in map(codec_of, NAMES):
        assert ids_of(codec, LISTS[case], lead) == [[*lead, *ids] for ids in codec.encode(LISTS[case])]


@pytest.mark.parametrize("most", [1, 60])
@pytest.mark.parametrize("name", NAMES)
def test_blocks(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What texts share is kept from block to block."""
    heads = ["a b c d e f g h" * 20, "a b c d e f g h" * 20 + " 1 2 3" * 20, " x" * 99]
    texts = [f"{head} {n // 3} c {n} d" for head in heads for n in range(12)]
    monkeypatch.setattr(text_tree, "FIRST", 1)
    monkeypatch.setattr(text_tree, "LARGEST", most)
    given: list[list[str]] = []

    def encode(stretches: list[str]) -> list[list[int]]:
        given.append(stretches)
        return codec_of(name).encode(stretches)

    tree = TextTree(texts, codec_of(name).cuts())
    blocks = [*tree.encoded(encode, ())]
    assert len(blocks) == len(given) > 5
    expected = codec_of(name).encode([texts[number] for number in tree.order])
    assert [ids.tolist() for block in blocks for ids in block] == expected
    # Blocks are far longer: a stretch is encoded again where the texts of the next block end it elsewhere.
    assert sum(len(one) for stretches in given for one in stretches) < sum(map(len, texts)) / 1.2


@pytest.mark.parametrize(("name", "length"), [("words", 1_000_000), ("llama 3", 30_000)])
def test_long_texts_without_a_place_to_cut(name: str, length: int) -> None:
    codec = words() if name == "words" else codec_of(name)
    head = "a" * length
    texts = [head + end for end in ("", "a", "b", "b c", "b d", " c")]
    assert codec.cuts().last(texts[3], 0, length + 1) == 0
    assert ids_of(codec, texts) == codec.encode(texts)


def test_a_cut_far_before_the_end() -> None:
    """Beyond what is looked at: others may still share what is before."""
    head, far = "some words " * 9, "x" * 9000
    texts = [head + far + "1", head + far + "2", head + "y", head + "z"]
    codec = codec_of("llama 3")
    assert codec.cuts().last(texts[0], 0, len(texts[0]) - 1) == 0
    assert codec.cuts().last(texts[0], 0, len(head)) > 80
    assert ids_of(codec, texts) == codec.encode(texts)


# --- the tokenizer, which uses it ---


def refusing() -> Tokenizer:
    return Tokenizer(words(), lead=(5,))


def test_a_text_that_cannot_be_encoded_is_named_by_its_place() -> None:
    texts = ["a b c", "a b", "a b bad", "a b c"]
    with pytest.raises(
        TokenizerError, match=r"^text 2: the tokenizer cannot encode 'a b bad': there is no such word"
    ):
        refusing().encode_batch(texts)
    with pytest.raises(TokenizerError, match=r"^the tokenizer cannot encode 'bad': there"):
        refusing().encode_batch(["bad"])
    found = refusing().encode_batch(["a b c", "a b", "a b c"])
    assert [ids.tolist() for ids in found] == [[5, 0, 1, 2], [5, 0, 1], [5, 0, 1, 2]]
    assert all(ids.dtype == np.int32 for ids in found)


@pytest.mark.parametrize("name", NAMES)
def test_half_of_a_surrogate_pair_is_named_by_its_place(name: str) -> None:
    tokenizer = Tokenizer(codec_of(name))
    with pytest.raises(TokenizerError, match=r"^text 1 "):
        tokenizer.encode_batch(["a b c", "a b \ud800", "a b d"])
    assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("name", NAMES)
def test_threads(name: str) -> None:
    """They share what is known of neighbours."""
    tokenizer = Tokenizer(PIPELINES[name]())
    lists = [shared_texts(random.Random(seed), TEXT_MARKERS) for seed in range(24)]
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(tokenizer.encode_batch, lists)]
    for texts, ids in zip(lists, found, strict=True):
        assert [each.tolist() for each in ids] == codec_of(name).encode(texts)


def test_what_is_known_of_neighbours_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from radixrt.text import cuts as cuts_module

    monkeypatch.setattr(cuts_module, "_MAX_KNOWN", 10)
    cuts: Any = codec_of("llama 3").cuts()
    for seed in range(5):
        for text in shared_texts(random.Random(seed)):
            cuts.last(text, 0, len(text))
            assert len(cuts._known) <= 10
