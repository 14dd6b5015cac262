"""Types of arguments behind references, alternatives and lists of values."""

from __future__ import annotations

from typing import Any

import pytest

from radixrt.parsers.argument_types import ANY, ArgumentTypes

DEFS = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "a/b~c d": {"const": "x"},
    "loop": {"$ref": "#/$defs/loop"},
    "tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
    "twice": {"allOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/text"}]},
    **{f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 2} for place in range(40)},
    **{f"chain{place}": {"$ref": f"#/$defs/chain{place + 1}"} for place in range(5000)},
    "d40": {"type": "string"},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null"]}, "integer null"),
        ({"type": "number"}, "integer number"),
        ({"$ref": "#/$defs/text"}, "string"),
        ({"$ref": "#/%24defs/a~1b~0c%20d"}, "string"),
        ({"$ref": "#/$defs/twice"}, "string"),
        ({"$ref": "#/$defs/d0"}, "string"),
        ({"$ref": "#/properties/other/items/0"}, "boolean"),
        ({"enum": ["10", "20"]}, "string"),
        ({"enum": [1, None, "a"]}, "integer number null string"),
        ({"const": True}, "boolean"),
        ({"const": 1.5}, "number"),
        ({"const": 10**400}, "integer number"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/number"}]}, "string integer number"),
        ({"oneOf": [{"const": "a"}, {"type": "null"}]}, "string null"),
        ({"allOf": [{"$ref": "#/$defs/text"}, {"description": "a"}]}, "string"),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "array"]}]}, "string"),
        ({"type": "string", "nullable": True}, "string null"),
        ({"type": ["string", "integer"], "enum": ["1"]}, "string"),
        ({"type": "string", "allOf": 5, "anyOf": {}}, "string"),
    ],
)
def test_types(schema: Any, types: str) -> None:
    properties = {"a": schema, "other": {"items": [{"type": "boolean"}]}}
    for root in (
        {"properties": properties, "$defs": DEFS},
        {"$ref": "#/$defs/all", "$defs": {**DEFS, "all": {"properties": properties}}, "properties": properties},
        {
            "allOf": [{}, {"anyOf": [{"properties": properties}]}],
            "$defs": DEFS,
            "properties": {"other": properties["other"]},
        },
    ):
        assert ArgumentTypes(root).of("a") == {*types.split()}


@pytest.mark.parametrize(
    "schema",
    [
        *({}, True, False, 5, None, {"type": 5}, {"type": [["string"]]}, {"type": "text"}, {"enum": 1}),
        *({"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/none"}, {"$ref": "other#/a"}, {"$ref": 1}, {"$ref": "#"}),
        *({"$ref": "#/$defs/chain0"}, {"$ref": "#/properties/a"}, {"$ref": "#/$defs/tree"}, {"anyOf": 5}),
        *({"allOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {}]}),
    ],
)
def test_what_tells_nothing(schema: Any) -> None:
    """All types are possible: without a bound, by a cycle, behind what is not there, or by a contradiction."""
    assert ArgumentTypes({"properties": {"a": schema}, "$defs": DEFS}).of("a") == ANY


def test_names() -> None:
    types = ArgumentTypes({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"type": "string"}}}}})
    assert types.properties.keys() == {"a"}
    assert types.is_plain_text("a")
    assert not types.is_plain_text("b")
    assert types.of("b") == ANY
    assert ArgumentTypes({"additionalProperties": {"type": "null"}}).of("b") == {"null"}
    assert ArgumentTypes({"properties": 5}).properties == {}
