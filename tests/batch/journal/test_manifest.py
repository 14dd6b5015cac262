"""What a run is of, and what differs."""

from __future__ import annotations

from typing import Any

import pytest

import radixrt
from radixrt.batch.journal.manifest import CUTS, ENDS, Manifest, differences
from tests.support.simulated_batch import manifest

LONG = "x" * 100


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"num_records": 21}, "num_records is 20 there and 21 here"),
        ({"radixrt": "9.9"}, f'radixrt is "{radixrt.__version__}" there and "9.9" here'),
        ({"input": {"sha256": "ab" * 32, "bytes": 7}}, "input.bytes is 1234 there and 7 here"),
        (
            {"weights": {"name": "tiny", "fingerprint": [1, 3]}},
            "weights.fingerprint is [1, 2] there and [1, 3] here",
        ),
        ({"weights": {"fingerprint": [1, 2]}}, 'weights.name is "tiny" there and not given here'),
        ({"tokenizer": {}}, "tokenizer is not given there and {} here"),
        (
            {"parameters": {"temperature": 0.7, "max_new_tokens": 8}},
            "parameters.temperature is 0.5 there and 0.7 here",
        ),
        (
            {"parameters": {"temperature": 0.5, "max_new_tokens": 8, "stop": ["\n"]}},
            'parameters.stop is not given there and ["\\n"] here',
        ),
        ({"settings": {"kv": {"dtype": "fp8"}}}, 'settings.kv.dtype is not given there and "fp8" here'),
        (
            {"parameters": {"temperature": True, "max_new_tokens": 8}},
            "parameters.temperature is 0.5 there and true",
        ),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], phrase: str) -> None:
    num_records = change.pop("num_records", 20)
    found = differences(manifest(20), manifest(num_records, **change))
    assert any(each.startswith(phrase) for each in found), found
    assert len(found) <= 2
    assert differences(manifest(num_records, **change), manifest(num_records, **change)) == []


def test_every_field_is_compared() -> None:
    others: dict[str, Any] = {"num_records": 3, "radixrt": "0"}
    for name in Manifest.__dataclass_fields__:
        values = {
            "num_records": 20,
            **{each: {"a": 1} for each in Manifest.__dataclass_fields__ if each != "num_records"},
        }
        values["radixrt"] = "1"
        changed = {**values, name: others.get(name, {"a": 2})}
        (phrase,) = differences(Manifest(**values), Manifest(**changed))
        assert phrase.startswith(name)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (0, -0.0, True),
        (1, True, False),
        (0, False, False),
        (0, None, False),
        ("1", 1, False),
        (2**63, 2**63 + 1, False),
        (2**63, float(2**63), True),
        ((1, 2), [1, 2], True),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True),
        ("not given", None, False),
        ({}, [], False),
        ("é", "\u00e9", True),
        ("\ud800", "\ud800", True),
    ],
)
def test_equal_is_what_json_has_as_equal(one: Any, other: Any, same: bool) -> None:
    found = differences(manifest(1, settings={"x": one}), manifest(1, settings={"x": other}))
    assert (found == []) == same


@pytest.mark.parametrize(
    ("one", "other", "phrase"),
    [
        (LONG, "y" + LONG, f'is "{"x" * 59}... there and "y{"x" * 58}... here'),
        (LONG + "a", LONG + "b", f'is ...{"x" * 20}a" there and ...{"x" * 20}b" here'),
        (
            LONG + "a" + LONG,
            LONG + "b" + LONG,
            f"is ...{'x' * 20}a{'x' * 39}... there and ...{'x' * 20}b{'x' * 39}... here",
        ),
        (LONG, LONG + "z", f'is ...{"x" * 20}" there and ...{"x" * 20}z" here'),
    ],
)
def test_long_values_are_shortened_to_where_they_differ(one: str, other: str, phrase: str) -> None:
    (found,) = differences(manifest(1, settings={"x": one}), manifest(1, settings={"x": other}))
    assert found == f"settings.x {phrase}"


def test_as_json_and_back() -> None:
    given = manifest(3, settings={"text": "a\n\tb\ud800\u2028é", "n": [1.5, None, {"a": True}]})
    text = given.to_json()
    assert not {b"\n"[0], b"\t"[0]} & set(text)
    assert differences(Manifest.from_json(text), given) == []
    assert Manifest.from_json(text).to_json() == text


def test_what_json_cannot_say_is_refused() -> None:
    for value in (float("nan"), float("inf"), b"bytes", {1, 2}):
        with pytest.raises((ValueError, TypeError)):
            manifest(1, settings={"x": value}).to_json()


@pytest.mark.parametrize(
    "text", [b"", b"7", b"[1]", b"{}", b'{"num_records": 1}', b'{"a": 1}', b"\xff", b"[" * 10**5]
)
def test_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Manifest.from_json(text)


def test_runs_from_before_a_setting_was_kept_go_on() -> None:
    older = manifest(1, settings={"x": 1})
    for name in (CUTS, ENDS):
        none, some = (manifest(1, settings={"x": 1, name: value}) for value in (None, "a"))
        assert not differences(older, some)
        assert differences(none, some) == [f'settings.{name} is null there and "a" here']
        assert differences(none, older)
