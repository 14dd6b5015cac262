"""The grammar of an answer that must call, or that calls or has a form, in the syntax that a model was taught."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from radixrt.errors import ParameterError
from radixrt.form_spec import FormSpec, schema_text
from radixrt.forms.form_process import GUIDED
from radixrt.forms.schema_keywords import for_llguidance, llguidance_refusal, moved
from radixrt.parsers.argument_types import is_plain_text
from radixrt.parsers.names import HARMONY, THINK
from radixrt.parsers.xml_calls import KEY

TOKEN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Those that may be a token each."""

_MAX_REFUSED = 8  # schemas beside a form; all after them are free
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NOTES = ("description", "title", "default", "examples", "$schema")
_OF_OBJECTS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions", *_NOTES)
_OF_TEXT = ("type", "enum", *_NOTES)
# What a text must not hold, as whoever reads it would take it for the end of it.
_IN_CHANNEL = r"/(?s:.*)/ & ~/(?s:.*)<\|(start|channel|message|end|call|return)\|>(?s:.*)/"
_IN_THOUGHTS = r"/(?s:.*)/ & ~/(?s:.*)<\/think>(?s:.*)/"
_CHANNELS = f'thoughts: THOUGHTS\nTHOUGHTS: {_IN_CHANNEL}\nfinal: <|channel|> "final" <|message|>\n'
# For each parser what stands before the arguments of a call, and after them, with its tags in braces.
_AROUND = {
    "hermes": (r'{open} "\n{{\"name\": \"{name}\", \"arguments\": "', r'"}}\n" {close}'),
    "llama3_json": (r'"{{\"name\": \"{name}\", \"parameters\": "', '"}}"'),
    "qwen3_coder": (r'{open} "\n<function={name}>\n"', r'"</function>\n" {close}'),
    HARMONY: ('<|channel|> "commentary to=functions.{name} " <|constrain|> "json" <|message|>', ""),
}
_ANY_PARAMETERS = (
    'parameter: "<parameter=" /[^<>\\n]{1,256}/ ">\\n" value "\\n"\nvalue[suffix="</parameter>"]: /(?s:.*)/\n'
)


@dataclass(frozen=True)
class Syntax:
    """How a model writes its thoughts and calls.

    Attributes:
        tools: one of TOOL_PARSERS, which reads the calls; None: there are none.
        reasoning: one of REASONING_PARSERS, which reads the thoughts; None: there are none.
        is_thinking: whether the prompt has opened the thoughts.
        ids: of the TOKEN_TAGS that are a token each; others are text.
    """

    tools: str | None
    reasoning: str | None = None
    is_thinking: bool = False
    ids: Mapping[str, int] = field(default_factory=dict)

    def tag(self, name: str) -> str:
        """In Lark."""
        return f"<[{self.ids[name]}]>" if name in self.ids else _quoted(name)


def forced_grammar(syntax: Syntax, parameters: Mapping[str, Mapping[str, Any]], *, several: bool) -> str:
    """A grammar in llguidance's Lark of a call of one of these functions, or of several of them one after the
    other where the syntax has that. Thoughts may come before, and go on where the prompt has opened them.

    Raises ParameterError where arguments cannot be held to their schema.
    """
    calls = [_call(syntax, place, name, schema) for place, (name, schema) in enumerate(parameters.items())]
    return _answer(syntax, calls, None, several=several)


def call_or_form_grammar(
    syntax: Syntax,
    parameters: Mapping[str, Mapping[str, Any]],
    form: FormSpec,
    *,
    several: bool,
    can_be: Callable[[str], bool],
) -> str:
    """A grammar of calls as `forced_grammar` has them, or of a text in a form: a JSON schema, a pattern, choices.

    Arguments are held to their schema where that `can_be` in a grammar, and are any object else. Raises
    ParameterError where the form cannot be in one.
    """
    free = [_call(syntax, place, name, None, beside_form=True) for place, name in enumerate(parameters)]
    held, firsts = [*free], dict[int, str]()  # each held call, and it as the only one
    for place, (name, schema) in enumerate(parameters.items()):
        try:
            held[place] = _call(syntax, place, name, schema, beside_form=True)
            firsts[place] = _call(syntax, 0, name, schema, beside_form=True)
        except ParameterError:
            held[place] = free[place]
    grammar = _answer(syntax, held, form, several=several)
    if not firsts or can_be(grammar):
        return grammar
    # Some schema cannot be, or all together are too much: few are tried, as a trial may take seconds.
    alone, refused = replace(syntax, reasoning=None), 0
    for place, first in firsts.items():
        if refused >= _MAX_REFUSED or not can_be(_answer(alone, [first], None, several=False)):
            held[place], refused = free[place], refused + 1
    grammar = _answer(syntax, held, form, several=several)
    return grammar if can_be(grammar) else _answer(syntax, free, form, several=several)


def _answer(syntax: Syntax, calls: Sequence[str], form: FormSpec | None, *, several: bool) -> str:
    """The grammar of thoughts, and calls or a form after them; each call is the rules of `call0`, `call1` ..."""
    rules, before = "", ""
    if syntax.reasoning == HARMONY:
        before = '(<|channel|> "analysis" <|message|> thoughts <|end|> <|start|> "assistant")? '
        rules = _CHANNELS
    elif syntax.reasoning == THINK:
        end = syntax.tag("</think>")
        before = (
            r"thoughts /\n{0,2}/ " if syntax.is_thinking else rf"({syntax.tag('<think>')} thoughts /\n{{0,2}}/)? "
        )
        if "</think>" in syntax.ids:
            rules = f"thoughts: THOUGHTS {end}\nTHOUGHTS: {_IN_THOUGHTS}\n"
        else:
            rules = f"thoughts[suffix={end}]: /(?s:.*)/\n"
    ways = []
    if calls:
        ways.append(r"call (/\n/ call)*" if several and syntax.tools in ("hermes", "qwen3_coder") else "call")
        rules += f"call: {' | '.join(f'call{place}' for place in range(len(calls)))}\n{''.join(calls)}"
        if "parameter*" in rules:
            rules += _ANY_PARAMETERS
    if form is not None:
        ways.append("final form" if syntax.reasoning == HARMONY else "form")
        rules += _form(form)
    return f"start: {before}({' | '.join(ways)})\n{rules}"


def _form(form: FormSpec) -> str:
    """The rules of a form. Raises ParameterError."""
    if form.kind == "json_schema":
        return f"form: {_value('the json_schema', json.loads(form.text))}\n"
    if form.kind == "choice":
        return f"form: FORM\nFORM: {' | '.join(map(_quoted, json.loads(form.text)))}\n"
    pattern = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], form.text, flags=re.DOTALL)
    pattern = pattern.replace("::=", r":\x3a=")
    return f"form: /{pattern}/\n"


def _call(
    syntax: Syntax, place: int, name: str, schema: Mapping[str, Any] | None, *, beside_form: bool = False
) -> str:
    """The rules of a call, of any arguments where there is no schema. Raises ParameterError."""
    assert syntax.tools is not None
    which = f"{name}.parameters"
    tags = {"open": syntax.tag("<tool_call>"), "close": syntax.tag("</tool_call>")}
    opening, closing = (part.format(name=name, **tags) for part in _AROUND[syntax.tools])
    if syntax.tools == "qwen3_coder":
        uses, rules = ("parameter*", "") if schema is None else _xml(which, schema, f"p{place}")
        return f"call{place}: {opening} {uses} {closing}\n{rules}"
    schema = _of_object(which, {"type": "object"} if schema is None else schema)
    if syntax.tools == "llama3_json" and beside_form:
        # It begins as other objects do: token by token, or the first one that comes decides between them.
        inner = {"name": {"const": name}, "parameters": moved(schema, "#/properties/parameters")}
        whole = {"type": "object", "properties": inner, "required": [*inner], "additionalProperties": False}
        return f"call{place}: {_value(which, whole)}\n"
    return f"call{place}: {opening} {_value(which, schema)} {closing}\n"


def _quoted(text: str) -> str:
    """A string of Lark, without what would make it GBNF."""
    return json.dumps(text, ensure_ascii=False).replace("::=", r":\u003a=")


def _of_object(which: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments, which are an object. Raises ParameterError."""
    schema = {"type": "object", **schema} if schema else _NOTHING
    if schema["type"] != "object":
        raise ParameterError(f"{which} is no schema of an object, as arguments are")
    return schema


def _value(which: str, schema: Mapping[str, Any]) -> str:
    if refusal := llguidance_refusal(schema):
        raise ParameterError(f"{which} cannot be forced: {refusal}")
    text = schema_text(which, for_llguidance(schema)).replace("::=", r":\u003a=")
    return f"%json {{{GUIDED},{text[1:]}" if schema else f"%json {{{GUIDED}}}"


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
        begun = _quoted(f"<parameter={key}>\n")
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
    return f'{rule}: ({" | ".join(map(_quoted, values))}) "\\n</parameter>\\n"\n'


def _check_known(which: str, schema: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in schema if key not in known]:
        raise ParameterError(f"{which} has {unknown[0]!r}, which cannot be forced in this model's syntax of calls")
