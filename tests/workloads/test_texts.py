"""Lists as texts: the lengths of the lists of ids, and what their prompts share."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from radixrt.bench.catalogue import LISTS, SCALES
from radixrt.builtin import MODEL_PATH
from radixrt.errors import RadixrtError
from radixrt.text.codec import JsonCodec
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from radixrt.workloads import lists, token_statistics
from radixrt.workloads.lists import WorkloadPrompt
from radixrt.workloads.statistics import common_prefix
from radixrt.workloads.texts import as_texts, words

built_in = cache(lambda: load_tokenizer(MODEL_PATH))


@cache
def of_whole_words(lead: tuple[int, ...] = (), *, blanks: bool = False) -> Tokenizer:
    """A token a word, with others before a text, and one for each blank if they count."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate((" ", *words()))}, unk_token=" "))
    backend.pre_tokenizer = (
        pre_tokenizers.Split(" ", "isolated") if blanks else pre_tokenizers.WhitespaceSplit()
    )
    return Tokenizer(JsonCodec(backend), lead=lead)


def shared(one: WorkloadPrompt, other: WorkloadPrompt) -> int:
    return common_prefix(one.prompt_ids.tobytes(), other.prompt_ids.tobytes())


# Few tokens: prompts branch often, end inside others, and are the same.
PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(0, 9))
def test_texts_share_what_tokens_share(drawn: list[list[int]], seed: int) -> None:
    prompts = [WorkloadPrompt(np.array(ids, np.int32), new_tokens) for new_tokens, ids in enumerate(drawn, 1)]
    found = as_texts(prompts, of_whole_words(), seed)
    assert [one.max_new_tokens for one in found] == [one.max_new_tokens for one in prompts]
    for (one, text), (other, other_text) in combinations(zip(prompts, found, strict=True), 2):
        assert shared(text, other_text) == shared(one, other)
        assert (text.text == other_text.text) == np.array_equal(one.prompt_ids, other.prompt_ids)
    for one, text in zip(prompts, found, strict=True):
        assert text.text is not None
        assert len(text.prompt_ids) == len(one.prompt_ids) == len(text.text.split())


def test_tokens_before_a_text_count() -> None:
    prompts = lists.unshared(requests=3, prompt_len=(5, 9))
    found = as_texts(prompts, of_whole_words((7, 7)))
    assert [len(one.prompt_ids) for one in found] == [len(one.prompt_ids) for one in prompts]
    assert [one.prompt_ids[:2].tolist() for one in found] == [[7, 7]] * 3


def test_no_blank_is_before_a_text() -> None:
    prompts = lists.unshared(requests=2, prompt_len=(7, 7))  # four words and three blanks
    found = as_texts(prompts, of_whole_words(blanks=True))
    assert [len(one.prompt_ids) for one in found] == [7, 7]


def test_many_nodes_below_one_begin_with_words_that_differ() -> None:
    prompts = [WorkloadPrompt(np.array([0, i, 0], np.int32), 1) for i in range(400)]
    found = as_texts(prompts, of_whole_words())
    assert len({int(one.prompt_ids[1]) for one in found}) == 400


@pytest.mark.parametrize("name", LISTS)
def test_lists_in_a_vocabulary_of_pieces_of_words(name: str) -> None:
    prompts = lists.LISTS[name](**SCALES["cpu"].sizes[name])
    found = as_texts(prompts, built_in(), 1)
    for one, text in zip(prompts, found, strict=True):
        assert text.text is not None
        assert np.array_equal(built_in().encode(text.text), text.prompt_ids)
        assert len(text.prompt_ids) == pytest.approx(len(one.prompt_ids), rel=0.02)
    wanted, got = (token_statistics([one.prompt_ids for one in each]) for each in (prompts, found))
    # Words that differ may begin with the same pieces.
    assert got.distinct_tokens == pytest.approx(wanted.distinct_tokens, rel=0.05)
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].prompt_ids.tobytes())
    for i, other in pairwise(order):
        assert shared(found[i], found[other]) >= shared(prompts[i], prompts[other])


def test_seeds_give_other_texts() -> None:
    prompts = lists.unshared(requests=2, prompt_len=(20, 20))
    texts = {one.text for seed in (0, 0, 1) for one in as_texts(prompts, built_in(), seed)}
    assert len(texts) == 4


def test_texts_that_cannot_be_as_long() -> None:
    prompts = lists.unshared(requests=2, prompt_len=(1, 1))  # BOS and a word are more
    with pytest.raises(RadixrtError, match="has 4 tokens, and 2 as ids, which is not within 2%"):
        as_texts(prompts, built_in())


def test_a_tokenizer_without_words() -> None:
    backend = Backend(models.WordLevel({"?": 0}, unk_token="?"))  # all of a text is one unknown token
    with pytest.raises(RadixrtError, match="knows no English words"):
        as_texts(lists.alone(), Tokenizer(JsonCodec(backend)))


def test_words() -> None:
    assert 500 < len(words()) == len(set(words())) < 2000
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words())
