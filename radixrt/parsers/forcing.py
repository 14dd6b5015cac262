"""The grammar of an answer that must call: in the syntax that the model was taught, with arguments by schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixrt.asked_form import schema_text
from radixrt.errors import ParameterError
from radixrt.forms.form_process import GUIDED
from radixrt.forms.schema_keywords import llguidance_refusal, without_nul
from radixrt.parsers.argument_types import is_plain_text
from radixrt.parsers.names import HARMONY, THINK
from radixrt.parsers.xml_calls import KEY

_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NOTES = ("description", "title", "default", "examples", "$schema")
_OF_OBJECTS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions", *_NOTES)
_OF_TEXT = ("type", "enum", *_NOTES)
_THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/\n'
# For each parser what stands before the arguments of a call, and after them.
_TAGS = {
    "hermes": ('"<tool_call>\\n{{\\"name\\": \\"{name}\\", \\"arguments\\": "', '"}\\n</tool_call>"'),
    "llama3_json": ('"{{\\"name\\": \\"{name}\\", \\"parameters\\": "', '"}"'),
    "qwen3_coder": ('"<tool_call>\\n<function={name}>\\n"', '"</function>\\n</tool_call>"'),
    HARMONY: (
        '<|channel|> "commentary to=functions.{name} " <|constrain|> "json" <|message|>',
        "",
    ),
}


def forced_grammar(
    tool_parser: str,
    reasoning_parser: str | None,
    parameters: Mapping[str, Mapping[str, Any]],
    *,
    several: bool,
    is_thinking: bool,
) -> str:
    """A grammar in llguidance's Lark of a call of one of these functions, or of several of them one after the
    other where the syntax has that. Thoughts may come before, and go on where the prompt has opened them.

    Raises ParameterError where arguments cannot be held to their schema.
    """
    rules, before = "", ""
    if reasoning_parser == HARMONY:
        before = '(<|channel|> "analysis" <|message|> thoughts <|end|> <|start|> "assistant")? '
        rules = "thoughts: /(?s:.*)/\n"
    elif reasoning_parser == THINK:
        before = "thoughts /\\n{0,2}/ " if is_thinking else '("<think>" thoughts /\\n{0,2}/)? '
        rules = _THOUGHTS
    more_calls = r" (/\n/ call)*" if several and tool_parser in ("hermes", "qwen3_coder") else ""
    opening, closing = _TAGS[tool_parser]
    for place, (name, schema) in enumerate(parameters.items()):
        if tool_parser == "qwen3_coder":
            arguments, more = _xml(f"{name}.parameters", schema, f"p{place}")
        else:
            arguments, more = _json(f"{name}.parameters", schema), ""
        rules += f"call{place}: {opening.format(name=name)} {arguments} {closing}\n{more}"
    calls = " | ".join(f"call{place}" for place in range(len(parameters)))
    grammar = f"start: {before}call{more_calls}\ncall: {calls}\n{rules}"
    if "::=" in grammar:
        raise ParameterError("a schema holds '::=', which a forced call cannot have")
    return grammar


def _json(which: str, schema: Mapping[str, Any]) -> str:
    """Arguments as an object. Raises ParameterError."""
    schema = {"type": "object", **schema} if schema else _NOTHING
    if schema["type"] != "object":
        raise ParameterError(f"{which} is no schema of an object, as arguments are")
    return _value(which, schema)


def _value(which: str, schema: Mapping[str, Any]) -> str:
    if refusal := llguidance_refusal(schema):
        raise ParameterError(f"{which} cannot be forced: {refusal}")
    return f"%json {{{GUIDED},{schema_text(which, without_nul(schema))[1:]}" if schema else f"%json {{{GUIDED}}}"


def _xml(which: str, schema: Mapping[str, Any], rule: str) -> tuple[str, str]:
    """Arguments as parameters, in the schema's order, and the rules of their values. Raises ParameterError."""
    _check_known(which, schema, _OF_OBJECTS)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        raise ParameterError(f"{which} is no schema of an object, as arguments are")
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ParameterError(f"{which} has a 'required' that is no list of names")
    if missing := [key for key in required if key not in properties]:
        raise ParameterError(f"{which} requires {missing[0]!r}, which is not among its properties")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    uses: list[str] = []
    rules = ""
    for place, (key, own) in enumerate(properties.items()):
        named = f"{which}.{key}"
        if not KEY.fullmatch(key) or not isinstance(own, Mapping):
            raise ParameterError(f"{named} cannot be forced: a parameter's name is in a tag, and has a schema")
        value = f"{rule}_{place}"
        rules += _text(named, own, value) if is_plain_text(own) else _typed(named, {**shared, **own}, value)
        begun = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        uses.append(f"({begun} {value})" + ("" if key in required else "?"))
    return " ".join(uses), rules


def _typed(which: str, schema: Mapping[str, Any], rule: str) -> str:
    return f'{rule}: {rule}v "\\n</parameter>\\n"\n{rule}v: {_value(which, schema)}\n'


def _text(which: str, schema: Mapping[str, Any], rule: str) -> str:
    _check_known(which, schema, _OF_TEXT)
    if "enum" not in schema:  # the first tag ends it for who reads it, with or without a new line before
        return f'{rule}: {rule}t "\\n"\n{rule}t[suffix="</parameter>"]: /(?s:.*)/\n'
    values: Sequence[Any] = schema["enum"]
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ParameterError(f"{which} has an enum that is no list of strings")
    if any("</parameter>" in value for value in values):
        raise ParameterError(
            f"{which} has an enum with '</parameter>', which cannot be forced: it ends a parameter"
        )
    choices = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    return f'{rule}: ({choices}) "\\n</parameter>\\n"\n'


def _check_known(which: str, schema: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in schema if key not in known]:
        raise ParameterError(f"{which} has {unknown[0]!r}, which cannot be forced in this model's syntax of calls")
