"""Answers of the built-in model in their forms, end to end."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from radixrt import FinishReason, Runtime

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("llguidance", "jsonschema")),
    reason="llguidance or jsonschema is not installed: pip install 'radixrt[test]'",
)
ASK = "Mira likes Oslo. Tarek counts 374. Ines paints blue.\nQ: Mira likes?\nA:"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["city", "counts"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": "[A-Z][a-z]{2,5}(, [0-9]{2})?"},
    {"choice": ["Oslo", "Rome", "Oslo or Rome"]},
    {"grammar": 'root ::= "x" [0-9]+ "y"'},
    {},
]


@pytest.fixture(scope="module")
def runtime(device: Any) -> Iterator[Runtime]:
    with Runtime(device=device, max_total_tokens=20_000) as runtime:
        yield runtime


def check(form: dict[str, Any], text: str) -> None:
    import jsonschema

    if "json_schema" in form:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif "choice" in form:
        assert text in form["choice"]
    elif form:
        assert re.fullmatch(form.get("regex", "x[0-9]+y"), text)


def test_the_likeliest_choice(runtime: Runtime) -> None:
    free = runtime.generate(ASK, {"temperature": 0, "max_new_tokens": 8})
    for form in FORMS[1:3]:
        output = runtime.generate(ASK, {"temperature": 0, **form})
        assert output.text == free.text.strip() == "Oslo"
        assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"repetition_penalty": 1.5, "logprobs": 2}], ids=str)
def test_whatever_is_drawn_has_its_form(runtime: Runtime, more: dict[str, Any]) -> None:
    """Side by side, several answers each."""
    params = [{"temperature": 1.8, "n": 3, "seed": 5, "max_new_tokens": 200, **more, **form} for form in FORMS]
    outputs = runtime.generate([ASK] * len(FORMS), params)
    ended = 0
    for form, output in zip(FORMS, outputs, strict=True):
        for answer in output.outputs:
            if answer.finish_reason is FinishReason.STOP:
                check(form, answer.text)
                ended += bool(form)
            else:
                assert answer.finish_reason is FinishReason.LENGTH
                assert len(answer.token_ids) == 200
    assert ended >= 9


def test_a_stream_in_a_form(runtime: Runtime) -> None:
    chunks = list(runtime.stream(ASK, {"temperature": 1.8, "seed": 3, "max_new_tokens": 200, **FORMS[0]}))
    text = "".join(chunk.text for chunk in chunks)
    check(FORMS[0], text)
    assert chunks[-1].output is not None
    assert chunks[-1].output.text == text


def test_a_cut_answer_begins_in_its_form(runtime: Runtime) -> None:
    output = runtime.generate(ASK, {"temperature": 0, "max_new_tokens": 3, **FORMS[0]})
    assert output.finish_reason is FinishReason.LENGTH
    assert output.text.startswith("{")
