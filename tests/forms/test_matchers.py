"""Whatever tokens are drawn through masks, the text has its form."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from radixrt.builtin import MODEL_PATH
from radixrt.errors import FormError
from radixrt.form_spec import FormEngine, FormSpec
from radixrt.forms.compiler import FormCompiler, KnownForm
from radixrt.forms.form_process import llguidance_matcher, token_map
from radixrt.forms.matcher import mask_words
from radixrt.forms.vocabulary import Vocabulary
from radixrt.frontend.request_builder import vocabulary_of
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.small_tokenizers import small_tokenizer
from tests.support.walks import allowed, compiler_of, walk

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("llguidance", "jsonschema")),
    reason="llguidance or jsonschema is not installed: pip install 'radixrt[test]'",
)
HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
NEEDS_XGRAMMAR = pytest.mark.skipif(not HAS_XGRAMMAR, reason="xgrammar is not installed")


@dataclass
class Subject:
    """A model's tokens."""

    tokenizer: Tokenizer
    compiler: FormCompiler
    ends: frozenset[int]

    def texts(self, kind: str, text: str, engine: Any = "auto", count: int = 4) -> list[str]:
        form = self.compiler.compile(FormSpec(kind, text, engine), self.ends)
        return [walk(form, self.tokenizer, self.ends, seed) for seed in range(count)]


@pytest.fixture(scope="module", params=["builtin", "smollm2"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "builtin":
        tokenizer, size = load_tokenizer(MODEL_PATH), 1632
    else:
        tokenizer, size = request.getfixturevalue("smollm"), 49152
    compiler = compiler_of(tokenizer, size, (2,))
    yield Subject(tokenizer, compiler, frozenset([2]))
    compiler.close()


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


NAME = {"type": "string", "maxLength": 8}
NODE = closed({"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
SCHEMAS: dict[str, dict[str, Any]] = {
    "types": {"type": ["integer", "null", "boolean"]},
    "nested": closed({"a": closed({"b": closed({"c": NAME}, required=["c"])}, required=["b"])}, required=["a"]),
    "optional": closed({"a": {"type": "integer"}, "b": {"type": "null"}, "c": NAME}, required=["b"]),
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, NAME], "items": False, "minItems": 2},
    "enum": {"enum": ["red", "größer", 1, 2.5, None, True, [1, {"a": []}], ""]},
    "const": {"const": {"a": ["é", 'quo"te\\', 3]}},
    "refs": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "anyOf": {"anyOf": [{"type": "integer"}, closed({"x": NAME}, required=["x"]), {"const": "none"}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}(é|ß)?$"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "integers": {"type": "integer", "minimum": -12, "exclusiveMaximum": 130},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 10},
    "numbers": {"type": "number", "exclusiveMinimum": -0.5, "maximum": 12.25},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^[a-c]$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "count of keys": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "unicode": closed({"größe": {"enum": ["日本", "😀", "\u2028", "\t"]}}, required=["größe"]),
}


@pytest.mark.long_unless(kept=lambda given: given["subject"] == "builtin" or given["name"] in ("types", "unicode"))
@pytest.mark.parametrize("name", SCHEMAS)
def test_json(subject: Subject, name: str) -> None:
    import jsonschema

    schema = SCHEMAS[name]
    validator: Any = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for text in subject.texts("json_schema", json.dumps(schema)):
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    "negated", ["[^_-]", r"[^\s-]", "[^-a]", "[^^]", r"[^\]\[]", "[^]a]", r"[^\w.-]", "[^a-z0-9_-]"]
)
def test_negated_classes(subject: Subject, negated: str) -> None:
    schema = {"type": "string", "pattern": f"^{negated}{{1,4}}$"}
    for text in subject.texts("json_schema", json.dumps(schema), "llguidance"):
        assert re.fullmatch(schema["pattern"], json.loads(text), re.ASCII), text  # as in ECMAScript


def test_brackets_that_a_schema_escapes(subject: Subject) -> None:
    """As in ECMAScript; in Rust's syntax they are the borders of a word."""
    schema = {"type": "string", "pattern": r"^\<[a\>]\\\>$"}
    found = subject.texts("json_schema", json.dumps(schema), "llguidance", count=9)
    assert {json.loads(text) for text in found} == {"<a\\>", "<>\\>"}


@pytest.mark.parametrize("of_a_key", [False, True])
def test_what_a_class_leaves_out_does_not_come_escaped(subject: Subject, of_a_key: bool) -> None:
    schema: dict[str, Any] = {"type": "string", "pattern": '^[^"]$'}
    if of_a_key:
        schema = {
            "type": "object",
            "patternProperties": {'^[^"]$': {"type": "null"}},
            "additionalProperties": False,
        }
    form = subject.compiler.compile(FormSpec("json_schema", json.dumps(schema)), subject.ends)
    for inner, may_come in (("a", True), (r"\n", True), (r"\"", False), (r"\\", True)):
        matcher, text = form.matcher(), f'{{"{inner}": null}}' if of_a_key else f'"{inner}"'
        ids = subject.tokenizer.encode(text, add_special_tokens=False).tolist()
        came = True
        for token in ids:
            came = came and token in allowed(form, matcher)
            if came:
                matcher.push(token)
        assert came is may_come, text


def test_any_object(subject: Subject) -> None:
    for text in subject.texts("json_schema", '{"type":"object"}'):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-[a-f]{2,4}",
        r"(yes|no)( maybe)?",
        r"[^a-z\"]{1,5}é",
        r"^(ab|ba){1,9}$",
        r"(?i)abc",
        r"x\n\ty",
        r".{0,6}",
    ],
)
@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
def test_regular_expressions(subject: Subject, pattern: str, engine: str) -> None:
    if engine == "xgrammar" and not HAS_XGRAMMAR:
        pytest.skip("xgrammar is not installed")
    if engine == "xgrammar" and "(?" in pattern:
        with pytest.raises(FormError, match="would be misread"):
            subject.texts("regex", pattern, engine)
        return
    for text in subject.texts("regex", pattern, engine):
        assert re.fullmatch(pattern, text), text


@NEEDS_XGRAMMAR
def test_both_engines_read_a_pattern_alike(smollm: Tokenizer) -> None:
    """A dot takes no new line, as in Rust's syntax and Python's."""
    subject = Subject(smollm, compiler_of(smollm, 49152, (2,)), frozenset([2]))
    engines: tuple[FormEngine, ...] = ("llguidance", "xgrammar")
    texts = ("a", "\n", "\r", ".", "1", "é", "a.b", "a\nb", "ab", "\\x", "\\\n", "[x]b", "[\n]b", "日", " ")
    for pattern in (".", "[.]", r"\.", "a.?b|.", "[^a]", r"[\d.]", r"\\.", r"(\[.\])?.", ".|\n"):
        forms = [subject.compiler.compile(FormSpec("regex", pattern, one), subject.ends) for one in engines]
        for text in texts:
            is_taken = re.fullmatch(pattern, text) is not None
            assert [takes(form, subject, text) for form in forms] == [is_taken] * 2, (pattern, text)
    subject.compiler.close()


def takes(form: KnownForm, subject: Subject, text: str) -> bool:
    """Whether a text has the form, in the tokens that its tokenizer makes of it."""
    matcher = form.matcher()
    for token in subject.tokenizer.encode(text, add_special_tokens=False).tolist():
        if token not in allowed(form, matcher):
            return False
        matcher.push(token)
    return bool(matcher.is_complete or subject.ends & {*allowed(form, matcher)})


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
def test_choices(subject: Subject, engine: str) -> None:
    if engine == "xgrammar" and not HAS_XGRAMMAR:
        pytest.skip("xgrammar is not installed")
    choices = ["yes", "no", "yes, but", 'a "b"\\', "日本 é", "x\ny"]
    found = subject.texts("choice", json.dumps(choices), engine, count=12)
    assert set(found) <= set(choices)
    assert len(set(found)) > 2


def test_many_choices(subject: Subject) -> None:
    choices = [f"label {number}" for number in range(3000)]
    assert set(subject.texts("choice", json.dumps(choices), "llguidance", count=4)) <= set(choices)


def test_a_blank_that_decoding_drops_may_come_first(subject: Subject) -> None:
    """As models begin a word; where it is not dropped, it must not."""
    choices = ["yes", " no", "  oh"]
    form = subject.compiler.compile(FormSpec("choice", json.dumps(choices)), subject.ends)
    drops_blank = subject.tokenizer.drops_blank
    assert drops_blank is (subject.tokenizer.vocab_size == 1632)
    found = {walk(form, subject.tokenizer, subject.ends, seed) for seed in range(30)}
    assert found == set(choices)
    for kind, text in (
        ("regex", "yes"),
        ("choice", '["yes"]'),
        ("grammar", 'start: "yes"'),
        ("json_schema", "{}"),
    ):
        matcher = (form := subject.compiler.compile(FormSpec(kind, text), subject.ends)).matcher()
        pieces = {subject.tokenizer.decode_inside([i], True) or "" for i in allowed(form, matcher)}
        assert any(piece.startswith(" ") for piece in pieces) is drops_blank


@pytest.mark.parametrize("engine", ["llguidance", pytest.param("xgrammar", marks=NEEDS_XGRAMMAR)])
def test_a_blank_that_a_form_begins_with_is_not_dropped(subject: Subject, engine: str) -> None:
    for kind, text, pattern in (
        ("regex", " yes", " yes"),
        ("regex", " {2}no|[ -]x", " {2}no|[ -]x"),
        ("choice", '[" yes","no"]', " yes|no"),
        ("grammar", 'root ::= " "+ "yes" | "no"', " +yes|no"),
    ):
        for found in subject.texts(kind, text, engine, count=12):
            assert re.fullmatch(pattern, found)


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" B+ ("," B)*\nB: /[0-9]/', 'root ::= "a" b+ ("," b)*\nb ::= [0-9]'],
    ids=["lark", "gbnf"],
)
def test_grammars(subject: Subject, grammar: str) -> None:
    for text in subject.texts("grammar", grammar):
        assert re.fullmatch(r"a[0-9]+(,[0-9])*", text)


@NEEDS_XGRAMMAR
@pytest.mark.parametrize(
    "schema",
    [
        closed({"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "null"}}, minProperties=2),
        {"type": "string", "format": "uri-reference"},
    ],
    ids=["count of keys", "format"],
)
def test_what_xgrammar_takes_over(subject: Subject, schema: dict[str, Any]) -> None:
    import jsonschema

    asked = FormSpec("json_schema", json.dumps(schema))
    assert subject.compiler.compile(asked, subject.ends).engine == "xgrammar"
    with pytest.raises(FormError, match="llguidance: "):
        subject.texts(asked.kind, asked.text, "llguidance")
    for text in subject.texts(asked.kind, asked.text):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
def test_tokens_that_end_an_answer(subject: Subject, engine: Any) -> None:
    """Those of the request may come where the form may end, and the model's own no more if they are ignored."""
    if engine == "xgrammar" and not HAS_XGRAMMAR:
        pytest.skip("xgrammar is not installed")
    asked, pieces = FormSpec("regex", "a|ab", engine), [subject.tokenizer.piece(i) for i in range(1600)]
    a, b = pieces.index("a"), pieces.index("b")
    for ends in (frozenset([2]), frozenset([2, 0, 9]), frozenset([9]), frozenset[int]()):
        form = subject.compiler.compile(asked, ends)
        matcher = form.matcher()
        assert not set(allowed(form, matcher)) & {0, 2, 9}
        matcher.push(a)
        assert not matcher.is_complete
        assert set(allowed(form, matcher)) & {0, 2, 9} == ends
        at_end = form.matcher()
        at_end.push(a)
        if ends:
            at_end.push(max(ends))
            assert at_end.is_complete
            with pytest.raises(ValueError, match="follows the end"):
                at_end.push(a)
        matcher.push(b)
        assert matcher.is_complete
        assert set(allowed(form, matcher)) == (ends or {2})
        with pytest.raises(ValueError, match=f"token {a} is not taken"):
            matcher.push(a)


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
def test_tokens_of_many_answers(subject: Subject, engine: Any) -> None:
    """Pushed together as one by one; what one must not take is told, and is nobody else's."""
    if engine == "xgrammar" and not HAS_XGRAMMAR:
        pytest.skip("xgrammar is not installed")
    forms = [
        subject.compiler.compile(FormSpec("regex", text, engine), subject.ends) for text in ("a*", "[ab]{2}")
    ]
    pieces = [subject.tokenizer.piece(i) for i in range(1600)]
    a, b, end = pieces.index("a"), pieces.index("b"), max(subject.ends)
    matchers = {place: forms[place % 2].matcher() for place in (5, 4, 0, 1, 2, 3, 7)}
    joined = forms[1].joined(matchers)

    def told(*token_ids: int) -> dict[int, str]:
        ended = joined.push(np.array(token_ids, np.int32))
        return {place: str(error).partition(":")[0] for place, error in ended.items()}

    assert told(a, a, end, a, a, b, 9, -1) == {2: "None"}
    assert told(a, b, a, end, b, a, -1, b) == {
        1: "None",
        2: f"token {a} follows the end of the answer",
        3: f"token {end} is not taken by the form",
        4: f"token {b} is not taken by the form",
        5: "None",
    }
    complete = {place for place, matcher in matchers.items() if matcher.is_complete}
    assert complete == {1, 2, 5}
    assert set(allowed(forms[0], matchers[0])) >= {a, end}
    assert told(*[-1] * 8) == {}
    assert told(*[-1] * 7, end) == {7: f"token {end} is not taken by the form"}


def test_masks_of_many_answers(subject: Subject) -> None:
    """They go into their rows, whatever form each has."""
    forms = [subject.compiler.compile(FormSpec("choice", text), subject.ends) for text in ('["aa"]', '["b","c"]')]
    matchers = {place: forms[place % 2].matcher() for place in range(9)}
    masks = np.zeros((9, mask_words(forms[0].vocab_size)), np.int32)
    forms[0].joined(matchers).fill(masks)
    for row, matcher in matchers.items():
        found = np.flatnonzero(np.unpackbits(masks[row].view(np.uint8), bitorder="little"))
        assert found.tolist() == allowed(forms[0], matcher)
    assert not np.array_equal(masks[0], masks[1])
    twice = {row: matchers[place] for row, place in ((1, 0), (4, 0), (5, 1), (7, 0))}
    masks[:] = 77
    forms[0].joined(twice).fill(masks)  # as the n answers to a prompt begin; nobody else's rows are touched
    assert [np.array_equal(masks[1], masks[row]) for row in (4, 5, 7)] == [True, False, True]
    assert (masks[[0, 2, 3, 6, 8]] == 77).all()
    masks[:] = 77
    forms[0].joined(matchers).fill(masks, {0, 3, 8})
    assert (masks[[0, 3, 8]] == 77).all()
    assert [*np.flatnonzero(np.unpackbits(masks[4].view(np.uint8), bitorder="little"))] == allowed(
        forms[0], matchers[4]
    )
    forms[0].joined(matchers).fill(masks, range(9))
    with pytest.raises(ValueError, match="rows without gaps"):
        forms[0].joined(matchers).fill(masks[:, ::2])


def test_masks_within_strings_of_limited_length(subject: Subject) -> None:
    """They are those of llguidance's own slices of the tokens. Of many tokens they take less time: about 0.6."""
    from llguidance import LLTokenizer

    size = subject.compiler.compile(FormSpec("regex", "a"), subject.ends).vocab_size
    tokens = token_map(Vocabulary(size, (2,), subject.tokenizer.serialized()).as_json)
    ids = tokens.greedy_tokenize('"') + tokens.greedy_tokenize("abcdefghij" * 5)
    seconds, masks = [], []
    for each in (tokens, tokens.with_slices(LLTokenizer.general_slices())):
        form = llguidance_matcher(each, "json_schema", '{"type":"string","maxLength":60}', drops_blank=False)
        runs = []
        for _ in range(6):  # the first one learns
            matcher, found, began = form.deep_copy(), [], time.thread_time()
            for token_id in ids:
                assert matcher.consume_token(token_id)
                found.append(matcher.compute_bitmask())
            runs.append(time.thread_time() - began)
        seconds.append(min(runs))
        masks.append(found)
    assert masks[0] == masks[1]
    assert size < 10_000 or seconds[0] < 0.85 * seconds[1], seconds


@pytest.mark.parametrize("name", ["unicode", "date", "nested"])
def test_what_is_forced_is_what_masks_leave(subject: Subject, name: str) -> None:
    """Token by token: where something is forced, nothing else is allowed, and it ends no answer."""
    form = subject.compiler.compile(FormSpec("json_schema", json.dumps(SCHEMAS[name])), subject.ends)
    draw, total = random.Random(1), 0
    for _ in range(4):
        matcher, count = form.matcher(), 0
        while not matcher.is_complete and count < 60:
            forced = matcher.forced()
            assert not subject.ends & {*forced}
            for token_id in forced:
                assert allowed(form, matcher) == [token_id]
                matcher.push(token_id)
            total += len(forced)
            count += 1 + len(forced)
            if choices := [token_id for token_id in allowed(form, matcher) if token_id not in subject.ends]:
                matcher.push(draw.choice(choices))
    assert total
    assert not matcher.is_complete or matcher.forced() == []


def test_a_matcher_that_cannot_go_on_says_so(subject: Subject) -> None:
    """No end may come, so that the next token meets the error."""
    form = subject.compiler.compile(FormSpec("choice", '["aa"]'), subject.ends)
    matcher = form.matcher()
    with pytest.raises(ValueError, match="token 9 is not taken by the form"):
        matcher.push(9)
    assert not matcher.is_complete
    mask = np.zeros((1, mask_words(form.vocab_size)), np.int32)
    form.joined({0: matcher}).fill(mask)
    found = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert found.sum() > 1000
    assert not found[2]
    with pytest.raises(ValueError, match="token 5 is not taken by the form"):
        matcher.push(5)


@pytest.mark.parametrize(
    "kind", ["byte level", "byte fallback", "byte fallback, no strip", "bare", "bare, no byte fallback"]
)
def test_tokenizers_of_other_kinds(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    compiler = FormCompiler(vocabulary_of(tokenizer, tokenizer.vocab_size + 40, (2,)))
    form = compiler.compile(FormSpec("choice", '["Oslo","no"]'), frozenset([2]))
    assert {walk(form, tokenizer, frozenset([2]), seed) for seed in range(9)} == {"Oslo", "no"}
    for pattern in (" no", "[ O]no", "[a-z ]{3}"):
        form = compiler.compile(FormSpec("regex", pattern), frozenset([2]))
        for seed in range(9):
            assert re.fullmatch(pattern, walk(form, tokenizer, frozenset([2]), seed))
    compiler.close()


def test_a_tokenizer_without_bytes_is_refused() -> None:
    tokenizer = small_tokenizer("wordpiece")
    with pytest.raises(FormError, match="does not spell bytes, which forms need: its decoder is WordPiece"):
        compiler_of(tokenizer, tokenizer.vocab_size, (2,)).compile(FormSpec("regex", "a"), frozenset([2]))
