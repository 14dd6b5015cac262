"""Where objects end, beside Python's own reader of JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.parsers.json_value import JsonObject

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NEAR_JSON = st.text(st.sampled_from('{}[]",:\\u0019-+.eE truefalsn\n\x01a'), max_size=30)


def read(text: str, size: int) -> tuple[int, JsonObject]:
    found, end = JsonObject(), 0
    for start in range(0, len(text), size):
        end += found.push(text[start : start + size])
    return end, found


@given(st.dictionaries(st.text(), VALUES), st.sampled_from((None, 2)), st.booleans(), st.integers(1, 9))
def test_objects_end_where_they_do(value: dict[str, object], indent: int | None, ascii_: bool, size: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    end, found = read(text + " }x", size)
    assert (end, found.is_done, found.is_broken) == (len(text), True, False)


@given(NEAR_JSON, st.integers(1, 9))
def test_what_is_taken_is_json(rest: str, size: int) -> None:
    """As Python reads it, but for NaN and Infinity."""
    text = "{" + rest
    end, found = read(text, size)
    try:
        _, expected = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert not found.is_done
        # nothing that follows can make JSON of what is broken
        assert not found.is_broken or end < len(text)
    else:
        assert (found.is_done, end) == (True, expected)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"a": 01}', 8),
        ('{"a": tru}', 9),
        ('{"a": 1]', 7),
        ('{"a": [1}', 8),
        ('{"a" 1}', 5),
        ("{'a': 1}", 1),
        ('{"a": "\n"}', 7),
        ('{"a": "\\x"}', 8),
        ('{"a": "\\u12g"}', 11),
        ('{"a": 1,}', 8),
        ('{"a": [1,]}', 9),
        ('{"a": 1 2}', 8),
        ('{"a": <', 6),
        ("[]", 0),
    ],
)
def test_what_is_no_json(text: str, end: int) -> None:
    assert [(read(text, size)[0], read(text, size)[1].is_broken) for size in (1, 2, 99)] == [(end, True)] * 3
