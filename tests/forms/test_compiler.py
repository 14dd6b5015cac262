"""Forms are tried in a process of their own, and kept: bombs, refusals, a process that is killed, a cache."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from radixrt.builtin import MODEL_PATH
from radixrt.errors import FormError, ParameterError
from radixrt.form_spec import FormSpec
from radixrt.forms import compiler as compiler_module
from radixrt.forms import trial
from radixrt.forms.compiler import FormCompiler
from radixrt.forms.llguidance_form import ANSWERS_EACH
from radixrt.forms.schema_keywords import llguidance_refusal, misread_pattern, xgrammar_refusal
from radixrt.forms.trial import Trials
from radixrt.forms.vocabulary import Vocabulary
from radixrt.text.tokenizer import load_tokenizer

NEEDS_LLGUIDANCE = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None,
    reason="llguidance is not installed: pip install 'radixrt[test]'",
)
ENDS = frozenset([2])
SLOW = FormSpec("regex", "(a{1000}){1000}")  # a second or more


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(1632, (2,), load_tokenizer(MODEL_PATH).serialized())


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Iterator[FormCompiler]:
    found = FormCompiler(vocabulary)
    yield found
    found.close()


def schema(**given: Any) -> FormSpec:
    return FormSpec("json_schema", json.dumps(given))


@NEEDS_LLGUIDANCE
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (FormSpec("regex", "a{1000000}"), "too many expressions"),
        (SLOW, "too many expressions|takes more than"),
        (FormSpec("regex", "(" * 100_000 + "a" + ")" * 100_000), "invalid regex"),
        (FormSpec("regex", "("), "unclosed group"),
        (FormSpec("regex", r"(?=a)b"), "look-around"),
        (FormSpec("regex", r"(a)\1"), "backreferences are not supported"),
        (FormSpec("grammar", "start: missing"), "missing"),
        (FormSpec("grammar", 'root ::= "a" ('), "llguidance: "),
        (FormSpec("grammar", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance is not"),
        (schema(type="object", **{"not": {}}), 'llguidance: Unimplemented keys: \\["not"\\]'),
        (schema(type="object", **{"not": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: \\["not"\\]'),
        (schema(type="object", properties={"a": {"nullable": True}}), "/properties/a has 'nullable', which"),
        (schema(type="object", minProperties=2), "'minProperties' that a repeated key would reach"),
        (schema(disallow="string"), "the schema has 'disallow', which would be ignored"),
        (schema(type="string", format="phone"), "llguidance: Unknown format: phone"),
        (schema(type="integer", minimum=5, maximum=3), "Unsatisfiable schema"),
        (schema(**{"$ref": "#"}), "no text has it, or no token of the model spells how one begins$"),
        (schema(oneOf=[{"type": "integer"}, {"type": "number"}]), "'oneOf' whose schemas may overlap .* 'anyOf'$"),
        (FormSpec("grammar", "start: start"), "no text has it, or no token"),
        (FormSpec("grammar", "start: <|a|>"), r'unknown special token: "<\|a\|>"'),
        (schema(**{"$ref": "#/$defs/none"}), "Pointer '/\\$defs/none' does not exist"),
        (schema(**{"$ref": "http://example.com/x"}), "http://example.com/x"),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, FormSpec) else "",
)  # fmt: skip
def test_refusals_come_soon_and_are_remembered(compiler: FormCompiler, asked: FormSpec, message: str) -> None:
    asked = FormSpec(asked.kind, asked.text, "llguidance")
    began = time.monotonic()
    with pytest.raises(FormError, match=message) as first:
        compiler.compile(asked, ENDS)
    assert time.monotonic() - began < 2 * trial.MAX_SECONDS
    assert str(first.value).startswith(f"the {asked.kind} cannot be the form of an answer: llguidance: ")
    assert len(str(first.value)) < 450
    assert isinstance(first.value, ParameterError)
    began = time.monotonic()
    with pytest.raises(FormError):
        compiler.compile(asked, ENDS)
    assert time.monotonic() - began < 0.1


@NEEDS_LLGUIDANCE
def test_a_form_that_takes_too_long(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed; the next form has another one."""
    compiler, trials = FormCompiler(vocabulary), Trials(vocabulary)
    assert trials.try_form("llguidance", "regex", "a").reason is None
    before = trials.process_id
    verdict = trials.try_form("llguidance", SLOW.kind, SLOW.text, seconds=0.1)
    assert verdict.is_bomb
    assert verdict.reason == "it takes more than 0.1 seconds to compile"
    assert trials.process_id is None
    assert trials.try_form("llguidance", "regex", "a").reason is None
    assert trials.process_id != before
    trials.close()
    # What one engine cannot bear, no other one is given.
    monkeypatch.setattr(compiler._trials, "try_form", lambda *asked: verdict)
    with pytest.raises(FormError, match=r"llguidance: it takes more than 0\.1 seconds to compile$"):
        compiler.compile(schema(type="object"), ENDS)


@NEEDS_LLGUIDANCE
def test_a_form_that_takes_too_much_memory(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_BYTES", 2**25)
    trials = Trials(vocabulary)
    verdict = trials.try_form("llguidance", SLOW.kind, SLOW.text)
    assert verdict.is_bomb
    assert "of memory, or ends its compiler (" in str(verdict.reason)
    assert trials.try_form("llguidance", "regex", "a").reason is None
    trials.close()


@NEEDS_LLGUIDANCE
def test_the_process_is_killed(vocabulary: Vocabulary) -> None:
    trials = Trials(vocabulary)
    trials.try_form("llguidance", "regex", "a")
    assert trials.process_id is not None
    os.kill(trials.process_id, signal.SIGKILL)
    while trials.process_id is not None:
        time.sleep(0.01)
    assert trials.try_form("llguidance", "regex", "b").reason is None

    def kill() -> None:
        assert trials.process_id is not None
        os.kill(trials.process_id, signal.SIGKILL)

    timer = threading.Timer(0.2, kill)
    timer.start()
    with pytest.raises(FormError, match="was killed, by signal 9: "):  # no verdict of the form
        trials.try_form("llguidance", SLOW.kind, SLOW.text)
    timer.join()
    trials.close()


@NEEDS_LLGUIDANCE
def test_equal_forms_are_compiled_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    compiled = compiler_module.compiled

    def counting(tokens: Any, kind: str, text: str, drops_blank: bool) -> Any:
        made.append(text)
        return compiled(tokens, kind, text, drops_blank)

    monkeypatch.setattr(compiler_module, "compiled", counting)
    compiler = FormCompiler(vocabulary, max_kept=2)

    def compile(text: str, ends: frozenset[int] = ENDS) -> None:
        compiler.compile(FormSpec("regex", text), ends)

    for text in ("a", "b", "a", "a"):
        compile(text)
    compile("a", frozenset([5]))  # other end tokens take no other compilation
    assert made == ["a", "b"]
    compile("c")  # b was used longest ago
    compile("a")
    compile("b")
    assert made == ["a", "b", "c", "b"]
    assert compiler.num_kept == 2
    small = FormCompiler(vocabulary, max_kept_bytes=1)
    for text in ("a", "b"):
        small.compile(FormSpec("regex", text), ENDS)
    assert small.num_kept == 1
    for each in (compiler, small):
        each.close()


@NEEDS_LLGUIDANCE
def test_a_form_of_many_answers_begins_several_times(vocabulary: Vocabulary) -> None:
    """Threads wait for one another at copies of the same beginning."""
    asked = FormSpec("choice", '["yes", "no"]')
    compiler = FormCompiler(vocabulary)
    lanes = {compiler.compile(asked, ENDS).matcher().lane for _ in range(ANSWERS_EACH)}
    size = compiler.kept_bytes
    assert len(lanes) == 1
    form = compiler.compile(asked, ENDS, num_answers=2 * ANSWERS_EACH)  # with those before
    assert sorted(Counter(form.matcher().lane for _ in range(6)).values()) == [2, 2, 2]
    assert (compiler.num_kept, compiler.kept_bytes) == (1, 3 * size)
    most = len({compiler.compile(asked, ENDS, num_answers=10**6).matcher().lane for _ in range(200)})
    assert most == 4 * min(16, os.cpu_count() or 1)
    small = FormCompiler(vocabulary, max_kept_bytes=16 * size - 1)  # a form that takes much begins once
    assert len({small.compile(asked, ENDS, num_answers=10**6).matcher().lane for _ in range(9)}) == 1
    for each in (compiler, small):
        each.close()


@NEEDS_LLGUIDANCE
def test_threads_take_turns(compiler: FormCompiler) -> None:
    engines: list[str] = []
    texts = [f"x{number % 5}" for number in range(20)]
    threads = [
        threading.Thread(target=lambda t=t: engines.append(compiler.compile(FormSpec("regex", t), ENDS).engine))  # type: ignore[misc]
        for t in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engines == ["llguidance"] * 20


def test_a_package_that_is_missing(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "find_spec", lambda name: None)
    with pytest.raises(FormError, match=r"not installed: pip install 'radixrt\[grammar\]'"):
        FormCompiler(vocabulary)


@NEEDS_LLGUIDANCE
def test_the_other_package_is_missing(compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "find_spec", lambda name: None)
    with pytest.raises(FormError, match="llguidance: Unknown format: iri; xgrammar is not installed"):
        compiler.compile(schema(type="string", format="iri"), ENDS)


@pytest.mark.parametrize(
    "given",
    [
        {"type": "object", "properties": {"nullable": {"type": "string"}, "extends": {}}},
        {"const": {"nullable": True}},
        {"nullable": False},
    ],
)
def test_names_of_properties_are_no_keywords(given: dict[str, Any]) -> None:
    assert llguidance_refusal(given) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"const": 2**53 + 1}, "the schema has 9007199254740993, which would be rounded"),
        ({"enum": [1, {"a": [10**400]}]}, "which would be rounded"),
        ({"const": 2**60}, None),
        ({"type": "integer", "minimum": 2**53 + 1}, "a 'minimum' that would be rounded beyond it"),
        ({"type": "integer", "maximum": 2**53 + 1}, None),  # the float is less
        ({"type": "integer", "maximum": 2**53 + 3}, "a 'maximum'"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "an? 'exclusiveMinimum'"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, None),
        ({"type": "integer", "minimum": 1e30}, "a 'minimum'"),
        ({"type": "integer", "minimum": 10**400}, "a 'minimum'"),
        ({"$ref": "#/components/a", "components": {"a": {"nullable": True}}}, "#/components/a has 'nullable'"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "an 'exclusiveMinimum' of 0 with a bound below 1"),
        ({"exclusiveMinimum": 0.0, "exclusiveMaximum": 1e-9}, "which would take 0"),
        ({"exclusiveMinimum": 0, "maximum": 1}, None),
        ({"minimum": 0, "maximum": 0.5}, None),
        ({"$ref": "#/a", "a": {"items": {"$ref": "#/a"}}}, None),
        ({"$ref": "#/b/1", "b": [{}]}, None),
    ],
)
def test_what_llguidance_would_ignore_or_round_is_refused(given: dict[str, Any], message: str | None) -> None:
    found = llguidance_refusal(given)
    assert found is None if message is None else re.search(message, str(found))


def test_references_that_go_on_for_long() -> None:
    """No deeper than others, and yet each within the one before."""
    linked = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**linked, "d3000": {"nullable": True}}}
    assert (llguidance_refusal(schema) or "").startswith("#/$defs/d3000 has 'nullable'")


@NEEDS_LLGUIDANCE
@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")
@pytest.mark.parametrize("asked", [FormSpec("regex", "a**"), FormSpec("grammar", "root ::= x")])
def test_reasons_of_xgrammar_name_no_place_in_its_code(compiler: FormCompiler, asked: FormSpec) -> None:
    with pytest.raises(FormError, match=r"an answer: xgrammar: (Regex|EBNF) pars\w+ error at (position|line)"):
        compiler.compile(FormSpec(asked.kind, asked.text, "xgrammar"), ENDS)


@NEEDS_LLGUIDANCE
@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")
def test_a_schema_that_refers_to_itself_alone(compiler: FormCompiler) -> None:
    with pytest.raises(FormError, match="no text has it"):
        compiler.compile(FormSpec("json_schema", '{"$ref":"#"}', "xgrammar"), ENDS)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer", "x-note": 1, "title": "A"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (OBJECT, None),
        ({"type": ["object", "null"], "minProperties": 1, "additionalProperties": {"type": "string"}}, None),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"const": 1}}}, None),
        ({"type": "string", "enum": ["a", "b"]}, None),
        ({"type": "integer", "const": 3}, None),
        ({"type": "string", "format": "uri-reference"}, None),
        ({"type": "integer", "enum": [1, "a"]}, "the schema has 'type' beside 'enum'"),
        ({"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}, "c": {}}}, None),
        ({"type": "object", "minProperties": 2, "additionalProperties": {}}, "that a repeated key would reach"),
        ({"type": "object", "patternProperties": {}}, "'patternProperties', which would be ignored or misread"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": {}}, "'contains'"),
        ({"allOf": [{}]}, "'allOf' without a type"),
        ({"oneOf": [{}]}, "'oneOf' without a type"),
        ({"minLength": 3}, "'minLength' without a type"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
        ({"$ref": "#", "minimum": 3}, "'minimum' beside '\\$ref'"),
        ({"anyOf": [{}], "required": ["a"]}, "'required' beside 'anyOf'"),
        ({"type": "string", "format": "date", "pattern": "a"}, "'format' and 'pattern', of which one"),
        ({"type": "string", "maxLength": 3}, "'maxLength', which would be ignored or misread"),
        ({"type": "string", "pattern": 'a"'}, "'\"' in a pattern, which would not be escaped"),
        ({"type": "string", "pattern": r"a\\\\"}, "in a pattern, which would not be escaped"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, "'b' in 'required' alone"),
        ({"anyOf": []}, "an 'anyOf' without schemas"),
        ({"$ref": "http://a/b"}, "the reference 'http://a/b', which would be ignored"),
        ({"$ref": "#a", "$defs": {"b": {"$anchor": "a"}}}, "the reference '#a'"),
        ({"$ref": "#/b/0/c~1d", "b": [{"c/d": {"type": "array", "contains": {}}}]}, "#/b/0/c~1d has 'contains'"),
        ({"type": 5}, "a 'type' that is neither"),
        ({"type": [{}]}, "a 'type' that is neither"),
        ({"enum": None}, "an 'enum' that is no list"),
        ({"const": {"a": [2**63]}}, "more than 64 bits"),
        ({"const": -(2**63)}, None),
        ({"type": "number", "minimum": 2**53 + 1}, "a 'minimum' that would be rounded"),
        ({"type": "integer", "minimum": 2**53 + 1}, None),
        ({"type": "number", "minimum": 1e-7}, "the bound 1e-07, which would be rounded"),
        ({"type": "number", "exclusiveMaximum": 207064130391.858}, "the bound 207064130391.858, which would be"),
        ({"type": "number", "minimum": -0.25, "maximum": 1e5}, None),
        ({"type": "string", "format": "iri"}, "the format 'iri', which would be ignored"),
        ({"type": "string", "pattern": "^(?!a)b"}, "'\\(\\?' in a pattern"),
        ({"properties": {"a": {"not": {}}}, "type": "object"}, "/properties/a has 'not'"),
        (
            {"type": "array", "items": {"type": "object", "dependentRequired": {}}},
            "/items has 'dependentRequired'",
        ),
    ],
)
def test_what_xgrammar_would_ignore_is_refused(given: dict[str, Any], message: str | None) -> None:
    found = xgrammar_refusal(given)
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(message, found)


@pytest.mark.parametrize(
    ("pattern", "found", "in_a_schema"),
    [
        ("^a+(?:b|[^c])$", None, None),
        (r"\$\^[$x]\d\w\.", None, None),
        (r"a\b", r"\b", r"\b"),
        (r"(a)\1", r"\1", r"\1"),
        ("a^b", "^", "^"),
        ("a$b", "$", "$"),
        ("(?i)a", "(?", "(?"),
        (r"\p{L}", r"\p", r"\p"),
        (r"\x41\u0041\-\_\ \\", None, None),
        (r"\x{41}", r"\x", r"\x"),
        (r"\<a", r"\<", None),  # a border of a word in Rust's syntax, a bracket in a schema
        (r"[\h]", r"\h", r"\h"),
        (r"a\S", r"\S", None),  # of ASCII alone to xgrammar
        (r"[\D]", r"\D", None),
        (r"[^\w.]", r"[^\w.]", None),
        (r"\a", None, r"\a"),  # the letter in a schema, a bell elsewhere
        (r"[\^a]", r"[\^a]", r"[\^a]"),
        ("[]a]", "[]", "[]"),
        ("[^]a]", "[^]", "[^]"),
        ("[[:alpha:]]", "[[:alpha:]", None),
        ("[a&&b]", "[a&&b]", None),
        (r"[\[a-]", None, None),
        (r"[\x41a]", r"\x", r"\x"),  # whose digits would go on
        ("[a", "[", "["),
        (r"[a-\d]", r"[a-\d]", r"[a-\d]"),
        ("\\", "\\", "\\"),
    ],
)
def test_patterns_that_xgrammar_would_misread(pattern: str, found: str | None, in_a_schema: str | None) -> None:
    assert misread_pattern(pattern) == found
    assert misread_pattern(pattern, is_of_schema=True) == in_a_schema
