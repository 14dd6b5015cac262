"""What types the arguments of a function may have, by the whole of its schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, reduce
from typing import Any
from urllib.parse import unquote

ANY = frozenset({"string", "boolean", "integer", "number", "null", "array", "object"})
_MOST_DEEP = 100  # references and alternatives within one another; below, anything goes


class ArgumentTypes:
    """The arguments of one function.

    References are followed where they are to places of the same schema; others allow anything.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._found: dict[str, frozenset[str]] = {}  # by reference; ANY while one is being followed

    @cached_property
    def properties(self) -> Mapping[str, list[object]]:
        """Their schemas, by name: of an argument that several alternatives have, several."""
        found: dict[str, list[object]] = {}
        for schema in self._parts(self._root, set(), 0):
            own = schema.get("properties")
            for name, one in own.items() if isinstance(own, Mapping) else ():
                found.setdefault(name, []).append(one)
        return found

    def of(self, name: str) -> frozenset[str]:
        """The types that an argument may have, of ANY. A schema that allows none is read as if it allowed all."""
        schemas = self.properties.get(name)
        if schemas is None:
            schemas = [self._root.get("additionalProperties")]
        return _union(self._of(schema, 0) for schema in schemas) or ANY

    def is_plain_text(self, name: str) -> bool:
        """Whether an argument is text whatever it looks like."""
        schemas = self.properties.get(name, ())
        return bool(schemas) and all(map(is_plain_text, schemas))

    def _parts(self, schema: object, followed: set[str], depth: int) -> Iterator[Mapping[str, Any]]:
        """A schema, and those that it is made of."""
        if not isinstance(schema, Mapping) or depth > _MOST_DEEP:
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            yield from self._parts(self._place(reference), followed, depth + 1)
        for key in ("allOf", "anyOf", "oneOf"):
            for part in _listed(schema, key):
                yield from self._parts(part, followed, depth + 1)

    def _of(self, schema: object, depth: int) -> frozenset[str]:
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _MOST_DEEP:
            return ANY
        found = _named(schema)
        if "const" in schema:
            found &= types_of(schema["const"])
        if isinstance(schema.get("enum"), list):
            found &= _union(map(types_of, schema["enum"]))
        if isinstance(reference := schema.get("$ref"), str):
            found &= self._behind(reference, depth)
        for part in _listed(schema, "allOf"):
            found &= self._of(part, depth + 1)
        for key in ("anyOf", "oneOf"):
            if parts := _listed(schema, key):
                found &= _union(self._of(part, depth + 1) for part in parts)
        return found

    def _behind(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._found:
            self._found[reference] = ANY
            self._found[reference] = self._of(self._place(reference), depth + 1)
        return self._found[reference]

    def _place(self, reference: str) -> object:
        """What is at a JSON pointer such as `#/$defs/city`; None: nothing, or it points elsewhere."""
        before, *steps = unquote(reference).split("/")
        place: object = self._root if before == "#" else None
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping):
                place = place.get(step)
            elif isinstance(place, list) and step.isascii() and step.isdigit() and int(step) < len(place):
                place = place[int(step)]
            else:
                return None
        return place


def is_plain_text(schema: object) -> bool:
    """Whether a value of this schema is text whatever it looks like."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def types_of(value: object) -> frozenset[str]:
    """Those of a JSON value: a whole number has two."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        is_whole = isinstance(value, int) or value.is_integer()
        return frozenset({"integer", "number"} if is_whole else {"number"})
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return frozenset({kinds.get(type(value), "null")})


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    """What `type` says."""
    named = schema.get("type")
    names = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)} & ANY
    if not names:
        return ANY
    if "number" in names:
        names.add("integer")
    return frozenset(names | {"null"} if schema.get("nullable") is True else names)


def _listed(schema: Mapping[str, Any], key: str) -> list[object]:
    parts = schema.get(key)
    return parts if isinstance(parts, list) else []


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return reduce(frozenset.union, sets, frozenset())
