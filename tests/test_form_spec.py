"""How a form is asked for: what is taken, what is refused, and how others spell it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixrt import ParameterError, SamplingParams
from radixrt.form_spec import MAX_FORM_LENGTH, MAX_SCHEMA_DEPTH, FormSpec
from radixrt.frontend.openai import CHAT, sampling_values
from radixrt.frontend.sampling_aliases import sampling_params_from_dict

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", 1.5, None]}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["é",1.5,null]}}}'


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_each_kind() -> None:
    by_dict = SamplingParams(json_schema=SCHEMA)
    assert by_dict == SamplingParams(json_schema=json.dumps(SCHEMA, indent=2))
    assert by_dict.json_schema == TEXT
    assert by_dict.form == FormSpec("json_schema", TEXT)
    assert hash(by_dict) == hash(replace(by_dict))
    assert SamplingParams(json_object=True).form == FormSpec("json_schema", '{"type":"object"}')
    assert SamplingParams(regex=r"\d+", form_engine="xgrammar").form == FormSpec("regex", r"\d+", "xgrammar")
    assert SamplingParams(grammar='start: "a"').form == FormSpec("grammar", 'start: "a"')
    assert SamplingParams(choice=["yes", "no"]).choice == ("yes", "no")
    assert SamplingParams(choice=["yes", "no"]).form == FormSpec("choice", '["yes", "no"]')
    assert SamplingParams().form is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json_schema": "{"}, "json_schema is not JSON: "),
        ({"json_schema": "[]"}, r"json_schema is \[\]; it must be a JSON object"),
        ({"json_schema": '{"a": 1, "a": 2}'}, "json_schema is not JSON: key 'a' appears twice"),
        ({"json_schema": '{"minimum": NaN}'}, "json_schema is not JSON: NaN is not a JSON number"),
        ({"json_schema": {"minimum": float("inf")}}, "json_schema is not JSON"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema is not JSON: set is not a JSON type"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema holds half of a surrogate pair"),
        ({"json_schema": 5}, "json_schema is 5; it must be a JSON schema, a dict or JSON text, a pydantic model"),
        ({"json_schema": int}, "json_schema is <class 'int'>"),
        ({"json_schema": nested(MAX_SCHEMA_DEPTH + 1)}, "json_schema nests more than 100 deep"),
        ({"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "json_schema nests more than 100 deep"),
        ({"json_schema": {"const": "x" * 10_000_000}}, "json_schema has 10,000,012 characters; at most 1,048,576"),
        ({"json_schema": "x" * 10_000_000}, "json_schema has 10,000,000 characters"),
        ({"regex": ""}, "regex is ''; it must be a string that is not empty"),
        ({"regex": 5}, "regex is 5"),
        ({"regex": "x" * (MAX_FORM_LENGTH + 1)}, "regex has 1,048,577 characters"),
        ({"regex": "\udc00"}, "regex holds half of a surrogate pair"),
        ({"grammar": b"start: x"}, "grammar is b'start: x'"),
        ({"choice": []}, r"choice is \[\]; it must be a list of strings, at least one"),
        ({"choice": "yes"}, "choice is 'yes'"),
        ({"choice": np.array(["a", "b"])}, r"choice is array\(\['a', 'b'\]"),
        ({"choice": ["a", ""]}, "choice holds ''; it must be a string that is not empty"),
        ({"choice": ["a", 1]}, "choice holds 1"),
        ({"choice": ["a", "b", "a"]}, "choice holds 'a' twice"),
        ({"json_object": 1}, "json_object is 1; it must be True or False"),
        ({"form_engine": "outlines"}, "form_engine is 'outlines'; it must be 'auto', 'llguidance', 'xgrammar'"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice are given; an answer has one form"),
        ({"json_schema": {}, "json_object": True}, "json_schema and json_object are given"),
        ({"regex": "a", "guided_regex": "a"}, "regex and guided_regex are the same parameter"),
        ({"response_format": "json"}, "response_format is 'json'; it must be an object with a type"),
        ({"response_format": {"type": "json_schema"}}, "response_format is .*; it must be "),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}, "has 'x'; it may"),
        ({"response_format": {"type": "structural_tag"}}, "response_format is"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs has 'structural_tag', which is not",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "json_schema and regex are given"),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "structured_outputs and regex are the same"),
        ({"structured_outputs": {1: "a"}}, "structured_outputs is {1: 'a'}; it must be a dict, or vLLM's object"),
        (
            {"response_format": {1: 2, "a": 3}},
            "response_format is {1: 2, 'a': 3}; it must be an object with a type",
        ),
        ({"structured_outputs": "{}"}, "structured_outputs is '{}'; it must be a dict, or vLLM's object"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    for make in (lambda: SamplingParams(**given), lambda: sampling_params_from_dict(given)):
        with pytest.raises(ParameterError, match=message) as error:
            make()
        assert len(str(error.value)) < 400


def test_a_deep_schema_is_taken() -> None:
    assert SamplingParams(json_schema=nested(MAX_SCHEMA_DEPTH)).form is not None


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": "root ::= x"}, "grammar", "root ::= x"),
        ({"guided_json_object": True}, "json_object", True),
        ({"ebnf": "root ::= x"}, "grammar", "root ::= x"),
        ({"json_schema": TEXT}, "json_schema", TEXT),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA,}}},
         "json_schema", TEXT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": SimpleNamespace(json=None, regex="a+", choice=None, disable_fallback=False)},
         "regex", "a+"),
        ({"guided_decoding": SimpleNamespace(choice=["a"], _backend=None)}, "choice", ("a",)),
    ],
)  # fmt: skip
def test_spellings_of_others(given: dict[str, Any], field: str, value: object) -> None:
    expected = SamplingParams(**{field: value})
    assert getattr(expected, field) == value
    assert SamplingParams(**given) == expected
    assert sampling_params_from_dict(given) == expected
    assert SamplingParams(**sampling_values(CHAT, given)) == expected


def test_a_form_takes_the_place_of_the_defaults() -> None:
    defaults = SamplingParams(regex="a+", max_new_tokens=9)
    assert sampling_params_from_dict({"temperature": 0.0}, defaults).regex == "a+"
    own = sampling_params_from_dict({"choice": ["b"]}, defaults)
    assert own == SamplingParams(choice=("b",), max_new_tokens=9)
    assert sampling_params_from_dict({"response_format": {"type": "text"}}, defaults).form is None


@dataclass
class Person:
    name: str
    age: int


def test_a_dataclass_and_a_model_give_their_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    assert SamplingParams(json_schema=Model).json_schema == TEXT
    monkeypatch.setitem(__import__("sys").modules, "pydantic", None)
    with pytest.raises(ParameterError, match="is the dataclass Person, whose schema pydantic makes: pip install"):
        SamplingParams(json_schema=Person)


@pytest.mark.skipif(importlib.util.find_spec("pydantic") is None, reason="pydantic is not installed")
def test_pydantic_makes_the_schema_of_a_dataclass() -> None:
    from pydantic import BaseModel, create_model

    model: type[BaseModel] = create_model("Person", name=str, age=int)
    for given in (Person, model):
        schema = json.loads(SamplingParams(json_schema=given).json_schema or "")
        assert schema["properties"]["age"]["type"] == "integer"
        assert schema["required"] == ["name", "age"]
