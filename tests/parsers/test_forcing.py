"""Grammars of answers that must call: what llguidance takes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'radixrt[grammar]'")

from radixrt.errors import ParameterError
from radixrt.forms.form_process import Refusal, llguidance_matcher, token_map
from radixrt.forms.vocabulary import Vocabulary
from radixrt.parsers.forcing import forced_grammar
from radixrt.text.tokenizer import load_tokenizer
from tests.support.small_tokenizers import HARMONY_TOKENS, byte_level
from tests.support.transcripts import CODER, HARMONY, HERMES, LLAMA, OSLO, TO_WEATHER, WEATHER, coder

REQUIRED = {**WEATHER, "required": ["city"], "additionalProperties": False}
PARAMETERS: dict[str, Any] = {"weather": REQUIRED, "now": {}}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level(("<s>", "</s>", *HARMONY_TOKENS, "<|constrain|>")).save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    map_ = token_map(Vocabulary(tokenizer.vocab_size, (1,), tokenizer.serialized()).as_json)

    def takes(grammar: str, text: str) -> bool:
        """Whether a text has the form, whole."""
        matcher = llguidance_matcher(map_, "grammar", grammar, drops_blank=False)
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    return takes


def forced(parser: str, reasoning: str | None = None, parameters: Any = PARAMETERS, **more: Any) -> str:
    return forced_grammar(parser, reasoning, parameters, **{"several": True, "is_thinking": False, **more})


@pytest.mark.parametrize(
    ("parser", "call"), [("hermes", HERMES), ("llama3_json", LLAMA), ("qwen3_coder", CODER), ("harmony", "")]
)
def test_calls_are_taken_and_nothing_else(parser: str, call: str, tokens: Any) -> None:
    reasoning = "harmony" if parser == "harmony" else None
    call = call or HARMONY.removesuffix("<|call|>")
    grammar = forced(parser, reasoning)
    assert tokens(grammar, call)
    for bad in (
        call.replace("weather", "rain"),
        call.replace("city", "town"),
        f"I'll look. {call}",
        "Yes",
        call[:-2],
    ):
        assert not tokens(grammar, bad)
    for bad in (call.replace('"days": 3', '"days": x'), call.replace("\n3\n", "\nthree\n")):
        assert tokens(grammar, bad) == (bad == call)
    several = parser in ("hermes", "qwen3_coder")
    assert tokens(grammar, f"{call}\n{call}") == several
    assert not tokens(forced(parser, reasoning, several=False), f"{call}\n{call}")
    assert not tokens(forced(parser, reasoning, {"now": {}}), call)


def test_thoughts_come_before(tokens: Any) -> None:
    grammar = forced("hermes", "think")
    for text in (HERMES, f"<think>\na < b\n</think>\n\n{HERMES}"):
        assert tokens(grammar, text)
    for text in (f"<think>\na\n{HERMES}", f"a</think>{HERMES}"):
        assert not tokens(grammar, text)
    grammar = forced("hermes", "think", is_thinking=True)
    assert tokens(grammar, f"a\n</think>\n\n{HERMES}")
    assert not tokens(grammar, HERMES)
    assert tokens(forced("harmony", "harmony"), f"{TO_WEATHER}{OSLO}")


def test_values_of_qwen3_coder(tokens: Any) -> None:
    properties = {
        "text": {"type": "string", "description": "free"},
        "unit": {"type": "string", "enum": ["C", 'a"b']},
        "list": {"type": "array", "items": {"$ref": "#/$defs/n"}},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["unit"],
        "$defs": {"n": {"type": "integer"}},
    }
    grammar = forced("qwen3_coder", parameters={"weather": schema})
    for taken in (("unit", "C"), ("text", "a\n</b>", "unit", 'a"b', "list", "[1, 2]")):
        assert tokens(grammar, coder(*taken))
    for bad in ((), ("unit", "F"), ("unit", "C", "text", "a"), ("unit", "C", "list", '["a"]')):
        assert not tokens(grammar, coder(*bad))
    within = coder("text", "a", "unit", "C").replace("a\n</parameter>", "a</parameter>")
    assert tokens(grammar, within)  # the first tag ends a text
    assert not tokens(grammar, within.replace("a</parameter>", "a</parameter> b\n</parameter>"))


def test_blanks_have_an_end(tokens: Any) -> None:
    assert not tokens(forced("hermes"), HERMES.replace(': "Oslo"', ':      "Oslo"'))


@pytest.mark.parametrize(
    ("parser", "schema", "message"),
    [
        ("hermes", {"type": "array"}, "weather.parameters is no schema of an object"),
        ("hermes", {"properties": {"a": {"nullable": True}}}, "weather.parameters cannot be forced: .*nullable"),
        ("hermes", {"properties": {"a ::= b": {}}}, "a schema holds '::='"),
        ("qwen3_coder", {"properties": {}, "required": [["a"]]}, "parameters has a 'required' that is no list"),
        ("qwen3_coder", {"required": 5}, "parameters has a 'required' that is no list of names"),
        ("qwen3_coder", {"anyOf": []}, "weather.parameters has 'anyOf', which cannot be forced"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "a"}}}, "parameters.a has 'pattern'"),
        ("qwen3_coder", {"properties": {"a<": {}}}, "parameters.a< cannot be forced: a parameter's name"),
        ("qwen3_coder", {"properties": {}, "required": ["a"]}, "requires 'a', which is not among its"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "enum": [1]}}}, "an enum that is no list of str"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "enum": ["b</parameter>"]}}}, "ends a parameter"),
    ],
)
def test_what_cannot_be_forced(parser: str, schema: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        forced(parser, parameters={"weather": schema})


def test_escapes_are_held_to_patterns_too(tokens: Any) -> None:
    city = {"type": "string", "pattern": '^[^"]+$'}
    grammar = forced("hermes", parameters={"weather": {**REQUIRED, "properties": {"city": city}}})
    call = HERMES.replace(', "days": 3', "")
    assert tokens(grammar, call)
    assert not tokens(grammar, call.replace("Oslo", '\\"'))


def test_schemas_set_no_options_of_their_own(tokens: Any) -> None:
    with pytest.raises(Refusal, match="x-guidance is not taken"):
        tokens(forced("hermes", parameters={"weather": {"x-guidance": {"lenient": True}}}), HERMES)
