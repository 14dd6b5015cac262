"""Tokenizers of small checkpoints made here."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from radixrt.errors import TokenizerError
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.small_tokenizers import byte_level, write_llama

TEXT = "Mira likes Oslo. Tarek counts 37."


def write_sentencepiece(folder: Path, **more: int) -> Path:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "the quick brown fox", "hello again"] * 20),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **more,  # type: ignore[arg-type]
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tokenizer bare, through transformers, and through transformers with BOS."""
    home = tmp_path_factory.mktemp("tokenizers")
    bare = write_sentencepiece(home / "bare")
    folders = {"bare": bare, "no_bos": write_sentencepiece(home / "no_bos", bos_id=-1, eos_id=-1)}
    for name, add_bos_token in (("plain", False), ("bos", True)):
        folders[name] = home / name
        folders[name].mkdir()
        (folders[name] / "tokenizer.model").write_bytes((bare / "tokenizer.model").read_bytes())
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": add_bos_token,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": 4,  # encode cuts nothing off
            "clean_up_tokenization_spaces": True,
        }
        (folders[name] / "tokenizer_config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


KINDS = ["bare", "plain", "bos"]


def test_both_kinds_agree(tokenizers: dict[str, Tokenizer]) -> None:
    bare, plain, bos = (tokenizers[kind] for kind in KINDS)
    for text in (TEXT, "a  b ", "x\0y", "Ünï 日本 😀", "\u2028\r\n"):
        ids = plain.encode(text)
        assert ids.dtype == np.int32
        assert ids.ndim == 1
        for with_bos in (bare, bos):
            assert with_bos.encode(text).tolist() == [1, *ids.tolist()]
            assert with_bos.decode(ids) == plain.decode(ids) == text
    for tokenizer in (bare, plain, bos):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
        assert tokenizer.vocab_size == bare.vocab_size > 256
    no_bos = tokenizers["no_bos"]
    assert (no_bos.bos_token_id, no_bos.eos_token_id) == (None, None)
    assert no_bos.decode(no_bos.encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_neither_cut_off_nor_tidied(folders: dict[str, Path], kind: str) -> None:
    """Nor does the library complain: its warnings come once a tokenizer, hence a new one."""
    tokenizer = load_tokenizer(folders[kind])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        text = " ".join(["don 't . stop !"] * 50)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    finally:
        logger.removeHandler(handler)
    assert said == []


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = [1, *tokenizer.encode("hello").tolist()[-2:], 2]
    inner = tokenizer.decode(ids)
    assert "<" not in inner
    assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == f"<s>{inner}</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_the_tokenizer_does_not_know(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("hello").tolist()
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 2**31 - 1, 10**12]) == "hello"
    assert tokenizer.decode(np.array(ids, dtype=np.int64)) == "hello"
    assert tokenizer.decode([]) == ""
    with pytest.raises(TokenizerError, match="token id -1 at position 2 is negative"):
        tokenizer.decode([5, 6, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_character_becomes_a_replacement(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    ids = tokenizers[kind].encode("é")
    assert tokenizers[kind].decode(ids[:-1]).endswith("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_named(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(TokenizerError, match=r"the text holds U\+D83D, .* at character 2"):
        tokenizers[kind].encode("ab\ud83d")
    with pytest.raises(TokenizerError, match=r"text 1 holds U\+DC00, .* at character 0"):
        tokenizers[kind].encode_batch(["a", "\udc00b"])


@given(texts=st.lists(st.text(max_size=10), max_size=4))
def test_batches_are_the_same_one_by_one(tokenizers: dict[str, Tokenizer], texts: list[str]) -> None:
    for kind in KINDS:
        batch = tokenizers[kind].encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [tokenizers[kind].encode(text).tolist() for text in texts]
        assert all(ids.dtype == np.int32 for ids in batch)


def test_another_kind_with_a_gap_in_its_vocabulary(tmp_path: Path) -> None:
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    backend = Backend(WordLevel({"a": 0, "b": 7, ".": 9}, "a"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, clean_up_tokenization_spaces=True
    ).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 10
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.encode("b .").tolist() == [7, 9]
    assert tokenizer.decode([7, 3, 9]) == "b ."  # tidied it would be "b."


def test_code_in_the_folder_is_not_run(folders: dict[str, Path], tmp_path: Path) -> None:
    marker = tmp_path / "it_ran"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError):
        load_tokenizer(folder)
    assert not marker.exists()


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", str(tmp_path / "none"), "./none", "a/b/c"):
        with pytest.raises(TokenizerError, match="there is no such folder"):
            load_tokenizer(missing)
    with pytest.raises(TokenizerError, match=rf"cannot load a tokenizer from {tmp_path}: \S"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(TokenizerError, match=rf"cannot load a tokenizer from {tmp_path}: \S") as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.__cause__ is not None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=rf"cannot load a tokenizer from {tmp_path}: \S"):
        load_tokenizer(tmp_path)


SAID = "Mira likes Oslo.\n  Tarek counts 37; 日本"


def folder_of(folder: Path, backend: Backend | None = None, config: dict[str, Any] | None = None) -> Path:
    """A folder with a byte-level tokenizer.json whose BOS is <s>, or another, and this tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text((backend or byte_level().backend_tokenizer).to_str())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_template(single: str, *special: str) -> Backend:
    """The byte-level tokenizer, whose post-processor puts special tokens around texts."""
    backend = byte_level().backend_tokenizer
    ids = [(token, backend.token_to_id(token)) for token in special]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return backend


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GemmaTokenizer", "Qwen2Tokenizer", "T5Tokenizer", None])
def test_a_class_does_not_change_what_tokenizer_json_says(tmp_path: Path, name: str | None) -> None:
    folder = folder_of(tmp_path, config={"tokenizer_class": name, "legacy": True, "add_prefix_space": True})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(SAID).tolist()
    assert ids == byte_level().backend_tokenizer.encode(SAID).ids
    assert tokenizer.decode(ids) == SAID


BOS_AND_EOS = {
    "says nothing": ({}, "$A", []),
    "adds BOS": ({"add_bos_token": True}, "$A", ["<s>"]),
    "adds it once": ({"add_bos_token": True}, "<s> $A", ["<s>"]),
    "as tokenizer.json says": ({}, "<s> $A", ["<s>"]),
    "adds none": ({"add_bos_token": False}, "<s> $A", []),
    "leaves others": ({"add_bos_token": False}, "<tool> <s> $A", ["<tool>"]),
    "an end is left out": ({}, "<s> $A </s>", ["<s>"]),
    "also of the config": ({"add_eos_token": True, "add_bos_token": True}, "$A </s>", ["<s>"]),
}


@pytest.mark.parametrize("case", BOS_AND_EOS)
def test_what_begins_and_ends_a_text(tmp_path: Path, case: str) -> None:
    config, single, lead = BOS_AND_EOS[case]
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    folder = folder_of(tmp_path, with_template(single, "<s>", "</s>", "<tool>"), {**named, **config})
    tokenizer = load_tokenizer(folder)
    bare = tokenizer.encode("Mira", add_special_tokens=False).tolist()
    assert tokenizer.encode("Mira").tolist() == [*(tokenizer.token_id(token) for token in lead), *bare]
    assert (tokenizer.piece(tokenizer.bos_token_id or 0), tokenizer.eos_token_id) == ("<s>", 1)


def test_a_bos_that_is_no_token_cannot_be_added(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config={"add_bos_token": True, "bos_token": "<bos>"})
    with pytest.raises(TokenizerError, match=r"add_bos_token is true .* bos_token is '<bos>', which is no token"):
        load_tokenizer(folder)
    folder_of(tmp_path, config={"bos_token": "<bos>", "eos_token": None})  # named, and no more
    assert load_tokenizer(tmp_path).bos_token_id is None


def test_tokens_that_tokenizer_config_adds_or_makes_special(tmp_path: Path) -> None:
    backend = byte_level().backend_tokenizer
    size, tool = backend.get_vocab_size(), backend.token_to_id("<tool>")
    added = {
        str(tool): {"content": "<tool>", "special": True},
        str(size): {"content": "<|call|>", "special": False},
        str(size + 3): {"content": "<|end|>", "special": True, "rstrip": True},
    }
    config = {"added_tokens_decoder": added, "eos_token": "<|end|>", "additional_special_tokens": ["likes"]}
    tokenizer = load_tokenizer(folder_of(tmp_path, config=config))
    ids = tokenizer.encode("<|call|>a<tool> b<|end|> \nc").tolist()
    assert ids[0] == size
    assert tool in ids
    assert (ids[-2], tokenizer.eos_token_id, tokenizer.vocab_size) == (size + 3, size + 3, size + 4)
    assert tokenizer.decode(ids) == "<|call|>a bc"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|call|>a<tool> b<|end|>c"
    assert tokenizer.encode("Mira likes").tolist() == backend.encode("Mira likes").ids  # no token has that text


def test_what_contradicts_tokenizer_json_is_shown(tmp_path: Path) -> None:
    backend = byte_level().backend_tokenizer
    word = max((backend.id_to_token(i) for i in range(3, 300)), key=len)
    for token_id, content in ((5, "<|call|>"), (300, "<tool>"), (999, word)):
        added = {str(token_id): {"content": content, "special": False}}
        folder_of(tmp_path, config={"added_tokens_decoder": added})
        with pytest.raises(TokenizerError, match=rf"gives '{re.escape(content)}' the id {token_id}, but by token"):
            load_tokenizer(tmp_path)


OLDER = {
    "special_tokens_map.json": {"eos_token": {"content": "<tool>", "lstrip": False}, "bos_token": "<s>"},
    "added_tokens.json": {"<|call|>": 400, "<|end|>": 401},
}


def test_files_of_older_checkpoints(tmp_path: Path) -> None:
    """They count where tokenizer_config.json has no added_tokens_decoder, as in transformers."""
    folder = folder_of(tmp_path, config={"eos_token": "</s>"})
    for name, content in OLDER.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.piece(tokenizer.eos_token_id or 0) == "<tool>"
    assert tokenizer.encode("<|call|><|end|>").tolist() == [400, 401]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "added_tokens_decoder": {}}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == 1
    assert len(tokenizer.encode("<|call|>")) > 1


def test_older_files_do_not_take_flags_away(tmp_path: Path) -> None:
    """added_tokens.json has none."""
    backend = byte_level(("<s>", "</s>", "<|im_start|>")).backend_tokenizer
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    ids = {token: backend.token_to_id(token) for token in ("<|im_start|>", "<mask>")}
    folder = folder_of(tmp_path, backend, {})
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a  <mask>").tolist() == backend.encode("a  <mask>").ids
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a")) == "a"


def test_an_expression_that_gives_up_is_an_error(tmp_path: Path) -> None:
    """The package tokenizers panics, with what is no Exception."""
    backend = byte_level().backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?:a|a)*Q|."), "isolated")
    tokenizer = load_tokenizer(folder_of(tmp_path, backend))
    with pytest.raises(TokenizerError, match=r"the tokenizer cannot encode 'aaaa.*gives up: "):
        tokenizer.encode("a" * 100)


@pytest.mark.parametrize("letters", ["ACGT", "日本"])
def test_what_begins_texts_of_any_vocabulary(tmp_path: Path, letters: str) -> None:
    """Not all have an "a", nor a token for what they lack."""
    backend = Backend(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<s>", "</s>"])
    ids = [("<s>", len(letters)), ("</s>", len(letters) + 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    tokenizer = load_tokenizer(folder_of(tmp_path, backend))
    assert tokenizer.encode(letters).tolist() == [len(letters), *range(len(letters))]


ADDED_TO_PIECES = {
    "the id of a piece": ({"273": {"content": "<tool>"}}, "the id 273, but in tokenizer.model 'a' has that"),
    "a piece under another id": ({"500": {"content": "a"}}, "the id 500, but in tokenizer.model it has 273"),
}


@pytest.mark.parametrize("case", ADDED_TO_PIECES)
def test_an_added_token_is_no_ordinary_piece(tmp_path: Path, case: str) -> None:
    added, told = ADDED_TO_PIECES[case]
    folder = write_llama(tmp_path / "a", added_tokens_decoder=added)
    with pytest.raises(TokenizerError, match=told):
        load_tokenizer(folder)


def test_tokens_that_take_blanks_cost_no_more_the_more_there_are(tmp_path: Path) -> None:
    added = {"400": {"content": "<t>", "rstrip": True, "lstrip": True}}
    tokenizer = load_tokenizer(write_llama(tmp_path / "a", added_tokens_decoder=added))
    began = time.process_time()
    assert len(tokenizer.encode("<t>" * 60_000, add_special_tokens=False)) == 60_000
    assert time.process_time() - began < 3
    ids = tokenizer.encode("hello  <t>  \n hello", add_special_tokens=False).tolist()
    assert tokenizer.decode(ids) == "hello<t>hello"


def test_nothing_is_cut_padded_or_drawn_by_lot(tmp_path: Path) -> None:
    backend = byte_level().backend_tokenizer
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.model.dropout = 0.9
    tokenizer = load_tokenizer(folder_of(tmp_path, backend))
    assert tokenizer.encode(SAID).tolist() == byte_level().backend_tokenizer.encode(SAID).ids


def test_what_the_vocabulary_lacks_is_an_error_of_ours(tmp_path: Path) -> None:
    """The package tokenizers raises Exception itself."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = load_tokenizer(folder_of(tmp_path, backend))
    assert tokenizer.encode("a b").tolist() == [0, 1]
    with pytest.raises(TokenizerError, match=r"the tokenizer cannot encode 'a c': \S"):
        tokenizer.encode("a c")
    with pytest.raises(TokenizerError, match=r"text 1: the tokenizer cannot encode 'cc+'\.\.\.: \S"):
        tokenizer.encode_batch(["a", "c" * 100])


TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "in the config": ({"chat_template": "one"}, {}),
    "several, by name": ({"chat_template": [{"name": "default", "template": "one"}, {"name": "b"}]}, {}),
    "a file before it": ({"chat_template": "two"}, {"chat_template.jinja": "one"}),
    "a processor's": ({}, {"chat_template.json": json.dumps({"chat_template": "one"})}),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_where_a_template_may_be(tmp_path: Path, case: str) -> None:
    config, files = TEMPLATES[case]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = load_tokenizer(folder_of(tmp_path, config=config))
    assert tokenizer.template_names("one")
    assert not tokenizer.template_names("two")


def test_a_template_for_tools_alone_is_none(tmp_path: Path) -> None:
    template = [{"name": "tool_use", "template": "a"}, {"name": "rag", "template": "b"}]
    assert not load_tokenizer(folder_of(tmp_path, config={"chat_template": template})).has_chat_template


BAD_CONFIGS = {
    "a list": ("[]", "tokenizer_config.json holds no JSON object"),
    "half": ('{"a": ', "tokenizer_config.json cannot be read: "),
    "flag": ('{"add_bos_token": "yes"}', "has add_bos_token 'yes'; it must be true or false"),
    "number": ('{"eos_token": 5}', "has eos_token 5; it must be a token's text"),
    "id": ('{"added_tokens_decoder": {"-1": {"content": "a"}}}', "has the added token '-1': "),
    "huge id": ('{"added_tokens_decoder": {"99999999": {"content": "a"}}}', "has the added token '99999999': "),
    "no content": ('{"added_tokens_decoder": {"7": {"content": ""}}}', "has the added token '7': "),
    "flags": ('{"added_tokens_decoder": {"7": {"content": "a", "lstrip": 1}}}', "'a' with lstrip 1"),
    "decoder": ('{"added_tokens_decoder": [1]}', "has added_tokens_decoder \\[1\\]; it must be an object"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_tokenizer_config(tmp_path: Path, case: str) -> None:
    text, told = BAD_CONFIGS[case]
    (folder_of(tmp_path) / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=f"cannot load a tokenizer from .*{told}"):
        load_tokenizer(tmp_path)


def test_other_files_are_converted_and_tried(tmp_path: Path) -> None:
    """vocab.json and merges.txt say nothing of how texts are split: the class does, and may be the wrong one."""
    byte_level().backend_tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(SAID)) == SAID
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(TokenizerError, match=r"changes text: 'Mira likes .*' becomes ''"):
        load_tokenizer(tmp_path)


def test_the_identity_tells_encodings_apart(tmp_path: Path) -> None:
    def identity(config: dict[str, Any]) -> str:
        folder = folder_of(tmp_path, config={"bos_token": "<s>", "eos_token": "</s>", **config})
        return load_tokenizer(folder).identity

    plain = identity({})
    assert plain == identity({"tokenizer_class": "LlamaTokenizer", "chat_template": "a"})
    others = [
        identity({"add_bos_token": True}),
        identity({"eos_token": "<tool>"}),
        identity({"added_tokens_decoder": {"400": {"content": "<|call|>"}}}),
    ]
    assert len({plain, *others}) == 4
