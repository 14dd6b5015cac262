"""Tokenizers of published models, beside what their vendors' code makes of the same texts."""

from __future__ import annotations

import base64
import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from radixrt.errors import TokenizerError
from radixrt.text import tekken as tekken_module
from radixrt.text.builder import Detokenizer
from radixrt.text.byte_level import spelled
from radixrt.text.codec import JsonCodec
from radixrt.text.tekken import merges_by_rank, read_tekken
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from radixrt.text.tokenizer_json import OF_LLAMA_3, OF_TEKKEN
from tests.support.real_vocabularies import path_of, ranks_of, texts, write_config

COUNT = 2000
SENTENCEPIECE = ("mistral v1", "mistral v2", "mistral v3", "mistral v7")
TEKKEN = ("tekken 240718", "tekken 240911")
# Names of transformers' classes; those with constructors of their own drop much of tokenizer.json.
CLASSES = {
    "LlamaTokenizerFast": "llama",
    "LlamaTokenizer": "mistral",
    "GPT2TokenizerFast": "gpt2",
    "Qwen2Tokenizer": "qwen3",
    "GemmaTokenizerFast": "gemma3_text",
    "CodeLlamaTokenizerFast": "llama",
    "CohereTokenizerFast": "cohere",
    "T5TokenizerFast": "t5",
    "XLMRobertaTokenizer": "xlm-roberta",
    "BertTokenizerFast": "bert",
    "GPTNeoXTokenizerFast": "gpt_neox",
    "MistralCommonTokenizer": "mistral3",
    "TokenizersBackend": "deepseek_v3",
    "NoSuchTokenizer": "no_such_model",
}
FEW = ("LlamaTokenizerFast", "NoSuchTokenizer")
# The split of Qwen 3.5 and later; Qwen 3's has no marks.
OF_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def folder_with(path: Path, folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(path)
    return folder


def check_streams(tokenizer: Tokenizer, count: int = 200) -> None:
    """Token by token the same text comes as at once."""
    for text in texts(count, seed=1):
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(path_of("deepseek v4"), tmp_path_factory.mktemp("deepseek"), "tokenizer.json")


def test_deepseek(deepseek: Path) -> None:
    tokenizer, backend = load_tokenizer(deepseek), Backend.from_file(str(deepseek / "tokenizer.json"))
    mine = [ids.tolist() for ids in tokenizer.encode_batch(texts(COUNT))]
    assert mine == [one.ids for one in backend.encode_batch(list(texts(COUNT)))]
    assert [tokenizer.decode(ids) for ids in mine] == backend.decode_batch(mine) == list(texts(COUNT))
    check_streams(tokenizer)


@pytest.mark.long_unless(kept=lambda given: given["name"] in FEW)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_changes_nothing_of_tokenizer_json(deepseek: Path, tmp_path: Path, name: str) -> None:
    """Nor does what it would say about blanks."""
    folder = folder_with(deepseek / "tokenizer.json", tmp_path / "a", "tokenizer.json")
    write_config(
        folder, name, CLASSES[name], add_prefix_space=True, clean_up_tokenization_spaces=True, legacy=True
    )
    assert load_tokenizer(folder).identity == load_tokenizer(deepseek).identity


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(folder_with(path_of(name), tmp_path / "a", "tokenizer.model"))
    processor = SentencePieceProcessor(model_file=str(path_of(name)))
    mine = [ids.tolist() for ids in tokenizer.encode_batch(texts(COUNT), add_special_tokens=False)]
    assert mine == processor.encode(list(texts(COUNT)))
    assert [tokenizer.decode(ids) for ids in mine] == processor.decode(mine)
    assert tokenizer.encode("a").tolist() == [1, *processor.encode("a")]
    check_streams(tokenizer, 50)


@pytest.mark.long_unless(kept=lambda given: given["name"] == "mistral v3")
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_a_class_changes_nothing_of_sentencepiece(tmp_path: Path, name: str) -> None:
    processor = SentencePieceProcessor(model_file=str(path_of(name)))
    expected = processor.encode(list(texts(COUNT)))
    found = set()
    for each, model_type in CLASSES.items():
        folder = folder_with(path_of(name), tmp_path / each, "tokenizer.model")
        write_config(folder, each, model_type, add_prefix_space=False, bos_token="<s>", eos_token="</s>")
        tokenizer = load_tokenizer(folder)
        found.add(tokenizer.identity)
        assert (tokenizer.lead, tokenizer.eos_token_id) == ((1,), 2)
    assert len(found) == 1
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts(COUNT), add_special_tokens=False)] == expected
    check_streams(tokenizer, 50)


def test_special_tokens_of_sentencepiece(tmp_path: Path) -> None:
    """Spelled out they are tokens where there is a tokenizer_config.json, as templates need them to be."""
    folder = folder_with(path_of("mistral v3"), tmp_path / "a", "tokenizer.model")
    added = {"32768": {"content": "<tool>", "special": False, "rstrip": True}}
    write_config(folder, "LlamaTokenizer", "mistral", add_bos_token=False, added_tokens_decoder=added)
    tokenizer, processor = load_tokenizer(folder), SentencePieceProcessor(model_file=str(path_of("mistral v3")))
    ids = tokenizer.encode("[INST] Who?[/INST]<tool>  b</s>").tolist()
    assert ids[0] == 3
    assert ids[-1] == 2
    assert processor.id_to_piece(ids[1:3]) == ["▁Who", "?"]
    assert ids[3:5] == [4, 32768]
    assert tokenizer.decode(ids) == "Who?<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[INST] Who?[/INST]<tool>b</s>"
    assert tokenizer.vocab_size == 32769


@pytest.mark.long_unless(kept=lambda given: given["name"] == TEKKEN[1])
@pytest.mark.parametrize("name", TEKKEN)
def test_tekken(tmp_path: Path, name: str) -> None:
    """mistral-common's own is the reference."""
    folder = folder_with(path_of(name), tmp_path / "a", "tekken.json")
    from mistral_common.tokens.tokenizers.tekken import SpecialTokenPolicy, Tekkenizer

    write_config(folder, "MistralCommonTokenizer", "mistral3")
    tokenizer, vendor = load_tokenizer(folder), Tekkenizer.from_file(path_of(name))
    assert (tokenizer.lead, tokenizer.eos_token_id, tokenizer.vocab_size) == (
        (vendor.bos_id,),
        vendor.eos_id,
        vendor.n_words,
    )
    mine = [ids.tolist() for ids in tokenizer.encode_batch(texts(COUNT), add_special_tokens=False)]
    assert mine == [vendor.encode(text, bos=False, eos=False) for text in texts(COUNT)]
    assert [tokenizer.decode(ids) for ids in mine] == list(texts(COUNT))
    keep = SpecialTokenPolicy.KEEP
    for ids in ([3, 1010, 4, 2], [17, 1234, 18], [999]):
        assert tokenizer.decode(ids, skip_special_tokens=False) == vendor.decode(ids, keep)
    assert tokenizer.encode("[INST]a[/INST]", add_special_tokens=False).tolist() == [
        3,
        *vendor.encode("a", False, False),
        4,
    ]
    check_streams(tokenizer)


@cache
def of_ranks(name: str, pattern: str, special: tuple[str, ...], normalizer: Any = None) -> str:
    """The tokenizer.json of a byte-level vocabulary by ranks."""
    ranks = ranks_of(name)
    backend = Backend(models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges_by_rank(ranks)))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    backend.decoder, backend.normalizer = decoders.ByteLevel(), normalizers.NFC()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return str(backend.to_str())


@pytest.mark.long_unless(kept=lambda given: given["name"] == "GPT2TokenizerFast")
@pytest.mark.parametrize("name", CLASSES)
def test_qwen(tmp_path: Path, name: str) -> None:
    """The vendor's is tiktoken, after a normalisation to NFC."""
    import tiktoken

    ranks = ranks_of("qwen 3.6")
    (tmp_path / "tokenizer.json").write_text(of_ranks("qwen 3.6", OF_QWEN, ("<|endoftext|>", "<|im_end|>")))
    write_config(tmp_path, name, CLASSES[name], eos_token="<|im_end|>", add_bos_token=False)
    tokenizer = load_tokenizer(tmp_path)
    vendor = tiktoken.Encoding("qwen", pat_str=OF_QWEN, mergeable_ranks=ranks, special_tokens={})
    normal = [unicodedata.normalize("NFC", text) for text in texts(COUNT)]
    mine = [ids.tolist() for ids in tokenizer.encode_batch(texts(COUNT))]
    assert mine == [vendor.encode_ordinary(text) for text in normal]
    assert [tokenizer.decode(ids) for ids in mine] == normal
    assert tokenizer.eos_token_id == len(ranks) + 1
    check_streams(tokenizer)


@cache
def tekken() -> JsonCodec:
    return read_tekken(path_of("tekken 240911"))


def tekken_as_json(pattern: str) -> str:
    """What transformers 4 wrote of a tekken vocabulary, with this expression."""
    spec = json.loads(tekken().serialized() or "")
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    return json.dumps(spec)


def test_the_wrong_split_of_tekken_is_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever model it is called."""
    (tmp_path / "tokenizer.json").write_text(tekken_as_json(OF_LLAMA_3))
    write_config(tmp_path, "LlamaTokenizerFast", "llama", transformers_version="4.55.0")
    with caplog.at_level("INFO"):
        tokenizer = load_tokenizer(tmp_path)
    assert "splits texts as Llama 3 does" in caplog.text
    assert [tokenizer.piece(i) for i in tokenizer.encode("helloWorld FooBar")] == ["hello", "World", "ĠFoo", "Bar"]
    mine = [ids.tolist() for ids in tokenizer.encode_batch(texts(COUNT), add_special_tokens=False)]
    assert mine == tekken().encode(list(texts(COUNT)))


def test_the_split_of_llama_3_is_left_to_whom_it_belongs(tmp_path: Path) -> None:
    """A vocabulary with tokens of several digits was trained with it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: rank for rank, token in enumerate([*alphabet, "12"])}, [("1", "2")]))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(OF_LLAMA_3), "isolated"), as_bytes]
    )
    backend.decoder = decoders.ByteLevel()
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    serialized = load_tokenizer(tmp_path).serialized()
    assert serialized is not None
    assert json.loads(serialized)["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": OF_LLAMA_3}


def test_a_split_that_is_right_already(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tekken_as_json(OF_TEKKEN))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.piece(i) for i in tokenizer.encode("FooBar 12")] == ["Foo", "Bar", "Ġ", "1", "2"]


def tekken_of(tokens: list[tuple[int, bytes]], pattern: str = r"\S+|\s+") -> str:
    """A small tekken.json with all bytes and these tokens."""
    ranked = [*((byte, bytes([byte])) for byte in range(256)), *tokens]
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in ranked]
    config = {"default_vocab_size": 256 + len(tokens) + 20, "default_num_special_tokens": 20, "pattern": pattern}
    return json.dumps({"config": config, "vocab": vocabulary})


BAD_TEKKEN = {
    "nothing": ("{}", "'config'"),
    "a list": ("[]", "list indices must be"),
    "half": ('{"config": {}, "vocab": []}', "default_vocab_size"),
    "a rank twice": (tekken_of([(256, b"zq"), (256, b"qz")]), "not have a token of each rank from 0 to 257"),
    "below all": (tekken_of([(-1, b"zq")]), "not have a token of each rank from 0 to 256"),
    "too long": (tekken_of([(256, b"z" * 2000)]), "a token of 2,000 bytes; 1,024 are supported"),
}


@pytest.mark.parametrize("case", BAD_TEKKEN)
def test_a_tekken_that_cannot_be(tmp_path: Path, case: str) -> None:
    text, told = BAD_TEKKEN[case]
    (tmp_path / "tekken.json").write_text(text)
    with pytest.raises(TokenizerError, match=f"cannot load a tokenizer from .*{told}"):
        load_tokenizer(tmp_path)


def test_what_differs_from_its_source_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tekken.json").write_text(tekken_of([(256, b"Mi"), (257, b"ra"), (258, b"Mira"), (259, b"he")]))
    assert load_tokenizer(tmp_path).encode("Mira", add_special_tokens=False).tolist() == [278]
    monkeypatch.setattr(tekken_module, "merges_by_rank", lambda ranks: [])
    with pytest.raises(TokenizerError, match=r"does not encode as tekken\.json says: the ids of .*, not \["):
        load_tokenizer(tmp_path)
