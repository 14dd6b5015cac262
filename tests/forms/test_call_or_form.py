"""Calls or a form: whatever tokens are drawn through masks, the answer is read as one of the two, and is right."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from radixrt.errors import FormError, ParameterError
from radixrt.form_spec import FormSpec
from radixrt.forms.compiler import FormCompiler
from radixrt.forms.vocabulary import Vocabulary
from radixrt.frontend.tool_calls import message_of
from radixrt.parsers.answer_parser import AnswerParser
from radixrt.parsers.forcing import TOKEN_TAGS, Syntax, call_or_form_grammar, forced_grammar
from radixrt.parsers.source import Part, Tools
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.small_tokenizers import HARMONY_TOKENS, byte_level
from tests.support.transcripts import coder
from tests.support.walks import walk

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("llguidance", "jsonschema")),
    reason="llguidance or jsonschema is not installed: pip install 'radixrt[test]'",
)
PARSERS = ["hermes", "llama3_json", "qwen3_coder", "harmony"]
ENDS = frozenset([1])


class Model:
    """Tokens, of which some may be tags."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.compiler = FormCompiler(Vocabulary(tokenizer.vocab_size, (1,), tokenizer.serialized()))
        ids = {tag: tokenizer.encode(tag, add_special_tokens=False).tolist() for tag in TOKEN_TAGS}
        self.ids = {tag: found[0] for tag, found in ids.items() if len(found) == 1}

    def can_be(self, grammar: str) -> bool:
        try:
            self.compiler.check(FormSpec("grammar", grammar))
        except FormError:
            return False
        return True

    def grammar(self, parser: str, tools: Mapping[str, Any], form: FormSpec, **more: Any) -> str:
        reasoning = more.pop("reasoning", "think")
        reasoning = "harmony" if parser == "harmony" else reasoning
        several = more.pop("several", True)
        return call_or_form_grammar(
            Syntax(parser, reasoning, ids=self.ids, **more), tools, form, several=several, can_be=self.can_be
        )

    def answer(self, grammar: str, seed: int, before: str = "", free: int = 24) -> str:
        form = self.compiler.compile(FormSpec("grammar", grammar), ENDS)
        ids = self.tokenizer.encode(before, add_special_tokens=False).tolist()
        return walk(form, self.tokenizer, ENDS, seed, free, ids, ["</parameter>", "</function>", ">\n", "<|end|>"])

    def takes(self, grammar: str, text: str) -> bool:
        matcher = self.compiler.compile(FormSpec("grammar", grammar), ENDS).matcher()
        ids = self.tokenizer.encode(text, add_special_tokens=False).tolist()
        return bool(matcher.inner.try_consume_tokens(ids) == len(ids) and matcher.inner.is_accepting())


@pytest.fixture(scope="module", params=["tags are text", "tags are tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a byte-level tokenizer, as in Qwen; llguidance holds tags that are tokens to be no text."""
    special = ("<s>", "</s>", *HARMONY_TOKENS, "<|constrain|>")
    fast = byte_level(special)
    if request.param == "tags are tokens":
        fast.add_tokens([*TOKEN_TAGS])
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    found = Model(load_tokenizer(folder))
    assert len(found.ids) == (4 if request.param == "tags are tokens" else 0)
    yield found
    found.compiler.close()


def parts(parser: str, tools: Mapping[str, Any], text: str, *, cut: int = 0, **more: Any) -> list[Part]:
    reasoning = "harmony" if parser == "harmony" else "think"
    reader = AnswerParser(parser, reasoning, Tools(tools), has_form=True, **more)
    return [*reader.push(text[:cut]), *reader.push(text[cut:]), *reader.finish(is_cut=False)]


def read(parser: str, tools: Mapping[str, Any], text: str, **more: Any) -> dict[str, Any]:
    """The message of an answer, wherever it is cut in two."""
    whole = message_of(parts(parser, tools, text, **more))[0]
    for cut in range(0, len(text), 1 + len(text) // 40):
        streamed = parts(parser, tools, text, cut=cut, **more)
        assert "".join(part.raw for part in streamed) == text
        assert without_ids(message_of(streamed)[0]) == without_ids(whole), cut
    return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": [call["function"] for call in message.get("tool_calls", ())]}


# Names that forms and calls share.
KEYS = st.sampled_from(["name", "parameters", "arguments", "city", "<tool_call>", "<|end|>", "a::=b"])
TEXTS = st.sampled_from(["weather", "now", "x", "</think>", "<function=now>", "<|end|>", "</parameter>"])
SIMPLE = [{"type": "integer"}, {"type": "null"}, {"type": "string", "maxLength": 9}, {"const": {"name": "now"}}]
LEAVES = st.one_of(
    st.builds(lambda texts: {"enum": texts}, st.lists(TEXTS, min_size=1, max_size=3, unique=True)),
    st.sampled_from(SIMPLE),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], count: int) -> dict[str, Any]:
        required = list(properties)[:count]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(made, st.dictionaries(KEYS, inner, max_size=3), st.integers(0, 3))


def schemas(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, inner)
    return st.one_of(objects(inner), lists)


OBJECTS = objects(st.recursive(LEAVES, schemas, max_leaves=4))
FREE = [
    {"type": "object", "not": {}},
    {"type": "array"},
    {"type": "object", "properties": {"a": {"nullable": True}}},
]


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    arguments=st.lists(st.one_of(OBJECTS, st.sampled_from(FREE)), min_size=1, max_size=3),
    form=st.one_of(OBJECTS, LEAVES),
    seed=st.integers(0, 999),
)
def test_an_answer_is_calls_or_the_form(
    model: Model, parser: str, arguments: list[dict[str, Any]], form: dict[str, Any], seed: int
) -> None:
    import jsonschema

    tools = dict(zip(("weather", "now", "x"), arguments, strict=False))
    grammar = model.grammar(parser, tools, FormSpec("json_schema", json.dumps(form)), reasoning=None)
    text = model.answer(grammar, seed)
    message = read(parser, tools, text)
    assert "reasoning_content" not in message or message["reasoning_content"] in text
    calls = message.get("tool_calls", [])
    assert bool(calls) != bool(message["content"]), text
    for call in calls:
        written = json.loads(call["function"]["arguments"])
        schema = tools[call["function"]["name"]]
        if is_held(parser, schema) and not jsonschema.Draft202012Validator(form).is_valid(as_json(text)):
            jsonschema.validate(written, schema)
    if not calls:
        jsonschema.validate(json.loads(message["content"]), form)


def is_held(parser: str, schema: dict[str, Any]) -> bool:
    """Whether a call can be held to the schema of its arguments."""
    try:
        forced_grammar(Syntax(parser), {"f": schema}, several=False)
    except ParameterError:
        return False
    return schema not in FREE


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ...


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: dict[str, Any] = {"weather": CITY, "now": {}}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORM = FormSpec("json_schema", json.dumps(NAMED))
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "qwen3_coder": coder("city", "Oslo"),
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
}
THOUGHTS = {"harmony": "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant"}
HEAD = {"harmony": "<|channel|>final<|message|>"}


@pytest.mark.parametrize("parser", PARSERS)
def test_what_is_taken(model: Model, parser: str) -> None:
    grammar = model.grammar(parser, TOOLS, FORM)
    call, head = CALLS[parser], HEAD.get(parser, "")
    thoughts = THOUGHTS.get(parser, "<think>a < b</think>\n\n")
    formed = [f'{head}{{"name": "{name}"}}' for name in ("weather", "w", "other", "now, }")]
    for text in (call, *formed):
        assert model.takes(grammar, text)
        assert model.takes(grammar, thoughts + text)
    several = parser in ("hermes", "qwen3_coder")
    assert model.takes(grammar, f"{call}\n{call}") == several
    assert not model.takes(model.grammar(parser, TOOLS, FORM, several=False), f"{call}\n{call}")
    for bad in (
        f"So: {call}",
        f"{call}\n{formed[0]}",
        f"{formed[0]}\n{call}",
        thoughts,
        head + "{}",
        thoughts * 2 + call,
    ):
        assert not model.takes(grammar, bad)
    if parser != "llama3_json":  # whose call is an object of this form, too
        assert not model.takes(grammar, call.replace("Oslo", "Rome"))
    if parser != "harmony":
        grammar = model.grammar(parser, TOOLS, FORM, is_thinking=True)
        assert model.takes(grammar, f"a</think>\n\n{call}")
        assert model.takes(grammar, f"a</think>{formed[0]}")
        assert not model.takes(grammar, call)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (FormSpec("choice", json.dumps(["yes", 'n"o', "a/b\n", "c::=d"])), "c::=d"),
        (FormSpec("regex", r"[a-c]/\d::=(x|/)"), "b/1::=/"),
        (FormSpec("json_schema", json.dumps({"const": "x::=y"})), '"x::=y"'),
    ],
)
def test_forms_of_every_kind(model: Model, parser: str, form: FormSpec, text: str) -> None:
    grammar, head = model.grammar(parser, {"weather": {**CITY, "title": "a ::= b"}}, form), HEAD.get(parser, "")
    assert model.takes(grammar, head + text)
    assert model.takes(grammar, CALLS[parser])
    assert read(parser, TOOLS, head + text)["content"] == text


@pytest.mark.parametrize("parser", PARSERS)
def test_thoughts_and_then_either(model: Model, parser: str) -> None:
    grammar = model.grammar(parser, TOOLS, FORM)
    before = THOUGHTS.get(parser, "<think>a < b</think>")
    kinds = set()
    for seed in range(12):
        text = model.answer(grammar, seed, before)
        message = read(parser, TOOLS, text)
        assert message["reasoning_content"] == "a < b"
        kinds.add("tool_calls" in message)
        assert "tool_calls" in message or "name" in json.loads(message["content"])
    assert kinds == {False, True} or parser == "llama3_json"


@pytest.mark.parametrize("parser", PARSERS)
def test_a_form_that_spells_calls_is_content(parser: str) -> None:
    for spelled in (*CALLS.values(), "<function=now>", "<|end|><|call|>", "</think>"):
        text = json.dumps({"name": spelled, "parameters": [spelled]})
        assert read(parser, TOOLS, HEAD.get(parser, "") + text)["content"] == text


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weather", "parameters": {"city": "Oslo"}, "more": 1}', 0),
        ('{"name": "weather", "parameters": {"city": "Oslo"}}', 1),
        ('{"name": "weather", "parameters": {"city": "Os', 1),  # cut
        ('{"name": "weather", "parameters": [1]}', 0),
        ('{"name": "rain", "parameters": {}}', 0),
        ('{"name": "now", "parameters": {}}\n', 1),
        ('{"name": "now", "parameters": {}} or not', 0),
    ],
)
def test_an_object_that_begins_as_llamas_call(text: str, calls: int) -> None:
    message = read("llama3_json", TOOLS, text)
    assert len(message.get("tool_calls", ())) == calls
    assert message["content"] == (None if calls else text)
