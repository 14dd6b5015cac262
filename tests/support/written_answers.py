"""Answers as models write them, made by a seed, with what they mean: whole, loosely written, cut or damaged."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

from radixrt.parsers.source import Tools

SYNTAXES = ("hermes", "llama3_json", "qwen3_coder", "harmony")
DEFS = {"word": {"type": "string"}, "again": {"$ref": "#/$defs/word"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "is_new": {"type": "boolean"},
        "list": {"type": "array", "items": {}},
        "map": {"type": "object"},
        "word": {"$ref": "#/$defs/again"},
        "code": {"allOf": [{"$ref": "#/$defs/word"}], "description": "of digits"},
        "size": {"enum": ["10", "007", "true", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": DEFS,
}
PARAMETERS = {"edit": SCHEMA, "weather.now": {"$ref": "#/$defs/all", "$defs": {"all": SCHEMA, **DEFS}}, "now": {}}

# Of arguments, of prose, and what damages an answer.
_WORDS = re.split(
    "¦",
    "a¦Oslo¦ ¦\n¦\n\n¦\t¦é¦日¦😀¦\"¦\\¦\\n¦\\d¦\x00¦\x1f¦\u2028¦'¦</parameter>x¦\n</parameter>\ny"
    '¦\n</function>\nz¦</tool_call>q¦<parameter=none>¦{¦}]¦<function=none>¦<tool_call>{"a'
    '¦<|call|> b¦</think> ¦<¦</¦1¦x < y¦": "¦,¦[1]',
)
_PROSE = re.split("¦", 'Well¦I\'ll look¦a < b¦<b>¦{¦"x": 1¦</tool¦<tool_¦call>¦é\n¦[]¦</p>')
_DAMAGE = re.split(
    "¦",
    '"¦\\¦{¦}¦[¦]¦,¦:¦<¦>¦\n¦ ¦\x00¦</parameter>¦<parameter=text>¦</function>¦<function=edit>¦<tool_call>¦<think>'
    '¦</tool_call>¦</think>¦\\u¦\\ud83d¦<|call|>¦<|start|>assistant¦<|channel|>final<|message|>¦{"name": "¦null'
    f"¦1e999¦NaN¦{'[' * 130}¦{'9' * 600}",
)

Told = list[tuple[str, Any]]  # ("content", text), ("reasoning", text), or (name, arguments) of a call


@dataclass
class Written:
    """One answer.

    Attributes:
        text: what the model wrote.
        tool_parser, reasoning_parser, tools, is_thinking: what an AnswerParser gets.
        is_cut: whether its length has ended it.
        meant: what clients are to be told; None: nobody knows.
    """

    text: str
    tool_parser: str
    reasoning_parser: str | None
    tools: Tools = field(repr=False)
    is_thinking: bool = False
    is_cut: bool = False
    meant: Told | None = field(default_factory=list)


def written(syntax: str, seed: str) -> Written:
    """The answer of this seed."""
    return _Writer(syntax, Random(f"{syntax} {seed}")).answer()


class _Writer:
    def __init__(self, syntax: str, random: Random) -> None:
        self._syntax, self._random = syntax, random
        self._is_loose = random.random() < 0.4
        self._text = ""
        self._meant: Told = []
        self._only_one = random.random() < 0.1
        self._num_calls = 0

    def answer(self) -> Written:
        random, syntax = self._random, self._syntax
        reasoning, is_thinking = ("harmony", False) if syntax == "harmony" else (None, False)
        if syntax == "harmony":
            self._messages()
        else:
            if random.random() < 0.4:
                reasoning, is_thinking = "think", random.random() < 0.5
                self._thought(is_thinking)
            self._calls_and_text()
        tools = Tools(PARAMETERS, self._only_one)
        made = Written(self._text, syntax, reasoning, tools, is_thinking, False, self._joined())
        if random.random() < 0.4:
            self._cut(made)
        elif random.random() < 0.4:
            self._damage(made)
        return made

    def _joined(self) -> Told:
        told: Told = []
        for kind, value in self._meant:
            if told and told[-1][0] == kind and isinstance(value, str):
                told[-1] = (kind, told[-1][1] + value)
            else:
                told.append((kind, value))
        return told

    # The parts of an answer.

    def _thought(self, is_open: bool) -> None:
        thought = self._prose() + self._pick("", " <tool_call>", '\n<tool_call>{"name": "now", "arguments": {}}')
        closing = self._pick("\n</think>\n\n", "</think>", "\n\n</think> ")
        self._text += ("" if is_open else "<think>\n") + thought + closing
        self._meant.append(("reasoning", thought))

    def _calls_and_text(self) -> None:
        begins = self._syntax == "llama3_json"
        for place in range(1 if self._only_one else self._random.choice((1, 1, 2, 3))):
            if not begins and self._random.random() < 0.5:
                self._content(self._prose() + self._pick("", "\n", " "))
            if begins and place:
                self._text += self._pick(";", "; ", "\n", "")
            self._call()
        if self._only_one and self._random.random() < 0.5:  # a second call is text
            before, meant = self._text, [*self._meant]
            self._call()
            self._text, self._meant, second = before, meant, self._text[len(before) :]
            self._content(second)
        elif self._random.random() < 0.3:
            self._text += self._pick("", "\n", "\n\n")
            self._content(self._prose())

    def _messages(self) -> None:
        for place in range(self._random.choice((1, 2, 3))):
            before = "<|start|>assistant" if place else ""
            kind = self._pick("analysis", "commentary", "final", "call", "call")
            if kind == "call" and not (self._only_one and self._num_calls):
                name, meant = self._chosen()
                head = self._pick(
                    f"{before}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                    f"{before} to=functions.{name}<|channel|>commentary json<|message|>",
                    f"{before}<|channel|>analysis to=functions.{name} code<|message|>",
                )
                self._text += head + self._json(meant) + self._pick("<|call|>", "<|end|>")
                self._meant.append((name, meant))
            else:
                said = self._prose()
                channel = kind if kind != "call" else "final"
                self._text += f"{before}<|channel|>{channel}<|message|>{said}<|end|>"
                self._meant.append(("reasoning" if channel == "analysis" else "content", said))

    def _content(self, said: str) -> None:
        self._text += said
        self._meant.append(("content", said))

    def _chosen(self) -> tuple[str, dict[str, Any]]:
        name = self._pick(*PARAMETERS)
        self._num_calls += 1
        if name == "now":
            return name, {}
        keys = self._random.sample([*SCHEMA["properties"]], self._random.choice((0, 1, 1, 2, 3)))
        return name, {key: self._argument(key) for key in keys}

    def _call(self) -> None:
        name, meant = self._chosen()
        self._meant.append((name, meant))
        if self._syntax == "qwen3_coder":
            self._text += self._xml(name, meant)
        elif self._syntax == "llama3_json":
            self._text += self._pick("", "", "<|python_tag|>") + self._pick(
                f'{{"name": "{name}", "parameters": {self._json(meant)}}}',
                f'{{"type": "function", "name":"{name}","arguments":{self._json(meant)} }}',
            )
        else:
            b = self._pick("\n", "", " ")
            body = self._pick(
                f'{{"name": "{name}", "arguments": {self._json(meant)}}}',
                f'{{"name":"{name}","arguments":{self._json(meant)}}}',
                f'{{"arguments": {self._json(meant)}, "name": "{name}"}}',
            )
            self._text += f"<tool_call>{b}{body}{b}</tool_call>"

    # Values.

    def _argument(self, key: str) -> Any:
        random = self._random
        if key in ("text", "path"):
            return self._words()
        if key in ("word", "code"):
            return self._pick("10", "007", "true", "null", "1e5", "a b", "é\n-")
        if key == "size":
            return self._pick("10", "007", "true", "null")
        if key == "note":
            return self._pick(None, "10", "[1]", "a\nb")
        if key == "count":
            return random.randint(-(10**9), 10**9)
        if key == "share":
            return random.choice((random.random(), 1e300, -0.5, 3, 1e-7))
        if key == "is_new":
            return random.random() < 0.5
        return [self._value(2) for _ in range(random.randrange(3))] if key == "list" else self._map(2)

    def _map(self, depth: int) -> dict[str, Any]:
        keys = self._random.choices(("a", "b c", "é", '"', "\\", "d\n"), k=self._random.randrange(3))
        return {key: self._value(depth) for key in keys}

    def _value(self, depth: int) -> Any:
        kinds = ("text", "text", "count", "share", "is_new", "none", "list", "map")
        kind = self._pick(*kinds[: 8 if depth else 6])
        if kind == "none":
            return None
        if kind == "list":
            return [self._value(depth - 1) for _ in range(self._random.randrange(3))]
        return self._map(depth - 1) if kind == "map" else self._argument(kind)

    def _words(self) -> str:
        """Text of all sorts, in which what looks like a tag is followed by none."""
        said = "".join(self._random.choices(_WORDS, k=self._random.randrange(5)))
        return said + "." if said.rstrip().endswith(("</", "<", ">")) else said

    def _prose(self) -> str:
        return f"So {' '.join(self._random.choices(_PROSE, k=self._random.randrange(4)))}."

    def _pick(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    # How they are written.

    def _json(self, value: Any) -> str:
        if not self._is_loose:
            return json.dumps(value, ensure_ascii=self._pick(True, False), indent=self._pick(None, None, 1))
        return self._loose(value)

    def _loose(self, value: Any) -> str:
        """As models do: what is no JSON, but has one meaning."""
        b = self._pick("", " ", "\n", "\xa0")
        if isinstance(value, str):
            return self._loose_text(value)
        if isinstance(value, (dict, list)) and value:
            is_list = isinstance(value, list)
            values = [*map(self._loose, value if isinstance(value, list) else value.values())]
            comma, last = self._pick("", "", ",", " , "), _last(value)
            is_other = (
                last and type(last) is (dict if is_list else list) and not isinstance(_last(last), (dict, list))
            )
            if is_other and self._random.random() < 0.3:
                values[-1], comma = values[-1][:-1], ""  # its bracket is missing
            if is_list:
                return f"[{b}{', '.join(values)}{comma}{b}]"
            pairs = (f"{self._loose_key(key)}{b}:{b}{one}" for key, one in zip(value, values, strict=True))
            return f"{{{b}{f',{b}'.join(pairs)}{comma}{b}}}"
        return self._pick(json.dumps(value), str(value)) if value in (True, False, None) else json.dumps(value)

    def _loose_key(self, key: str) -> str:
        return key if key == "a" and self._random.random() < 0.5 else self._loose_text(key)

    def _loose_text(self, text: str) -> str:
        if text == "Oslo":
            return text
        written = ""
        for place, character in enumerate(text):
            rest = text[place + 1 :]
            is_escape = not rest or rest[0] in "\"'\\/bfnrtu" or ord(rest[0]) < 0x20
            if character == "\\" and (is_escape or self._random.random() < 0.5):
                written += "\\\\"
            else:
                written += '\\"' if character == '"' else "\\'" if character == "'" else character
        return f'"{written}"'

    def _xml(self, name: str, meant: dict[str, Any]) -> str:
        """Tags as they are to be, or loosely: not closed, or left out, where what follows is a tag."""
        b, is_loose = "\n" if self._random.random() < 0.8 else "", self._is_loose
        # A text that is written right behind its tag must not begin with a new line.
        b = "\n" if any(str(value).startswith("\n") for value in meant.values()) else b

        def tag(text: str) -> str:
            return text if not is_loose or self._random.random() < 0.7 else ""

        outer, last = tag("<tool_call>\n"), tag("</tool_call>")
        end_of_function = tag("</function>\n") if last else "</function>\n"
        parameters = ""
        for place, (key, value) in enumerate(meant.items(), 1):
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if value is None or isinstance(value, bool):
                shown = self._pick(shown, str(value))
            end = "\n" if b or shown.endswith("\n") else ""
            closing = self._pick("</parameter>", "</parameter/>", "</parameter") if is_loose else "</parameter>"
            if place < len(meant) or (last and end_of_function):
                closing = tag(closing)
            parameters += f"<parameter={key}>{b}{shown}{f'{end}{closing}' if closing else ''}\n"
        return f"{outer}<function={name}>\n{parameters}{end_of_function}{last}"

    # What becomes of them.

    def _cut(self, made: Written) -> None:
        made.text = made.text[: self._random.randrange(len(made.text) + 1)]
        made.is_cut = True

    def _damage(self, made: Written) -> None:
        for _ in range(self._random.choice((1, 1, 2, 4))):
            text, place = made.text, self._random.randrange(len(made.text) + 1)
            size = self._random.choice((0, 1, 3, 12))
            made.text = text[:place] + self._pick("", "", *_DAMAGE, text[-20:]) + text[place + size :]
        made.meant = None
        made.is_cut = self._random.random() < 0.3


def _last(value: Any) -> Any:
    """The last value of a list or an object that has some."""
    return value[-1] if isinstance(value, list) else [*value.values()][-1]
