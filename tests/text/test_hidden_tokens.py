"""Stop strings that name special tokens, which the text does not show."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixrt.sampling_params import SamplingParams
from radixrt.text.builder import TextBuilder
from radixrt.text.hidden_tokens import HiddenTokens, named_in, special_texts
from radixrt.text.tokenizer import Tokenizer
from tests.support.piece_codec import PieceCodec
from tests.support.small_tokenizers import KINDS, small_tokenizer
from tests.text.test_builder import first_stop, run

PIECES = ("a", "b", "\n", "ab", "<e>", "<e", ">", "<s>", "")
SPECIAL = {4: "<e>", 7: "<s>"}  # by id


@cache
def letters() -> Tokenizer:
    """Id i spells PIECES[i]."""
    return Tokenizer(PieceCodec([piece.encode() for piece in PIECES], SPECIAL))


def built(ids: list[int], stop: tuple[str, ...], **params: Any) -> tuple[str, int, str | None]:
    """The text, how many tokens were taken, and the stop."""
    hidden = named_in(stop, special_texts(letters()))
    builder = TextBuilder(letters(), SamplingParams(max_new_tokens=1000, stop=stop, **params), hidden)
    text, _, taken = run(builder, ids)
    return text, taken, builder.matched


def ids_of(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (("a", "<e>", "b"), "<e>", ("a", 2, "<e>")),
        (("a", "<e", ">", "b"), "<e>", ("a", 3, "<e>")),  # spelled by ordinary tokens
        (("a", "<e>", "\n", "b"), "<e>\n", ("a", 3, "<e>\n")),
        (("a", "<e>", "b", "<e>", "\n"), "<e>\n", ("ab", 5, "<e>\n")),
        (("a", "\n", "<s>", "b"), "\n<s>", ("a", 3, "\n<s>")),
        (("a", "<e>", "<s>", "b"), "<e><s>", ("a", 3, "<e><s>")),
        (("a", "<s>", "b"), "ab", ("", 3, "ab")),  # across a token that no stop names, as ever
        (("a", "<s>", "b"), "<e>", ("ab", 3, None)),
        (("<e>", "a"), "<e>", ("", 1, "<e>")),
    ],
)
def test_stops_that_name_special_tokens(
    pieces: tuple[str, ...], stop: str, expected: tuple[str, int, str | None]
) -> None:
    assert built(ids_of(*pieces), (stop,)) == expected
    if expected[2] is not None:
        assert built(ids_of(*pieces), (stop,), include_stop_str=True)[0] == expected[0] + stop
        assert built(ids_of(*pieces), (stop,), min_new_tokens=len(pieces) + 1)[2] is None


def test_a_pattern_does_not_see_them() -> None:
    assert built(ids_of("a", "<e>", "b"), ("<e>",), stop_regex=("<e>|b",)) == ("a", 2, "<e>")
    assert built(ids_of("a", "<e>", "b"), (), stop_regex=("<e>|b",)) == ("a", 3, "b")


@settings(max_examples=300)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    stop=st.lists(
        st.lists(st.sampled_from(["a", "b", "\n", "<e>", "<s>", "e"]), min_size=1, max_size=3).map("".join),
        min_size=1,
        max_size=3,
    ).map(tuple),
    include=st.booleans(),
)
@example(ids=ids_of("a", "<e>", "b", "<e>", "\n"), stop=("b<e>\n", "a\n"), include=False)
def test_against_the_definition(ids: list[int], stop: tuple[str, ...], include: bool) -> None:
    """Token by token: the text ends with a stop; or, with the tokens that stops name, with one of these stops."""
    named = {i: text for i, text in SPECIAL.items() if any(text in one for one in stop)}
    naming = tuple(one for one in stop if any(text in one for text in named.values()))
    shown, whole, expected = "", "", None
    for taken, token_id in enumerate(ids, 1):
        own = PIECES[token_id]
        before = len(shown), len(whole)
        shown += "" if token_id in SPECIAL else own
        whole += own if token_id not in SPECIAL or token_id in named else ""
        found = [
            (end - at, text[:first], text[first:end])
            for text, at, stops in ((shown, before[0], stop), (whole, before[1], naming))
            if (hit := first_stop(text, stops)) is not None
            for first, end in [hit]
            if end > at
        ]
        if found:
            expected = taken, {one[2] for one in found}
            break
    text, taken, matched = built(ids, stop, include_stop_str=include)
    if expected is None:
        assert (text, matched) == (shown, None)
    else:
        assert taken == expected[0]
        assert matched in expected[1]
        assert text.endswith(matched) if include else shown.startswith(text)


@given(
    st.text("ab", max_size=6),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([4, 7])), max_size=4).map(sorted),
)
def test_places_and_positions(text: str, found: list[tuple[int, int]]) -> None:
    hidden = HiddenTokens(SPECIAL, ["<e>", "<s>"])
    for position, token_id in found:
        hidden.take(token_id, min(position, len(text)))
    whole = hidden.put_into(text)
    assert whole.replace("<e>", "").replace("<s>", "") == text
    for position in range(len(text) + 1):
        assert hidden.before(hidden.place_of(position)) == position
        assert whole[: hidden.place_of(position)].replace("<e>", "").replace("<s>", "") == text[:position]
    assert hidden.before(len(whole)) == len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_every_kind_of_tokenizer(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    found = special_texts(tokenizer)
    assert found == {
        i: text
        for i in range(tokenizer.vocab_size)
        if (text := tokenizer.decode([i], skip_special_tokens=False)) != tokenizer.decode([i])
    }
    assert kind == "no decoder" or {"<s>", "</s>"} <= {*found.values()}
