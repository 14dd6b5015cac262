"""What a form wants is spelled by ordinary tokens that the model has, whatever else the tokenizer holds."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'radixrt[test]'")

from radixrt.errors import FormError
from radixrt.form_spec import FormSpec
from radixrt.forms.compiler import FormCompiler, KnownForm
from radixrt.forms.form_process import spells_every_text, token_map
from radixrt.forms.vocabulary import Vocabulary
from radixrt.frontend.request_builder import vocabulary_of
from radixrt.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import small_tokenizer
from tests.support.walks import allowed, walk

NEEDS_XGRAMMAR = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed"
)
ENGINES = ["llguidance", pytest.param("xgrammar", marks=NEEDS_XGRAMMAR)]
CLOSED = {"type": "object", "additionalProperties": False}
SMALL = ["byte level", "byte fallback", "byte fallback, no strip", "bare"]


def with_added(tokenizer: Tokenizer, *names: str, special: bool = True) -> str:
    """Its JSON with more added tokens, as those who fine-tune write it."""
    given = json.loads(tokenizer.serialized() or "")
    for place, name in enumerate(names):
        more = {"id": tokenizer.vocab_size + place, "content": name, "special": special}
        given["added_tokens"].append(
            {**more, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        )
    return json.dumps(given)


@cache
def compiler(vocabulary: Vocabulary) -> FormCompiler:
    return FormCompiler(vocabulary)


def spelled(form: KnownForm, ends: frozenset[int], seed: int) -> list[int]:
    """The tokens of an answer, those that are forced among them."""
    matcher, ids = form.matcher(), list[int]()
    while not matcher.is_complete:
        tokens = matcher.forced() if seed else []
        for token in tokens or [max(set(allowed(form, matcher)) - ends or ends)]:
            assert len(ids) < 200
            matcher.push(token)
            ids.append(token)
    return [token for token in ids if token not in ends]


def forms_of(text: str) -> list[FormSpec]:
    """Forms that only one text has."""
    pattern = re.sub(r"[\[\]|]", lambda found: "\\" + found[0], text)
    named = {text: {"enum": [text]}}
    return [
        FormSpec("json_schema", json.dumps({"const": text}, ensure_ascii=False)),
        FormSpec("json_schema", json.dumps({**CLOSED, "properties": named, "required": [text]})),
        FormSpec("json_schema", json.dumps({"type": "string", "pattern": f"^{pattern}$"})),
        FormSpec("choice", json.dumps([text])),
        FormSpec("regex", pattern),
        FormSpec("grammar", f"root ::= {json.dumps(text, ensure_ascii=False)}"),
    ]  # fmt: skip


def check(vocabulary: Vocabulary, tokenizer: Tokenizer, text: str, engine: Any) -> None:
    ends = frozenset(token for token in vocabulary.end_ids if token < vocabulary.size)
    for asked in forms_of(text):
        form = compiler(vocabulary).compile(FormSpec(asked.kind, asked.text, engine), ends)
        for seed in range(2):
            ids = spelled(form, ends, seed)
            found = tokenizer.decode(ids)  # without special tokens
            if asked.kind == "json_schema":
                found = json.loads(found)
                found = next(iter(found.values())) if isinstance(found, dict) else found
            assert found == text, (asked, ids)


@pytest.fixture(scope="module")
def vocabulary(smollm: Tokenizer) -> Vocabulary:
    """Of a model with fewer rows than tokens, as Gemma 3's 1B; SmolLM2's first token stands for what it lacks."""
    return Vocabulary(49152, (0, 2, 49153), with_added(smollm, "<pad>", "<image>"))


@pytest.mark.parametrize("engine", ENGINES)
def test_text_of_tokens_that_are_no_text(smollm: Tokenizer, vocabulary: Vocabulary, engine: Any) -> None:
    """None of which ends an answer before the form does; those without rows are never drawn."""
    for text in ("<|endoftext|>", "<|im_end|>", "a<|im_start|>b", "<repo_name><file_sep>", "<pad>, <image>!"):
        check(vocabulary, smollm, text, engine)
    form = compiler(vocabulary).compile(FormSpec("regex", "[^x]*", engine), frozenset([2]))
    tokens = allowed(form, form.matcher())
    assert 2 in tokens
    assert len(tokens) > 10_000
    assert max(tokens) < 49152


@pytest.mark.parametrize("kind", SMALL)
def test_text_of_special_tokens_of_every_kind(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id or 2,))
    for text in ("</s>", "<s>a</s>", "<tool>"):
        check(vocabulary, tokenizer, text, "auto")


@pytest.mark.parametrize("kind", [*SMALL, "bare, no byte fallback"])
def test_rows_of_every_kind(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    for more in (-3, 0, 40):
        vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size + more, (2,))
        form = compiler(vocabulary).compile(FormSpec("choice", '["he","no"]'), frozenset([2]))
        assert {walk(form, tokenizer, frozenset([2]), seed) for seed in range(9)} == {"he", "no"}


def test_an_end_that_is_an_ordinary_token() -> None:
    """It ends answers, so that it is no text in them."""
    tokenizer = small_tokenizer("byte level")
    (end,) = tokenizer.encode("he", add_special_tokens=False).tolist()
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, (end,))
    check(vocabulary, tokenizer, "hehe", "llguidance")
    form = compiler(vocabulary).compile(FormSpec("regex", "he|h"), frozenset([end]))
    assert end not in allowed(form, form.matcher())


def test_what_changes_texts_does_not_change_forms(smollm: Tokenizer) -> None:
    """Normalizers, blanks before a text, added tokens that take those beside them."""
    given = json.loads(with_added(smollm, "<think>", "[x]", special=False))
    given["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    given["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    given["added_tokens"][-1] |= {"lstrip": True, "rstrip": True}
    vocabulary = Vocabulary(49154, (2,), json.dumps(given))
    assert spells_every_text(token_map(vocabulary.as_json))
    for text in ("e\u0301 É", "Oslo", "a [x] b", "<think> b"):
        for asked in forms_of(text):
            form = compiler(vocabulary).compile(asked, frozenset([2]))
            for seed in range(2):
                ids = spelled(form, frozenset([2]), seed)
                found = smollm.decode([i for i in ids if i < 49152])
                assert asked.kind == "json_schema" or found.replace("a  b", "a [x] b") == text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("text", ["\x04", "a\x04b", "\U00050000"])
def test_what_no_token_spells_is_refused(vocabulary: Vocabulary, text: str, engine: Any) -> None:
    """SmolLM2 has no token of some bytes, and one that ends a text for what it does not know."""
    with pytest.raises(FormError, match=r"no token of the model spells (what must come next|how one begins)$"):
        compiler(vocabulary).compile(FormSpec("choice", json.dumps([text]), engine), frozenset([0, 2]))


def test_what_no_token_spells_ends_no_answer() -> None:
    """Found only on the way."""
    tokenizer = small_tokenizer("bare, no byte fallback")
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, (2,))
    assert not spells_every_text(token_map(vocabulary.as_json))
    form = compiler(vocabulary).compile(FormSpec("regex", "(no ){12}(no|he€)"), frozenset([2]))
    matcher = form.matcher()
    for piece in tokenizer.encode("no " * 12 + "he", add_special_tokens=False).tolist():
        assert matcher.forced() == []
        if piece in allowed(form, matcher):
            matcher.push(piece)
    assert not matcher.is_complete
    assert 2 not in allowed(form, matcher)
    with pytest.raises(ValueError, match="no token of the model spells what must come next"):
        matcher.push(allowed(form, matcher)[0])


def test_grammars_name_special_tokens(smollm: Tokenizer) -> None:
    vocabulary = Vocabulary(49184, (2,), with_added(smollm, "<think>", special=False))
    for grammar, ids, is_whole in (
        ('# a "\nstart: "<|im_start|>" <|im_start|> /\\/<|im_start|>/ // "', [1], True),
        ('start: <think> "<think>"', [49152], True),
        ('start: "a" <|im_end|>', [2], True),
        ('start: "a" <|im_end|> "b"', [], False),  # which would end an answer that is not whole
    ):
        form = compiler(vocabulary).compile(FormSpec("grammar", grammar), frozenset([2]))
        matcher, found = form.matcher(), list[int]()
        while not matcher.is_complete and len(tokens := allowed(form, matcher)) < 9:
            found.append(max(tokens))
            matcher.push(max(tokens))
        assert [token for token in found if token in (0, 1, 2, 49152)] == ids
        assert matcher.is_complete == is_whole
    with pytest.raises(FormError, match='unknown special token: "<\\|a\\|>"'):
        compiler(vocabulary).compile(FormSpec("grammar", "start: <|a|>"), frozenset([2]))
