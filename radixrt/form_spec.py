"""The form that an answer is to have, as it is asked for: a JSON schema, a regular expression, a grammar, choices.

Whether an engine can compile it is for `radixrt.forms` to say.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from radixrt.checks import object_of, refuse_constant, short
from radixrt.errors import ParameterError

FormEngine = Literal["auto", "llguidance", "xgrammar"]
FORM_ENGINES: tuple[str, ...] = get_args(FormEngine)
FORM_FIELDS = ("json_schema", "regex", "grammar", "choice", "json_object")  # of SamplingParams
MAX_FORM_LENGTH = 2**20  # characters
MAX_SCHEMA_DEPTH = 100  # of lists and objects

# What vLLM's StructuredOutputsParams, and GuidedDecodingParams before them, call them.
_VLLM_FIELDS = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
_OF_SCHEMA = ("name", "description", "schema", "strict")


@dataclass(frozen=True)
class FormSpec:
    """A form before it is compiled.

    Attributes:
        kind: "json_schema", "regex", "grammar" or "choice".
        text: the schema as JSON, the pattern, the grammar, or the choices as a list in JSON.
        engine: which is to compile it.
    """

    kind: str
    text: str
    engine: FormEngine = "auto"


def schema_text(name: str, value: object) -> str:
    """A JSON schema as JSON text, of an object, its text, a pydantic model or a dataclass. Raises ParameterError.

    The order of keys is kept: properties of an answer come in the order of the schema.
    """
    if isinstance(value, str):
        _check_length(name, value)
        try:
            schema = json.loads(value, parse_constant=refuse_constant, object_pairs_hook=object_of)
        except RecursionError:
            raise ParameterError(f"{name} nests more than {MAX_SCHEMA_DEPTH} deep") from None
        except ValueError as error:
            raise ParameterError(f"{name} is not JSON: {error}") from None
    else:
        schema = value if isinstance(value, Mapping) else _schema_of(name, value)
    if not isinstance(schema, Mapping):
        raise ParameterError(f"{name} is {short(repr(schema))}; it must be a JSON object")
    _check_depth(name, schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_refuse)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{name} is not JSON: {error}") from None
    return _check_text(name, text)


def form_text(name: str, value: object) -> str:
    """The text of a pattern or a grammar. Raises ParameterError."""
    if not isinstance(value, str) or not value:
        raise ParameterError(f"{name} is {short(repr(value))}; it must be a string that is not empty")
    return _check_text(name, value)


def choices(name: str, value: object) -> tuple[str, ...]:
    """Distinct strings, none of them empty; () for no such form. Raises ParameterError."""
    if isinstance(value, tuple) and not value:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise ParameterError(f"{name} is {short(repr(value))}; it must be a list of strings, at least one")
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise ParameterError(f"{name} holds {short(repr(choice))}; it must be a string that is not empty")
    if len(set(value)) < len(value):
        ((twice, _),) = Counter(value).most_common(1)
        raise ParameterError(f"{name} holds {short(repr(twice))} twice")
    _check_text(name, "".join(value))
    return tuple(value)


def form_engine(name: str, value: object) -> str:
    """The name of an engine. Raises ParameterError."""
    if not isinstance(value, str) or value not in FORM_ENGINES:
        raise ParameterError(f"{name} is {value!r}; it must be {', '.join(map(repr, FORM_ENGINES))}")
    return value


def _response_format(name: str, value: object) -> dict[str, Any]:
    """OpenAI's."""
    given = _mapping(name, value, "an object with a type")
    kind, more = given.pop("type", None), sorted(given)
    if kind == "text" and not more:
        return {"json_object": False}
    if kind == "json_object" and not more:
        return {"json_object": True}
    if kind == "json_schema" and more == ["json_schema"]:
        inner = _mapping(f"{name}.json_schema", given["json_schema"], "an object with a schema")
        if unknown := [key for key in inner if key not in _OF_SCHEMA]:
            raise ParameterError(f"{name}.json_schema has {unknown[0]!r}; it may have {', '.join(_OF_SCHEMA)}")
        if "schema" not in inner:
            raise ParameterError(f"{name}.json_schema has no schema")
        return {"json_schema": inner["schema"]}
    raise ParameterError(
        f'{name} is {short(repr(value))}; it must be {{"type": "text"}}, {{"type": "json_object"}} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
    )


def _structured_outputs(name: str, value: object) -> dict[str, Any]:
    """vLLM's, as a dict or as its own object."""
    held = getattr(value, "__dict__", None) if not isinstance(value, (Mapping, str)) else value
    given = _mapping(name, held, "a dict, or vLLM's object")
    given = {key: one for key, one in given.items() if one is not None and one is not False}
    fields = {_VLLM_FIELDS[key]: given.pop(key) for key in list(given) if key in _VLLM_FIELDS}
    if given.pop("json_object", False):
        fields["json_object"] = True
    if given := {key: one for key, one in given.items() if not key.startswith("_")}:
        known = ", ".join((*_VLLM_FIELDS, "json_object"))
        raise ParameterError(f"{name} has {next(iter(given))!r}, which is not supported; it may have {known}")
    return fields or {"json_object": False}


NESTED: Mapping[str, Callable[[str, object], dict[str, Any]]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_decoding": _structured_outputs,
}
"""Parameters of others that hold a form, and what makes fields of SamplingParams of their values."""


def _mapping(name: str, value: object, told: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ParameterError(f"{name} is {short(repr(value))}; it must be {told}")
    return {key: one for key, one in value.items() if one is not None}


def _schema_of(name: str, value: object) -> object:
    """The schema of a class. Raises ParameterError."""
    make = getattr(value, "model_json_schema", None)
    if isinstance(value, type) and callable(make):
        return make()
    if isinstance(value, type) and dataclasses.is_dataclass(value):
        try:
            from pydantic import TypeAdapter
        except ModuleNotFoundError as error:
            raise ParameterError(
                f"{name} is the dataclass {value.__name__}, whose schema pydantic makes: pip install pydantic"
            ) from error
        return TypeAdapter(value).json_schema()
    raise ParameterError(
        f"{name} is {short(repr(value))}; it must be a JSON schema, a dict or JSON text, a pydantic model or a "
        "dataclass"
    )


def _check_depth(name: str, schema: Mapping[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, (Mapping, list, tuple))
        ]
        if not level:
            return
    raise ParameterError(f"{name} nests more than {MAX_SCHEMA_DEPTH} deep")


def _check_text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParameterError(f"{name} holds half of a surrogate pair, which has no UTF-8") from None
    return _check_length(name, text)


def _check_length(name: str, text: str) -> str:
    if len(text) > MAX_FORM_LENGTH:
        raise ParameterError(f"{name} has {len(text):,} characters; at most {MAX_FORM_LENGTH:,} are taken")
    return text


def _refuse(value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is not a JSON type")
