"""Arguments that are no JSON object, as a template sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.text import said_arguments
from radixrt.text.said_arguments import SaidArguments, object_of

OBJECTS: list[tuple[str, dict[str, Any]]] = [
    ('{"city": "Os', {"city": "Os"}),
    ('{"city": "Os\\', {"city": "Os"}),
    ('{"city": "Os\\\\', {"city": "Os\\"}),
    ('{"city": "\\u00e', {"city": ""}),
    ('{"city": "a\nb', {"city": "a\nb"}),
    ('{"city": ', {"city": ""}),
    ('{"city"', {"city": ""}),
    ('{"ci', {}),
    ('{"a": "b", "a', {"a": "b"}),
    ('{"a": "b", c', {"a": "b"}),
    ('{"a": "\\ud83d', {"a": "\ufffd"}),
    ('{"a": "\\ud83d\\ude00', {"a": "😀"}),
    ("{", {}),
    ('{"a": 1,', {"a": 1}),
    ('{"a": tr', {"a": "tr"}),
    ('{"a": -', {"a": "-"}),
    ('{"a": [1, {"b": "c', {"a": [1, {"b": "c"}]}),
    ('{"a": {"b"', {"a": {"b": ""}}),
    ("null", {}),
    ("[1, 2]", {"arguments": "[1, 2]"}),
    ('"Oslo"', {"arguments": '"Oslo"'}),
    ("Oslo", {"arguments": "Oslo"}),
    ("{a: 1}", {"a": 1}),
    ("{a b}", {"arguments": "{a b}"}),
    ('{"a": 1} x', {"arguments": '{"a": 1} x'}),
    ('{"a": 1]', {"arguments": '{"a": 1]'}),
    ("}", {"arguments": "}"}),
    ("[" * 100_000, {"arguments": "[" * 100_000}),
]


@pytest.mark.parametrize(("text", "expected"), OBJECTS, ids=[text[:20] for text, _ in OBJECTS])
def test_names_and_values(text: str, expected: dict[str, Any]) -> None:
    assert object_of(text) == expected


def test_it_is_a_text_and_a_mapping() -> None:
    said = SaidArguments('{"city": "Os')
    assert isinstance(said, Mapping)
    assert (str(said), "x" + said, f"{said}") == ('{"city": "Os', 'x{"city": "Os', '{"city": "Os')
    assert (dict(said.items()), list(said), list(said.values()), len(said)) == (
        {"city": "Os"},
        ["city"],
        ["Os"],
        1,
    )
    assert (said["city"], said.get("city"), said.get("a", 3), said[1:-1]) == ("Os", "Os", 3, '"city": "O')


def test_a_text_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template asks for each value by its name."""
    parsed: list[str] = []

    def noted(text: str) -> dict[str, Any]:
        parsed.append(text)
        return object_of(text)

    monkeypatch.setattr(said_arguments, "object_of", noted)
    said = SaidArguments('{"a": 1, "b": "c')
    assert [said[name] for name in said] == [1, "c"]
    assert (said.get("a"), len(said), json.loads(json.dumps(said))) == (1, 2, str(said))
    assert len(parsed) == 1


TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), st.data())
def test_wherever_an_object_is_cut(value: dict[str, Any], data: st.DataObject) -> None:
    """What came before the cut is there: names as they were, and all values but the last one."""
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    found = object_of(text[: data.draw(st.integers(1, len(text)))])
    *whole, last = found.items() if found else [("", None)]
    assert all(value[name] == known for name, known in whole)
    assert not found or last[0] in value
