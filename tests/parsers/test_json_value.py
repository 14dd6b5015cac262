"""JSON made valid, beside Python's own reader of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.checks import refuse_constant
from radixrt.parsers.json_value import MOST_DEEP, json_value, whole_json
from radixrt.parsers.source import Source

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NEAR_JSON = st.text(st.sampled_from("{}[]\",:\\u0019d-+.eE truefalsn'\n\x01\x85aé"), max_size=30)


def read(text: str, size: int, *, is_open: bool = False) -> tuple[str, str, bool | None]:
    """What is taken of a text, in pieces of this size, what is told of it, and whether the value is whole; None:
    more may come (`is_open`).
    """
    source, parts = Source(), []
    steps = json_value(source)
    starts = [*range(0, len(text), size)]
    try:
        for start in starts:
            source.add(text[start : start + size])
            while (part := next(steps)) is not None:
                parts.append(part)
        source.ended = not is_open
        while (part := next(steps)) is not None:
            parts.append(part)
        assert is_open
        is_whole = None
    except StopIteration as end:
        is_whole = end.value
    return "".join(part.raw for part in parts), "".join(part.text for part in parts), is_whole


@given(st.dictionaries(st.text(), VALUES), st.sampled_from((None, 2)), st.booleans(), st.integers(1, 9))
def test_what_is_json_stays_as_it_is(value: dict[str, Any], indent: int | None, ascii_: bool, size: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    assert read(text + " }x", size) == (text, text, True)


@given(st.dictionaries(st.text(), VALUES), st.floats(0, 1), st.integers(1, 9))
def test_what_is_cut_is_completed(value: dict[str, Any], share: float, size: int) -> None:
    text = json.dumps(value)
    cut = int(share * len(text))
    raw, told, is_whole = read(text[: max(1, cut)], size)
    assert (raw, is_whole) == (text[: max(1, cut)], cut == len(text))
    json.loads(told)
    assert read(text[: max(1, cut)], 99) == (raw, told, is_whole)
    assert told.startswith(read(text[: max(1, cut)], size, is_open=True)[1])


@given(NEAR_JSON, st.integers(1, 9))
def test_what_is_told_is_json(rest: str, size: int) -> None:
    text = "{" + rest
    raw, told, is_whole = read(text, size)
    assert text.startswith(raw)
    json.loads(told, parse_constant=refuse_constant)
    assert is_whole in (True, False)
    assert read(text, 99) == (raw, told, is_whole)
    try:
        value, end = json.JSONDecoder(parse_constant=refuse_constant).raw_decode(text)
    except ValueError:
        return
    assert (raw, is_whole) == (text[:end], True)
    assert "\\" in text or json.loads(told) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": "\n\t\r\x00\x1f"}', r'{"a": "\n\t\r\u0000\u001f"}'),
        ('{"a\nb": 1}', r'{"a\nb": 1}'),
        (r'{"a": "\d\x \q"}', r'{"a": "\\d\\x \\q"}'),
        (r'{"a": "\u12g4"}', r'{"a": "\\u12g4"}'),
        (r'{"a": "it\'s"}', '{"a": "it\'s"}'),
        (
            r'{"a": "\ud83d\ude00 \ud83d \ude00 \ud83d\u0041"}',
            r'{"a": "\ud83d\ude00 \\ud83d \\ude00 \\ud83d\u0041"}',
        ),
        ('{"a": 01}', '{"a": "01"}'),
        ('{"a": [1e999, -1e999, NaN, -Infinity, 1e5]}', '{"a": ["1e999", "-1e999", "NaN", "-Infinity", 1e5]}'),
        (f'{{"a": {"9" * 310}}}', None),
        ('{"a": tru}', '{"a": "tru"}'),
        ('{"a": [True, False, None]}', '{"a": [true, false, null]}'),
        ("{a: Oslo}", '{"a": "Oslo"}'),
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": [1, ], "b": 2 , }', '{"a": [1], "b": 2 }'),
        ('{"a": [1}', '{"a": [1]}'),
        ('{"a": [{"b": 1]}', '{"a": [{"b": 1}]}'),
        ('{"a": }', '{"a": null}'),
        ('{"a"}', '{"a": null}'),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{\xa0"a":\x0b1\u2028}', '{ "a": 1 }'),
    ],
)
def test_what_models_do(text: str, told: str | None) -> None:
    for size in (1, 2, 99):
        assert read(text + "x", size) == (text, told or text.replace("9" * 310, f'"{"9" * 310}"'), True)


@pytest.mark.parametrize(
    ("text", "taken", "told"),
    [
        ('{"a": 1]', '{"a": 1', '{"a": 1}'),
        ('{"a" 1}', '{"a" ', '{"a" : null}'),
        ("{'a': 1}", "{", "{}"),
        ('{"a": 1 2}', '{"a": 1 ', '{"a": 1 }'),
        ('{"a": <', '{"a": ', '{"a": null}'),
        ('{"a": ["say "hi" there"]}', '{"a": ["say "', '{"a": ["say "]}'),
        ('{"a": 1,, "b": 2}', '{"a": 1,', '{"a": 1}'),
    ],
)
def test_what_is_no_json(text: str, taken: str, told: str) -> None:
    for size in (1, 2, 99):
        assert read(text, size) == (taken, told, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": "\\', r'{"a": "\\"}'),
        ('{"a": "\\u00', r'{"a": "\\u00"}'),
        ('{"a": "\\ud83d', r'{"a": "\\ud83d"}'),
        ('{"a', "{}"),
        ('{"a": ', "{}"),
        ('{"a": 1, "b\\', '{"a": 1}'),
        ('{"a": 1, b', '{"a": 1}'),
        ('{"a": {"b": [1, ', '{"a": {"b": [1]}}'),
        ('{"a": 1,', '{"a": 1}'),
        ('{"a": tr', '{"a": true}'),
        ('{"a": -', '{"a": -0}'),
        ('{"a": 1.', '{"a": 1.0}'),
        ('{"a": 1e', '{"a": 1e0}'),
        ('{"a": [[{"b": "c', '{"a": [[{"b": "c"}]]}'),
    ],
)
def test_what_the_end_leaves_open(text: str, told: str) -> None:
    for size in (1, 2, 99):
        assert read(text, size) == (text, told, False)


def test_depth() -> None:
    """Beyond what others read it is no value."""
    deep = "[" * (MOST_DEEP - 1)
    assert read(f'{{"a": {deep}1', 7)[1:] == (f'{{"a": {deep}1{"]" * (MOST_DEEP - 1)}}}', False)
    raw, told, _ = read(f'{{"a": {deep}[1', 7)
    assert (raw, told) == (f'{{"a": {deep}', f'{{"a": {deep}{"]" * (MOST_DEEP - 1)}}}')
    read('{"a": ' + "[" * 50_000, 1000)


@pytest.mark.parametrize(
    ("text", "told"),
    [("[1, 2", "[1, 2]"), ('{"a": "b\nc"} ', '{"a": "b\\nc"}'), ("[1] 2", ""), ("[<", ""), ("", "null")],
)
def test_whole_values(text: str, told: str) -> None:
    assert whole_json(text) == told
