"""Regular expressions as stops: found where the text, character by character, first has a match."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixrt.errors import ParameterError
from radixrt.sampling_params import SamplingParams
from radixrt.text.builder import TextBuilder
from radixrt.text.tokenizer import Tokenizer
from tests.support.piece_codec import PieceCodec
from tests.text.test_builder import PIECES, STOPS, builder_of, letters, run

PATTERNS = [
    r"a+b",
    r"\bab\b",
    r"(?m)^b",
    r"b$",
    r"^a",
    r"(?<=a)b",
    r"(?<!a)b",
    r"a(?=b)",
    r"a(?!b)",
    r"[ab]{3}",
    r"(a|b)c\1",
    r"(?i)AB",
    r"é.",
    r"(?s)a.*c",
    r"a|ab",
    r"(?>a|ab)c",
    r"\n{2}",
    r"c(?<!ac)",
    r"b(?!c).b",
    r"(?:(?!ab)\w)+\n",
    r"\((?:[^()]|(?R))*\)",
]
TEXTS = st.text("abc é\n()😀", max_size=14)


def spelled(pieces: list[bytes]) -> Tokenizer:
    """A tokenizer whose id i spells pieces[i], which may be a part of a character."""
    return Tokenizer(PieceCodec(pieces))


def split(text: str, places: set[int]) -> list[bytes]:
    data = text.encode()
    borders = [0, *sorted(place for place in places if place < len(data)), len(data)]
    return [data[start:end] for start, end in pairwise(borders) if end > start]


def first_match(text: str, patterns: tuple[str, ...], stop: tuple[str, ...]) -> tuple[int, int] | None:
    """The definition: the shortest text that has a match or ends in a stop string; of several the longest."""
    for end in range(1, len(text) + 1):
        found = [m.span() for pattern in patterns if (m := regex.search(pattern, text[:end])) is not None]
        found += [(end - len(string), end) for string in stop if text[:end].endswith(string)]
        if found:
            return min(found, key=lambda span: (span[0], -span[1]))
    return None


@settings(max_examples=200)
@example(text="xaab", patterns=("a+b",), stop=(), places=set(range(20)), include=False)
@example(text="abab", patterns=("b(?!c).b", "abab"), stop=("ba",), places={1, 3}, include=True)
@example(text="x(a(b)c)", patterns=(PATTERNS[-1],), stop=(), places={4}, include=False)
@given(
    text=TEXTS,
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3).map(tuple),
    stop=st.lists(st.text("abc\n", min_size=1, max_size=3), max_size=2).map(tuple),
    places=st.sets(st.integers(1, 30)),
    include=st.booleans(),
)
def test_the_borders_of_tokens_do_not_matter(
    text: str, patterns: tuple[str, ...], stop: tuple[str, ...], places: set[int], include: bool
) -> None:
    pieces = split(text, places)
    builder = builder_of(spelled(pieces), stop=stop, stop_regex=patterns, include_stop_str=include)
    result = run(builder, list(range(len(pieces))))[0]  # which also compares the deltas
    found = first_match(text, patterns, stop)
    assert builder.matched == (found and text[slice(*found)])
    assert result == (text if found is None else text[: found[1 if include else 0]])


@settings(max_examples=150)
@given(
    text=st.text("ab -\n", max_size=14),
    patterns=st.lists(
        st.sampled_from([r"\s\bab", r"a\B.", r"(?m)a$.", r"a(?!$)b", r"\w\B\w\B", r"-\b.\b"]),
        min_size=1,
        max_size=2,
    ).map(tuple),
    places=st.sets(st.integers(1, 14)),
    others=st.sets(st.integers(1, 14)),
)
def test_nor_do_they_where_a_pattern_asks_for_what_follows(
    text: str, patterns: tuple[str, ...], places: set[int], others: set[int]
) -> None:
    """Whether a match can have begun is judged as if the text ended there; in all splits alike."""
    results = []
    for own in (places, others):
        pieces = split(text, own)
        builder = builder_of(spelled(pieces), stop_regex=patterns)
        results.append((run(builder, list(range(len(pieces))))[0], builder.matched))
    assert results[0] == results[1]


@settings(max_examples=150)
@example(ids=[0, 0, 0], stop=("aa",), include=False, least=3)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    stop=STOPS,
    include=st.booleans(),
    least=st.integers(0, 6),
)
def test_a_string_as_an_expression_is_as_good_as_the_string(
    ids: list[int], stop: tuple[str, ...], include: bool, least: int
) -> None:
    """With characters in parts, and min_new_tokens."""
    stop = tuple(string for string in stop if "\ufffd" not in string) or ("a",)
    params: dict[str, Any] = {"include_stop_str": include, "min_new_tokens": least}
    strings = builder_of(letters(), stop=stop, **params)
    expressions = builder_of(letters(), stop_regex=tuple(map(re.escape, stop)), **params)
    assert run(expressions, ids) == run(strings, ids)
    assert expressions.matched == strings.matched


def of_text(text: str, patterns: list[str], *, size: int = 1, **params: Any) -> tuple[str, TextBuilder, list[str]]:
    pieces = [text[at : at + size].encode() for at in range(0, len(text), size)]
    builder = builder_of(spelled(pieces), stop_regex=patterns, **params)
    result, deltas, _ = run(builder, list(range(len(pieces))))
    return result, builder, deltas


@pytest.mark.parametrize(
    ("text", "pattern", "result", "matched"),
    [
        ("The answer is 42.", r"\d+", "The answer is ", "4"),  # complete with its first digit
        ("The answer is 42.", r"\d+\.", "The answer is ", "42."),
        ("a\nQ: who?", r"\n(?:Q|User)\s*:", "a", "\nQ:"),
        ("a\nQuestion\nUser  :", r"\n(?:Q|User)\s*:", "a\nQuestion", "\nUser  :"),
        ("forend END.", r"\bEND\b", "forend ", "END"),
        ("END", r"(?<=EN)D", "EN", "D"),
        ("x END y", r"(?<=END)", "x END", ""),  # where it stands, without a text of its own
        ("foodbar", r"foo(?=bar)", "foodbar", None),
        ("a foobar", r"foo(?=bar)", "a ", "foo"),
        ("a STOP", r"(?i)stop", "a ", "STOP"),
        ('{"a": 1}', r'{"a": \d{1}}', "", '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_expressions(text: str, pattern: str, result: str, matched: str | None, size: int) -> None:
    got, builder, _ = of_text(text, [pattern], size=size)
    assert (got, builder.matched) == (result, matched)
    assert of_text(text, [pattern], size=size, include_stop_str=True)[0] == result + (matched or "")


def test_before_min_new_tokens_a_match_is_ordinary_text() -> None:
    assert of_text("xabxab", ["ab"], min_new_tokens=4)[0] == "xabx"
    assert of_text("aaaa", ["aa"], min_new_tokens=3)[0] == "a"  # begun before, complete with the third
    assert of_text("abcabc", ["ab+c?", "c"], min_new_tokens=3)[0] == "ab"
    assert of_text("endxend", ["(?<=end)"], min_new_tokens=4)[0] == "endxend"
    assert of_text("endxendx", ["(?<=end)"], min_new_tokens=8)[0] == "endxendx"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_match_has_as_many_characters_as_a_stop_string_may_have(size: int) -> None:
    """What could begin a longer one is shown: never is more than that held back."""
    pattern, filling = r"(?s)<a>.*</a>", "x" * (1024 - 7)
    text, builder, _ = of_text(f"y<a>{filling}</a>z", [pattern], size=size)
    assert (text, builder.matched) == ("y", f"<a>{filling}</a>")
    longer = f"y<a>{filling}x</a>z"
    text, builder, deltas = of_text(longer, [pattern], size=size)
    assert (text, builder.matched) == (longer, None)
    pieces = list(deltas)
    while len("".join(pieces)) < len(longer):
        pieces.pop()
    endless = "<a>" + "x" * 5000
    shown = 0
    for place, delta in enumerate(of_text(endless, [pattern], size=size)[2][:-1], 1):
        shown += len(delta)
        assert min(size * place, len(endless)) - shown <= 1024


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_was_shown_is_still_seen(size: int) -> None:
    text = "x" * 3000 + "\nEND" + "y" * 3000 + "END\nEND"
    assert of_text(text, ["^END"], size=size)[0] == text
    assert of_text(text, ["(?m)^END"], size=size)[0] == "x" * 3000 + "\n"
    assert of_text(text, [r"\bEND", r"(?<=x\n)END"], size=size)[0] == "x" * 3000 + "\n"
    assert of_text(text, [r"(?<=y{1000})END"], size=size)[0] == text[:-7]
    assert of_text(text, [r"(?<=y{2000})END"], size=size)[0] == text  # further back than it sees


def test_an_expression_that_takes_too_long_ends_the_search_and_not_the_text() -> None:
    text = "\n" + "a" * 60
    pieces = [text[:2].encode(), text[2:].encode()]
    builder = builder_of(spelled(pieces), stop_regex=r"(?m)^(a|aa)+[cd]", stop="y")
    assert not builder.push(0)
    before = time.thread_time()
    with pytest.raises(ParameterError, match=r"stop_regex '.*' takes more than 1 ms a character; write"):
        builder.push(1)
    assert time.thread_time() - before < 5
    assert builder.delta() == "\n"
    assert builder.finish() == text
    assert builder.matched is None


def test_one_search_ends_in_time() -> None:
    """All of its work is there at once, with the last character."""
    builder = builder_of(spelled([b"a", b"z"]), stop_regex="z(?<=[cd](a|aa)+z)")
    for _ in range(40):
        builder.push(0)
    before = time.thread_time()
    with pytest.raises(ParameterError, match="takes more than"):
        builder.push(1)
    assert time.thread_time() - before < 2


def test_slow_searches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them within the time for one, all of them beyond that for the text."""
    now = iter(range(10**6))
    monkeypatch.setattr(time, "thread_time", lambda: next(now) * 0.0015)
    builder = builder_of(spelled([b"x", b"x" * 100]), stop_regex="END")
    for _ in range(150):
        builder.push(0)
    with pytest.raises(ParameterError, match="takes more than"):
        builder.push(1)
    monkeypatch.setattr(time, "thread_time", lambda: next(now) * 0.0009)
    of_text("x" * 1000, ["END"])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"stop_regex holds '\(', which cannot be used: missing \) at position 1"),
        ("a**", "which cannot be used: multiple repeat at position 2"),
        (r"\p{foo}", "which cannot be used: unknown property at position 7"),
        ("(" * 500 + ")" * 500, "which cannot be used: "),
        ("(?R)", "which cannot be used: "),
        (".*", "which matches the empty text: it would end every answer"),
        ("a*", "which matches the empty text"),
        ("$", "which matches the empty text"),
        ("x|", "which matches the empty text"),
        (r"ab\Kc", r"; a text that grows cannot be searched with '\\\\K'"),
        (r"\Gab", "; a text that grows cannot be searched with"),
        (r"(?r)ab", r"with '\(\?r'"),
        (r"(?if:ab)", r"with '\(\?if'"),
        (r"(?V1)(?i)ab", r"with '\(\?V'"),
        (r"a(*SKIP)b", r"with '\(\*S'"),
        (r"(?:ab){i<=1}", r"with '\{i<'"),
        (r"(?:abcd){1<=e<=2}", r"with '\{1<=e<'"),
        ("", "must be a string of 1 to 1024 characters"),
        ("x" * 1025, "must be a string of 1 to 1024 characters"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ParameterError, match=f"^stop_regex holds .*{message}|^{message}"):
        SamplingParams(stop_regex=[pattern])


def test_a_backslash_before_the_letter_is_one() -> None:
    assert of_text(r"a\Kb", [r"\\K"])[0] == "a"


@given(pattern=st.text(r"ab()[]{}*+?|\\.^$:=!<>1,Rimsx-&#P", min_size=1, max_size=12))
@settings(max_examples=150)
def test_any_text_is_taken_or_refused(pattern: str) -> None:
    try:
        params = SamplingParams(stop_regex=pattern)
    except ParameterError:
        return
    assert params.stop_regex == (pattern,)
