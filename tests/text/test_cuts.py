"""Texts are cut where the ids of the parts are those of the whole: beside encoding each text whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from radixrt.text import codec as codec_module
from radixrt.text import cuts as cuts_module
from radixrt.text import json_cuts as json_module
from radixrt.text import split_pattern
from radixrt.text.codec import Codec
from radixrt.text.cuts import Cuts, NoCuts
from radixrt.text.text_tree import TextTree
from tests.support.evaluation_texts import chinese, english, evaluation
from tests.support.pipelines import PIPELINES, TEXT_MARKERS, WITHOUT_CUTS
from tests.support.shared_texts import shared_texts, text
from tests.support.small_tokenizers import KINDS, small_tokenizer
from tests.support.vocabularies import MARKERS, VOCABULARIES, vocabulary

# Lists of texts for each tokenizer; a list takes 5 ms.
FEW, MANY = 4, 1_000  # of small ones, of which there are many
REAL_FEW, REAL_MANY = 40, 20_000
SLOW = {"mistral v1, of transformers", "gguf, qwen 3.6", "gguf, deepseek v4"}  # seconds until they are read
LIKE_OTHERS = {"gguf, mistral v1", "mistral v2", "mistral v7", "tekken 240718", "qwen", "mistral v3, legacy"}


@cache
def pipeline(name: str) -> Codec:
    return PIPELINES[name]()


def ids_of(codec: Codec, cuts: Cuts, texts: Sequence[str], given: list[str] | None = None) -> list[list[int]]:
    """The ids of the texts by their tree; what is encoded for that is added to `given`."""

    def encode(stretches: list[str]) -> list[list[int]]:
        if given is not None:
            given.extend(stretches)
        return codec.encode(stretches)

    tree = TextTree(texts, cuts)
    found = [ids.tolist() for block in tree.encoded(encode, ()) for ids in block]
    by_number = dict(zip(tree.order, found, strict=True))
    return [by_number[number] for number in range(len(texts))]


def wrong_places(codec: Codec, cuts: Cuts, one: str) -> list[int]:
    """The places where a text may be cut, and has other ids then."""
    after = 2 if cuts.drops_blank else 1
    places = [
        place for place in range(1, len(one) - after + 1) if cuts.last(one, place - 1, place + after) == place
    ]
    if not places:
        return []
    whole, *parts = codec.encode([one, *(one[:p] for p in places), *(one[p + after - 1 :] for p in places)])
    half = len(places)
    return [p for p, left, right in zip(places, parts[:half], parts[half:], strict=True) if left + right != whole]


def differences(codec: Codec, count: int, markers: Sequence[str], seed: object) -> str:
    """The first text of `count` lists that has other ids than by itself; "": none."""
    cuts, rng = codec.cuts(), random.Random(repr(seed))
    for _ in range(count):
        texts = shared_texts(rng, markers)
        for one, found, expected in zip(texts, ids_of(codec, cuts, texts), codec.encode(texts), strict=True):
            if found != expected:
                return f"in a list: {one!r} has {found}, not {expected}"
        one = text(rng, markers)
        if wrong := wrong_places(codec, cuts, one):
            return f"cut: {one[: wrong[0]]!r} | {one[wrong[0] :]!r}"
    return ""


def share_given(codec: Codec, texts: Sequence[str]) -> float:
    given: list[str] = []
    ids_of(codec, codec.cuts(), texts, given)
    return sum(map(len, given)) / sum(map(len, texts))


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name: str) -> None:
    assert not differences(pipeline(name), FEW, TEXT_MARKERS, name)


@pytest.mark.long
@pytest.mark.parametrize("name", PIPELINES)
def test_many_lists_of_pipelines(name: str) -> None:
    assert not differences(pipeline(name), MANY, TEXT_MARKERS, (name, "many"))


@pytest.mark.parametrize("kind", KINDS)
def test_small_tokenizers(kind: str) -> None:
    codec = small_tokenizer(kind).codec
    try:
        codec.cuts()
    except NoCuts:
        assert "bare" in kind or kind == "sentencepiece", "they are no byte-pair encodings"
        return
    assert not differences(codec, FEW, ("<s>", "</s>", "<tool>", "<unk>"), kind)


@pytest.mark.long_unless(kept=lambda given: given["name"] not in SLOW | LIKE_OTHERS)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies(name: str) -> None:
    """What texts share is encoded once: an evaluation's heads, also in Chinese, which has no blanks."""
    codec = vocabulary(name)
    assert not differences(codec, REAL_FEW, MARKERS, name)
    assert share_given(codec, evaluation(english)) < 1 / 10
    assert codec.cuts().drops_blank or share_given(codec, evaluation(chinese)) < 1 / 3


@pytest.mark.long
@pytest.mark.parametrize("name", VOCABULARIES)
def test_many_lists_of_vocabularies(name: str) -> None:
    assert not differences(vocabulary(name), REAL_MANY, MARKERS, (name, "many"))


@pytest.mark.parametrize("name", WITHOUT_CUTS)
def test_what_looks_at_the_whole_text(name: str) -> None:
    with pytest.raises(NoCuts):
        WITHOUT_CUTS[name]().cuts()


# Where texts must not be cut: the pipeline, what comes before, and what after.
NOT_TO_CUT = (
    ("nfkc, every letter", "か", "ﾞ"),  # a mark of half width, which is a letter
    ("nfkc, every letter", "ᄀ", "ㅏ"),  # parts of a syllable
    ("nfc, every letter", "가", "\u11a8"),
    ("nfc, every letter", "1", "e\u0301"),  # normalised it is the added token 1é
    ("nfc, every letter", "a", "\u212b\u0301"),  # becomes another letter by what follows
    ("nfd, gpt-2", "a", "\u0301\u0323"),
    ("metaspace never, split, words without runs", "x", "\u3000y"),  # normalised it is the added token "x y"
    ("digits", "<t>", " a"),
    ("digits", "<t> ", "\n"),
    ("digits", "[w]", "a"),
    ("digits", "x", " y"),
    ("digits", "a", "\nb"),
    ("gpt-2", "a\n", "b"),
    ("gpt-2", "  ", " b"),
    ("gpt-2", "'", "s"),
    ("llama 3", "'", "\u017f"),  # s without case
    ("gpt-2, a blank before texts", "a", "."),
    ("split by lines", "a", "\na"),
    ("replace, gpt-2", "a", "b"),
    ("replace and nfc, gpt-2", "a", "q"),
    ("a blank is put, and stays", "a", " b"),
    ("sentencepiece, extra blanks removed", "<tool> ", " x"),  # no blank is put after it
    ("sentencepiece, legacy", "<tool>", " x"),
    ("llama 2", "a", "b"),
    ("llama 2", "a", "  b"),
    ("unigram always", "a", " b"),
)


@pytest.mark.parametrize(("name", "before", "after"), NOT_TO_CUT)
def test_where_texts_are_not_cut(name: str, before: str, after: str) -> None:
    cuts = pipeline(name).cuts()
    whole = before + after
    place, more = len(before), 2 if cuts.drops_blank else 1
    assert cuts.last(whole, place - 1, place + more) == place - 1


# Some of which these are the only reason that the ids stay the same.
@pytest.mark.parametrize(
    ("name", "before", "after"), [NOT_TO_CUT[i] for i in (0, 1, 2, 3, 6, 7, 8, 9, 16, 20, 21, 22)]
)
def test_why_they_are_not_cut(name: str, before: str, after: str) -> None:
    codec = pipeline(name)
    dropped = after[1:] if codec.cuts().drops_blank else after
    left, right, whole = codec.encode([before, dropped, before + after])
    assert left + right != whole


TO_CUT = (
    ("gpt-2", "a", " b"),
    ("llama 3", "c", "\n"),
    ("llama 3", "日", "。"),
    ("nfc, llama 3", "ü", " b"),
    ("nfc, llama 3", "한", " 국"),
    ("cl100k", "a", " b"),
    ("o200k", "a", " b"),
    ("split as joyai-llm", "中", "a"),
    ("gpt-2, a blank before texts", "a", " b"),
    ("llama 2", "a", " b"),
    ("llama 2, markers", ".", " b"),
    ("gemma", "a", " b"),
    ("gemma", "a", "  b"),
    ("gemma", "x", "?"),
    ("sentencepiece", "c", " b"),
    ("sentencepiece, user-defined", "c", " b"),
    ("metaspace first, split, words", "c", " b"),
    ("unigram always, split", "a", " b"),
    ("wordpiece", "a", "."),
)


@pytest.mark.parametrize(("name", "before", "after"), TO_CUT)
def test_where_texts_are_cut(name: str, before: str, after: str) -> None:
    assert pipeline(name).cuts().last(before + after + "c", 0, len(before + after)) == len(before)


def _with(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Added tokens are changed before cuts are made of them."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        own = Cuts.__init__

        def changed(self: Cuts, letters: Any, steps: Any, added: Any, **more: Any) -> None:
            own(self, letters, steps, change(added), **more)

        patch.setattr(Cuts, "__init__", changed)

    return mutate


def _too_late(patch: pytest.MonkeyPatch) -> None:
    own = Cuts.last

    def last(self: Cuts, one: str, begin: int, end: int) -> int:
        found = own(self, one, begin, end)
        return found + 1 if begin < found < end else found

    patch.setattr(Cuts, "last", last)


def _keeps_blank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TextTree, "_stretch", lambda self, text, begin, end: text[begin:end])


def _drops_nothing(patch: pytest.MonkeyPatch) -> None:
    own = Cuts.__init__
    patch.setattr(Cuts, "__init__", lambda self, *given, drops_blank=False: own(self, *given))


def _without_looks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(split_pattern._Look, "is_alike", lambda self, letter: True)


def _set(module: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, value)


def _unchanged(*_: Any) -> Any:
    return lambda before, after: (before, after)


MUTANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a cut is a character too late": ("llama 3", _too_late),
    "added tokens are ignored": ("digits", _with(lambda added: ())),
    "rstrip is ignored": (
        "a marker takes blanks",
        _with(lambda added: [replace(one, rstrip=False) for one in added]),
    ),
    "lstrip is ignored": (
        "split as trillion",
        _with(lambda added: [replace(one, lstrip=False, rstrip=False) for one in added]),
    ),
    "single_word is ignored": (
        "every letter",
        _with(lambda added: [replace(one, single_word=False) for one in added]),
    ),
    "tokens are looked for as they are written": (
        "metaspace never, split, words without runs",
        _with(lambda added: [one for one in added if "▁" not in one.content]),
    ),
    "nfc looks at no mark": ("nfc, every letter", _set(json_module, "_form", _unchanged)),
    "nfkc takes letters for no marks": ("nfkc, every letter", _set(json_module, "_joins", lambda letter: False)),
    "letters are replaced by themselves": ("replace, llama 3", _set(json_module, "_replaced", _unchanged)),
    "no blank is dropped": ("llama 2", _drops_nothing),
    "the blank is encoded, too": ("sentencepiece", _keeps_blank),
    "what follows the blank is ignored": (
        "metaspace always, split, words",
        _set(Cuts, "_begins_a_word", lambda self, letter: True),
    ),
    "blanks before one are ignored": (
        "sentencepiece, extra blanks removed",
        _set(cuts_module, "_is_blank", lambda letter: False),
    ),
    "conditions are ignored": ("gpt-2", _without_looks),
    "matches do not hold neighbours": (
        "llama 3",
        _set(split_pattern.SplitPattern, "is_local", lambda self, before, after: True),
    ),
    "pieces hold no blanks": (
        "llama 2, blanks inside",
        _set(json_module, "divided_by_vocabulary", lambda pieces: cuts_module.divided_by_vocabulary(["▁"])),
    ),
    "pieces of sentencepiece hold no blanks": (
        "sentencepiece, bare, no blank before texts",
        _set(
            codec_module, "divided_by_vocabulary", lambda pieces: lambda before, after: cuts_module.Border.DIVIDED
        ),
    ),
    "a blank is put, whatever a text begins with": (
        "gpt-2, a blank before texts",
        _set(json_module, "_before_blanks", lambda own: own),
    ),
    "bytes are divided": (
        "punctuation together",
        _set(json_module, "_crossed", lambda before, after: cuts_module.Border.DIVIDED),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_die(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutate = MUTANTS[mutant]
    codec = pipeline(name)
    mutate(monkeypatch)
    assert differences(codec, 400, TEXT_MARKERS, mutant)


# A Unigram's pieces that are not divided, and tokens of one blank where one is put before texts.
WHOLE = {
    "unigram always",
    "unigram first",
    "unigram never",
    "llama 2, a blank is a marker",
    "a blank is put, and stays",
}


@pytest.mark.parametrize("name", PIPELINES)
def test_what_texts_share_is_encoded_once_by_pipelines(name: str) -> None:
    share = share_given(pipeline(name), evaluation(english, heads=2, questions=5))
    assert share == 1 if name in WHOLE else share < 1 / 6
