"""Keywords of JSON schemas that an engine would leave out without a word: these are refused here.

A keyword that nobody has defined is a note, as JSON Schema has it, and so are `title`, `default` and the like.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Those that llguidance 1.9.1 knows nothing of: of draft 3, of OpenAPI, and of a proposal. It names others itself.
_UNKNOWN_TO_LLGUIDANCE = ("disallow", "divisibleBy", "extends", "propertyDependencies")

# What a schema holds other schemas in.
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = (
    *(
        "items",
        "additionalItems",
        "additionalProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
    ),
    *("unevaluatedItems", "unevaluatedProperties"),
)

# What xgrammar 0.2.8 was seen to enforce, by the type of the value; it ignores or misreads others.
_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
}
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "uri-reference", "json-pointer")
# Every keyword of a draft that says something of values.
_ASSERTIONS = {
    *(name for names in _BY_TYPE.values() for name in names),
    *(*_LISTS, *_SINGLE, "patternProperties", "dependentSchemas", "dependentRequired", "dependencies"),
    *("type", "enum", "const", "multipleOf", "uniqueItems", "minContains", "maxContains", "nullable"),
    *("$ref", "$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", *_UNKNOWN_TO_LLGUIDANCE),
}
_ESCAPE_OR_CLASS = re.compile(r"\\(.)|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_UNREAD_ESCAPES = "bBpPkAzZGQ123456789"
_MISREAD = re.compile(r"\(\?(?!:)|(?<!^)\^|\$(?!$)")


def llguidance_refusal(schema: Any) -> str | None:
    """Why a schema must not go to llguidance, or None."""
    for place, one in _schemas(schema):
        for key in _UNKNOWN_TO_LLGUIDANCE:
            if key in one:
                return f"{place} has {key!r}, which would be ignored"
        if _counts_repeated_keys(one):
            return f"{place} has a 'minProperties' that a repeated key would reach"
        if one.get("nullable") is True:
            return f'{place} has \'nullable\', which would be ignored: give "type": [..., "null"]'
    return None


def xgrammar_refusal(schema: Any) -> str | None:
    """Why a schema must not go to xgrammar, or None."""
    for place, one in _schemas(schema):
        if why := _misread(one):
            return f"{place} has {why}"
    return None


def misread_pattern(pattern: str) -> str | None:
    """What xgrammar would leave out of a regular expression, or None."""
    for escape in _ESCAPE_OR_CLASS.finditer(pattern):
        if escape[1] is not None and escape[1] in _UNREAD_ESCAPES:
            return escape[0]
    found = _MISREAD.search(_ESCAPE_OR_CLASS.sub("x", pattern))
    return None if found is None else found[0]


def _misread(one: Mapping[str, Any]) -> str | None:
    """What xgrammar would misread in one schema, or None."""
    given = {key for key in one if key in _ASSERTIONS}
    for whole in ("$ref", "enum", "const", "anyOf"):  # beside which it reads nothing else
        if whole in given:
            more = given - {whole} - ({"type"} if whole in ("enum", "const") and _fits(one) else set())
            return f"{min(more)!r} beside {whole!r}, which would be ignored" if more else None
    kind = one.get("type")
    if kind is None and given:
        return f"{min(given)!r} without a type, which would be ignored"
    allowed = {
        name for each in ([kind] if isinstance(kind, str) else kind or ()) for name in _BY_TYPE.get(each, ())
    }
    if more := given - allowed - {"type"}:
        return f"{min(more)!r}, which would be ignored or misread"
    if _counts_repeated_keys(one) and one.get("additionalProperties", False) is not False:
        return "a 'minProperties' that a repeated key would reach"
    texts = given & {"pattern", "format", "minLength", "maxLength"}
    if len(texts) > 1 and texts & {"pattern", "format"}:
        return f"{' and '.join(map(repr, sorted(texts)))}, of which one would be ignored"
    if "format" in given and one["format"] not in _FORMATS:
        return f"the format {one['format']!r}, which would be ignored"
    if isinstance(pattern := one.get("pattern"), str) and (what := misread_pattern(pattern)):
        return f"{what!r} in a pattern, which would be misread"
    return None


def _counts_repeated_keys(one: Mapping[str, Any]) -> bool:
    """Whether more keys are wanted than are named: engines do not see that one is repeated."""
    least, required = one.get("minProperties"), one.get("required", ())
    return isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0)


def _fits(one: Mapping[str, Any]) -> bool:
    """Whether all values of `enum` or `const` have the type beside them."""
    kinds = one.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    values = one["enum"] if "enum" in one else [one["const"]]
    return isinstance(kinds, list) and all(any(_is(value, kind) for kind in kinds) for value in values)


def _is(value: object, kind: object) -> bool:
    python = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if isinstance(kind, str) and kind in python:
        return isinstance(value, python[kind])
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (kind == "number" or (kind == "integer" and isinstance(value, int)))


def _schemas(schema: Any, place: str = "the schema") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and all that it holds, each with its place."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, value in schema.items():
        here = f"{'' if place == 'the schema' else place}/{key}"
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            for number, one in enumerate(value if isinstance(value, list) else ()):
                yield from _schemas(one, f"{here}/{number}")
        elif key in _MAPS or key == "dependencies":
            for name, one in value.items() if isinstance(value, Mapping) else ():
                yield from _schemas(one, f"{here}/{name}")
        elif key in _SINGLE:
            yield from _schemas(value, here)
