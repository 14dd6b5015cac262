"""Keywords of JSON schemas that an engine would leave out without a word: these are refused here.

A keyword that nobody has defined is a note, as JSON Schema has it, and so are `title`, `default` and the like.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from radixrt.checks import short

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
    "string": ("pattern", "format"),  # with lengths it leaves control characters unescaped
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
}
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "uri-reference")
# Every keyword of a draft that says something of values.
_ASSERTIONS = {
    *(name for names in _BY_TYPE.values() for name in names),
    *("minLength", "maxLength"),
    *(*_LISTS, *_SINGLE, "patternProperties", "dependentSchemas", "dependentRequired", "dependencies"),
    *("type", "enum", "const", "multipleOf", "uniqueItems", "minContains", "maxContains", "nullable"),
    *("$ref", "$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", *_UNKNOWN_TO_LLGUIDANCE),
}
_ESCAPE_OR_CLASS = re.compile(r"\\(.)|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
# Escapes that mean the same to xgrammar, but `a` in patterns of JSON schemas, and what it takes for ASCII alone.
_ESCAPE = re.compile(r"\\((?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})(?![0-9a-fA-F])|.|$)", re.DOTALL)
_READ_ESCAPE = re.compile(r"[xu][0-9a-fA-F]+|[dDwWsSnrtfva]|[^a-zA-Z0-9<>]", re.DOTALL)
_CLASS = re.compile(r"\[(\^?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
_SETS = re.compile(r"(?<!\\)(?:\\\\)*(?:\[|&&|--|~~)")
_ENDLESS = re.compile(r"-\\[dDsSwW]|\\[dDsSwW]-.", re.DOTALL)  # ranges of a class
_MISREAD = re.compile(r"\(\?(?!:)|(?<!^)\^|\$(?!$)|\[")
# What may stand for a character that JSON has to escape, which xgrammar does not.
_UNESCAPED = re.compile(r'["\x00-\x1F]|\\[\\xucntrfva0]')
_UPPER = "maximum", "exclusiveMaximum"
_INT64 = range(-(2**63), 2**63)
_EXACT = 2**53  # whole numbers below it are exact as floats, and those beside them
_MOST_EXACT_DECIMAL, _DECIMALS = 10**6, 5  # of bounds that xgrammar, which writes six decimals, enforces


def llguidance_refusal(schema: Any) -> str | None:
    """Why a schema must not go to llguidance, or None."""
    for place, one in _schemas(schema):
        for key in _UNKNOWN_TO_LLGUIDANCE:
            if key in one:
                return f"{place} has {key!r}, which would be ignored"
        if _counts_repeated_keys(one):
            return f"{place} has a 'minProperties' that a repeated key would reach"
        if (number := next((n for n in _fixed_numbers(one) if not _is_exact(n)), None)) is not None:
            return f"{place} has {short(str(number))}, which would be rounded"
        if (bound := _rounded_bound(one)) is not None:
            return f"{place} has a {bound!r} that would be rounded beyond it"
        if one.get("exclusiveMinimum") == 0 and any(0 < bound < 1 for bound in _bounds(one, _UPPER)):
            return f"{place} has an 'exclusiveMinimum' of 0 with a bound below 1, which would take 0"
        if one.get("nullable") is True:
            return f'{place} has \'nullable\', which would be ignored: give "type": [..., "null"]'
    return None


def for_llguidance(schema: Any) -> Any:
    """A copy for llguidance, whose patterns' negated classes leave out NUL: into a class that holds all control
    characters it lets any that is escaped, such as a quotation mark that the class leaves out. And an escaped
    bracket is the bracket, as in ECMAScript, and no border of a word, as in Rust.
    """
    own = copy.deepcopy(schema)
    for _, one in list(_schemas(own)):
        assert isinstance(one, dict)
        if isinstance(pattern := one.get("pattern"), str):
            one["pattern"] = _of_llguidance(pattern)
        if isinstance(named := one.get("patternProperties"), dict):
            one["patternProperties"] = {_of_llguidance(pattern): inner for pattern, inner in named.items()}
    return own


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A copy for a place such as "#/properties/a" of another schema; its references lead where they did."""
    own = copy.deepcopy(dict(schema))
    for _, one in [] if "$id" in own else list(_schemas(own)):
        assert isinstance(one, dict)
        if isinstance(reference := one.get("$ref"), str) and re.match("#(/|$)", reference):
            one["$ref"] = place + reference[1:]
    return own


def _of_llguidance(pattern: str) -> str:
    def left_out(found: re.Match[str]) -> str:
        is_negated = found[0].startswith("[^") and found[0] != "[^]"  # which goes on: the bracket is of the class
        return f"[^\\x00-\\x00{found[0][2:]}" if is_negated else found[0]

    return _ESCAPE_OR_CLASS.sub(
        left_out, re.sub(r"\\(?:([<>])|.)", lambda one: one[1] or one[0], pattern, flags=re.DOTALL)
    )


def xgrammar_refusal(schema: Any) -> str | None:
    """Why a schema must not go to xgrammar, or None."""
    for place, one in _schemas(schema):
        if why := _misread(one):
            return f"{place} has {why}"
    return None


def misread_pattern(pattern: str, *, is_of_schema: bool = False) -> str | None:
    """What xgrammar would leave out of a regular expression, or read otherwise; None if nothing.

    In schemas classes such as `\\w` are of ASCII, as xgrammar has them; else of Unicode, where it would take more.
    """
    unread = "a" if is_of_schema else "SDW"
    for escape in _ESCAPE.finditer(pattern):
        is_read = _READ_ESCAPE.fullmatch(escape[1]) or (is_of_schema and escape[1] in ("<", ">"))
        if not is_read or escape[1] in unread:
            return escape[0]
    for found in (one for one in _ESCAPE_OR_CLASS.finditer(pattern) if one[1] is None):
        inner = _CLASS.fullmatch(found[0])
        assert inner is not None
        negated = inner[1] and not is_of_schema and re.search(r"\\[sdw]", inner[2])
        is_set = not is_of_schema and _SETS.search(inner[2])
        if not inner[2] or inner[2].startswith("\\^") or negated or is_set or _ENDLESS.search(inner[2]):
            return found[0]
    rest = _MISREAD.search(_ESCAPE_OR_CLASS.sub("x", pattern))
    return None if rest is None else rest[0]


def without_new_lines(pattern: str) -> str:
    """The same regular expression for xgrammar, whose `.` takes a new line, too."""
    return re.sub(_ESCAPE_OR_CLASS.pattern + r"|\.", _of_one_line, pattern, flags=re.DOTALL)


def _of_one_line(found: re.Match[str]) -> str:
    return r"[^\n]" if found[0] == "." else found[0]


def _misread(one: Mapping[str, Any]) -> str | None:
    """What xgrammar would misread in one schema, or None."""
    given = {key for key in one if key in _ASSERTIONS}
    if "$ref" in one and not re.match(r"#(/|$)", str(one["$ref"])):
        return f"the reference {short(repr(one['$ref']))}, which would be ignored"
    if any(number not in _INT64 for number in _fixed_numbers(one)):
        return "a whole number of more than 64 bits, which would be rounded"
    if one.get("anyOf") == []:
        return "an 'anyOf' without schemas"
    if (kinds := _kinds(one)) is None:
        return "a 'type' that is neither a name nor a list of names"
    if not isinstance(one.get("enum", []), list):
        return "an 'enum' that is no list"
    for whole in ("$ref", "enum", "const", "anyOf"):  # beside which it reads nothing else
        if whole in given:
            more = given - {whole} - ({"type"} if whole in ("enum", "const") and _fits(one) else set())
            return f"{min(more)!r} beside {whole!r}, which would be ignored" if more else None
    if not kinds and given:
        return f"{min(given)!r} without a type, which would be ignored"
    allowed = {name for kind in kinds for name in _BY_TYPE.get(kind, ())}
    if more := given - allowed - {"type"}:
        return f"{min(more)!r}, which would be ignored or misread"
    if "number" in kinds:
        if (key := _rounded_bound(one)) is not None:
            return f"a {key!r} that would be rounded beyond it"
        for bound in _bounds(one, _BY_TYPE["number"]):
            if bound % 1 and (abs(bound) >= _MOST_EXACT_DECIMAL or round(bound, _DECIMALS) != bound):
                return f"the bound {bound!r}, which would be rounded"
    required, named = one.get("required"), one.get("properties", {})
    for key in required if isinstance(required, list) else ():
        if isinstance(key, str) and isinstance(named, Mapping) and key not in named:
            return f"{short(repr(key))} in 'required' alone, which would be ignored"
    if _counts_repeated_keys(one) and one.get("additionalProperties", False) is not False:
        return "a 'minProperties' that a repeated key would reach"
    if {"pattern", "format"} <= given:
        return "'format' and 'pattern', of which one would be ignored"
    if "format" in given and one["format"] not in _FORMATS:
        return f"the format {one['format']!r}, which would be ignored"
    if isinstance(pattern := one.get("pattern"), str):
        if what := misread_pattern(pattern, is_of_schema=True):
            return f"{what!r} in a pattern, which would be misread"
        if found := _UNESCAPED.search(pattern):
            return f"{found[0]!r} in a pattern, which would not be escaped"
    return None


def _fixed_numbers(one: Mapping[str, Any]) -> Iterator[int]:
    """Whole numbers in `const` and `enum`."""
    todo = [one.get("const"), one.get("enum")]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def _is_exact(number: int) -> bool:
    """Whether a float has this value."""
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


def _bounds(one: Mapping[str, Any], names: Iterable[str]) -> Iterator[int | float]:
    """Those of these names that are numbers."""
    values = map(one.get, names)
    return (value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool))


def _rounded_bound(one: Mapping[str, Any]) -> str | None:
    """A bound that takes in what it should not once it is a float, and of 64 bits; or None."""
    for key in _BY_TYPE["number"]:
        bound = one.get(key)
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or abs(bound) < _EXACT:
            continue
        try:
            used = min(max(int(float(bound)), _INT64[0]), _INT64[-1])
        except OverflowError:
            return key
        if not ((key == "minimum" and used >= bound) or (key == "maximum" and used <= bound)):
            return key
    return None


def _counts_repeated_keys(one: Mapping[str, Any]) -> bool:
    """Whether more keys are wanted than are named: engines do not see that one is repeated."""
    least, required = one.get("minProperties"), one.get("required", ())
    return isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0)


def _fits(one: Mapping[str, Any]) -> bool:
    """Whether all values of `enum` or `const` have the type beside them."""
    values = one["enum"] if "enum" in one else [one["const"]]
    return all(any(_is(value, kind) for kind in _kinds(one) or ()) for value in values)


def _kinds(one: Mapping[str, Any]) -> list[str] | None:
    """The names of types of a schema; None if they are no names."""
    kinds = one.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return kinds if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds) else None


def _is(value: object, kind: str) -> bool:
    python = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if kind in python:
        return isinstance(value, python[kind])
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (kind == "number" or (kind == "integer" and isinstance(value, int)))


def _schemas(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema, all that it holds and what it refers to, each once and with its place."""
    known: set[int] = set()
    todo = [("the schema", schema)]  # the next one last: references may go on for as long as a schema is
    while todo:
        place, one = todo.pop()
        if not isinstance(one, Mapping) or id(one) in known:
            continue
        known.add(id(one))
        yield place, one
        todo += reversed([*_within(schema, one, "" if place == "the schema" else place)])


def _within(schema: Any, one: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """What one schema holds and refers to, in its order."""
    for key, value in one.items():
        here = f"{place}/{key}"
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            for number, inner in enumerate(value if isinstance(value, list) else ()):
                yield f"{here}/{number}", inner
        elif key in _MAPS or key == "dependencies":
            for name, inner in value.items() if isinstance(value, Mapping) else ():
                yield f"{here}/{name}", inner
        elif key in _SINGLE:
            yield here, value
        elif key == "$ref" and isinstance(value, str) and value.startswith("#/"):
            yield value, _pointed(schema, value)


def _pointed(value: Any, reference: str) -> Any:
    """What a JSON pointer leads to; None if nothing."""
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value
