"""Stop strings, and the one object that makes a request's text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixrt.sampling_params import SamplingParams
from radixrt.text.builder import Detokenizer, TextBuilder, find_stop, unfinished_stop
from radixrt.text.tokenizer import Tokenizer
from tests.support.piece_codec import PieceCodec
from tests.support.small_tokenizers import small_tokenizer

ALPHABET = "abc😀é\ufffd"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@cache
def letters() -> Tokenizer:
    """Id i spells PIECES[i]."""
    return Tokenizer(PieceCodec(PIECES))


# letters, pieces of stops, and characters in parts
PIECES = [bytes([i]) for i in b"abc xyz\n"] + [bytes(pair) for pair in (b"ab", b"bc", b"ca", b"END", b"D.", b"EN")]
PIECES += [
    "😀".encode()[:2],
    "😀".encode()[2:],
    "é".encode(),
    b"\xff",
    b"",
    "a😀".encode()[:3],
    "😀b".encode()[2:],
]


def ids_of(*parts: str | bytes) -> list[int]:
    return [PIECES.index(part if isinstance(part, bytes) else part.encode()) for part in parts]


def builder_of(tokenizer: Tokenizer, **params: Any) -> TextBuilder:
    return TextBuilder(tokenizer, SamplingParams(max_new_tokens=10**6, **params))


def run(builder: TextBuilder, ids: list[int]) -> tuple[str, list[str], int]:
    """The final text, the deltas, and how many tokens were taken."""
    deltas, taken = [], 0
    for token_id in ids:
        taken += 1
        stopped = builder.push(token_id)
        deltas.append(builder.delta())
        if stopped:
            break
    text = builder.finish()
    deltas.append(builder.delta())
    assert "".join(deltas) == text == builder.finish()
    assert builder.delta() == ""
    return text, deltas, taken


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, int] | None:
    """The definition, letter by letter."""
    for end in range(1, len(text) + 1):
        if found := [string for string in stop if text[:end].endswith(string)]:
            return end - max(map(len, found)), end
    return None


@given(text=st.text(ALPHABET, max_size=12), stop=STOPS, after=st.integers(0, 5))
def test_the_stop_that_is_complete_first(text: str, stop: tuple[str, ...], after: int) -> None:
    assert find_stop(stop, text) == first_stop(text, stop)
    found = find_stop(stop, text, after)
    ends = [end for end in range(after + 1, len(text) + 1) if text[:end].endswith(stop)]
    assert (found and found[1]) == (min(ends) if ends else None)


@given(text=st.text(ALPHABET, max_size=12), stop=STOPS)
def test_what_could_begin_a_stop(text: str, stop: tuple[str, ...]) -> None:
    lengths = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stop)]
    assert unfinished_stop(stop, text) == max(lengths, default=0)


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "taken"),
    [
        (["a", "END", "x"], ("END",), "a", 2),  # a token of its own
        (["a", "EN", "D.", "x"], ("END",), "a", 3),  # across a border, with text after it
        (["a", "EN", "a", "x"], ("END",), "aENax", 4),  # only its beginning
        (["x", "bc", "y"], ("b",), "x", 2),  # inside a token
        (["ab", "ca", "b"], ("abcd", "bc"), "a", 2),  # overlapping: complete first
        (["ab", "ca", "b"], ("bc", "abc"), "", 2),  # of those the longest
        (["a", "a", "b"], ("aab",), "", 3),
        (["a", "a", "a", "b"], ("aab",), "a", 4),  # its beginning, twice
        (["a", b"\xf0\x9f", b"\x98\x80", "b"], ("😀",), "a", 3),
        ([b"a\xf0\x9f", b"\x98\x80b", "x"], ("😀b",), "a", 2),
        (["a", b"\xff", "b"], ("b",), "a\ufffd", 3),
        (["x", "y"], ("zz", "q"), "xy", 2),
        (["x", "EN"], ("END",), "xEN", 2),  # text held back comes at the end
        (["\n", "\n", "x"], ("\n\n",), "", 2),
    ],
)
def test_text_ends_before_the_stop(
    tokens: list[str | bytes], stop: tuple[str, ...], text: str, taken: int
) -> None:
    builder = builder_of(letters(), stop=stop)
    result, _, count = run(builder, ids_of(*tokens))
    assert (result, count) == (text, taken)
    with_stop = run(builder_of(letters(), stop=stop, include_stop_str=True), ids_of(*tokens))
    assert with_stop[0] == text + (builder.matched or "")
    assert builder.matched is None or builder.matched in stop


@pytest.mark.parametrize(
    ("tokens", "end", "text"),
    [
        (["x", "y"], "z", "xyz"),
        (["x", "EN"], "D.", "xEND."),  # no stop ends in the text of the last token, nor begins before it
        (["x"], "END", "xEND"),
        ([b"\xf0\x9f"], b"\x98\x80b", "😀b"),
        ([], b"\xf0\x9f", "\ufffd"),
    ],
)
def test_the_text_of_the_token_that_ended_it(tokens: list[str | bytes], end: str | bytes, text: str) -> None:
    builder = builder_of(letters(), stop=("END",), include_stop_str=True)
    assert not any(builder.push(token) for token in ids_of(*tokens))
    shown = builder.delta()
    builder.end_with(*ids_of(end))
    assert builder.finish() == text == shown + builder.delta()
    assert builder.matched is None


@settings(max_examples=400)
@example(ids=ids_of("ab", "ca", "b"), stop=("abcab", "bcabc"), include=False, least=0)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    stop=STOPS,
    include=st.booleans(),
    least=st.integers(0, 6),
)
def test_any_text_and_any_stops(ids: list[int], stop: tuple[str, ...], include: bool, least: int) -> None:
    """Against the definition: the shortest list of tokens whose decoding has a stop, and the first stop in it."""
    stop = tuple(string for string in stop if "\ufffd" not in string) or ("a",)
    builder = builder_of(letters(), stop=stop, include_stop_str=include, min_new_tokens=least)
    text, _, taken = run(builder, ids)
    ordinary = 0
    for count in range(1, len(ids) + 1):
        whole = letters().decode(ids[:count])
        if count < least:
            ordinary = len(whole.rstrip("\ufffd"))
            continue
        found = find_stop(stop, whole, ordinary)
        if found is not None:
            assert builder.matched == whole[slice(*found)]
            assert (text, taken) == (whole[: found[1 if include else 0]], count)
            return
    assert builder.matched is None
    assert (text, taken) == (letters().decode(ids), len(ids))


@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=12), stop=STOPS)
def test_no_delta_shows_a_part_of_the_stop(ids: list[int], stop: tuple[str, ...]) -> None:
    """And no more is held back than could be a stop's beginning."""
    builder = builder_of(letters(), stop=stop)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        stopped = builder.push(token_id)
        shown += builder.delta()
        if stopped:
            break
        sure = letters().decode(ids[:count]).rstrip("\ufffd")
        held = unfinished_stop(stop, sure)
        assert len(shown) >= len(sure) - held - 1
    assert builder.finish().startswith(shown)


def test_a_stop_before_min_tokens_is_ordinary_text() -> None:
    def text(*tokens: str, least: int) -> str:
        return run(builder_of(letters(), stop=("END",), min_new_tokens=least), ids_of(*tokens))[0]

    assert text("a", "END", "b", "END", "c", least=2) == "a"
    assert text("a", "END", "b", "END", "c", least=3) == "aENDb"
    assert text("a", "EN", "D.", "c", least=3) == "a"  # begun before, complete with the third
    assert text("a", "EN", "D.", "c", least=4) == "aEND.c"
    assert text("END", least=5) == "END"
    inside = builder_of(letters(), stop=("b", "abcc"), min_new_tokens=2)  # held back with the "a", yet no stop
    assert run(inside, ids_of("ab", "x", "y", "b"))[0] == "abxy"
    overlapping = builder_of(letters(), stop=("aa",), min_new_tokens=3)
    assert run(overlapping, ids_of("a", "a", "a"))[0] == "a"


def test_a_stop_in_byte_fallback_ends_at_once() -> None:
    """A run of bytes is certain only when it has ended; whoever stops there need not wait for that."""
    for kind in ("byte fallback", "bare"):
        tokenizer = small_tokenizer(kind)
        ids = tokenizer.encode("Mira 😃😃 likes", add_special_tokens=False).tolist()
        builder = builder_of(tokenizer, stop=("😃",))
        text, _, taken = run(builder, ids)
        assert text == "Mira "
        assert builder.matched == "😃"
        assert tokenizer.decode(ids[:taken]) == "Mira 😃"


def test_a_long_run_of_bytes_is_searched_when_it_ends() -> None:
    tokenizer = small_tokenizer("byte fallback")
    ids = tokenizer.encode("x" + "😃" * 20 + "ß" + "y", add_special_tokens=False).tolist()
    assert run(builder_of(tokenizer, stop=("ß",)), ids)[0] == "x" + "😃" * 20
    builder = builder_of(tokenizer, stop=("ß",))
    assert run(builder, ids[:-1])[0] == "x" + "😃" * 20  # found by finish
    assert builder.matched == "ß"
    assert run(builder_of(tokenizer, stop=("ß",), min_new_tokens=10**6), ids[:-1])[0].endswith("ß")


def test_special_tokens() -> None:
    tokenizer = small_tokenizer("byte level")
    ids = [*tokenizer.encode("ab").tolist(), 1, *tokenizer.encode("cd").tolist()]
    assert run(builder_of(tokenizer, stop=("bc",)), ids)[0] == "a"
    assert run(builder_of(tokenizer, skip_special_tokens=False), ids)[0] == "ab</s>cd"
    assert run(builder_of(tokenizer, skip_special_tokens=False, stop=("</s>",)), ids)[0] == "ab"


def test_tokens_after_a_stop_are_ignored() -> None:
    builder = builder_of(letters(), stop=("b",))
    assert [builder.push(i) for i in ids_of("a", "b", "c", "c")] == [False, True, True, True]
    assert builder.finish() == builder.delta() == "a"


def test_a_token_that_stops_by_its_id_is_not_pushed() -> None:
    """What its text would complete is no stop then, and what was held back is text."""
    builder = builder_of(letters(), stop=("END",))
    for token_id in ids_of("a", "EN"):
        assert not builder.push(token_id)
    assert builder.delta() == "a"
    assert builder.finish() == "aEN"
    assert builder.delta() == "EN"
    assert builder.matched is None


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bare", "metaspace"])
@given(data=st.data())
def test_deltas_asked_for_now_and_then(kind: str, data: st.DataObject) -> None:
    tokenizer = small_tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=20))
    asked = data.draw(st.sets(st.integers(0, 20)))
    stop = data.draw(st.sampled_from([(), ("e",), ("é", "li"), ("</s>", "\ufffd\ufffd")]))
    builder = builder_of(tokenizer, stop=stop)
    shown = ""
    for place, token_id in enumerate(ids):
        builder.push(token_id)
        if place in asked:
            shown += builder.delta()
    text = builder.finish()
    assert shown + builder.delta() == text
    if stop == ():
        assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bare", "metaspace"])
@given(data=st.data())
def test_tokens_that_come_together(kind: str, data: st.DataObject) -> None:
    """However they are grouped, their texts join to that of all, and none is taken back."""
    tokenizer = small_tokenizer(kind)
    groups = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size), max_size=6), max_size=8))
    made = Detokenizer(tokenizer)
    texts = [made.push(*group) for group in groups]
    assert "".join([*texts, made.finish()]) == tokenizer.decode([token for group in groups for token in group])
