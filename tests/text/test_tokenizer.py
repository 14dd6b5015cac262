"""Tokenizers of small checkpoints made here."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from radixrt.errors import TokenizerError
from radixrt.text.tokenizer import Tokenizer, load_tokenizer

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
    from tokenizers import Tokenizer as Backend
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
