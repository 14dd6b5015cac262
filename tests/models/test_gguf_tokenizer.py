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
from radixrt.text.byte_level import spelled
from tests.support import checkpoints
from tests.support.real_vocabularies import path_of, ranks_of, texts

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
    tekken_ranks,
)

TEXTS = [text.replace("\0", "") for text in texts(2000, seed=51)]  # sentencepiece takes texts with NUL apart
SECONDS = 30  # of CPU; measured: 2 for 32,000 tokens, 10 for 250,000


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


@pytest.mark.long_unless(kept=lambda given: (given["version"], given["prefix"]) in (("v1", True), ("v7", False)))
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v7"])
def test_sentencepiece(version: str, prefix: bool, cache: Path) -> None:
    """Mistral's. Without a leading blank, as Gemma has it, pieces are the same."""
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    file = path_of(f"mistral {version}")
    proto = ModelProto.FromString(file.read_bytes())
    proto.normalizer_spec.add_dummy_prefix = prefix
    own = SentencePieceProcessor(model_proto=proto.SerializeToString())
    vocabulary = of_sentencepiece(file, prefix)
    start = time.process_time()
    tokenizer = tokenizer_of(vocabulary, cache)
    assert time.process_time() - start < SECONDS
    check(tokenizer, own.encode, TEXTS)
    for text in TEXTS[:200]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("\u2581", " "), (
            "its spelling of a blank"
        )
        assert tokenizer.encode(text).ids == [own.bos_id(), *own.encode(text)]
    markers = [piece for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True) if kind == CONTROL]
    drawn = random.Random(1)
    for one, other in zip(TEXTS[:200], TEXTS[200:400], strict=True):
        marker = drawn.choice(markers)
        between = [vocabulary.pieces.index(marker)]
        expected = [*own.encode(one), *between, *own.encode(other)]
        assert tokenizer.encode(f"{one}{marker}{other}", add_special_tokens=False).ids == expected


@pytest.mark.long
def test_deepseek(cache: Path) -> None:
    file = path_of("deepseek v4")
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


@pytest.mark.long
@pytest.mark.parametrize(("name", "pre"), [("qwen", "qwen2"), ("qwen 3.6", "qwen35")])
def test_qwen(name: str, pre: str, cache: Path) -> None:
    ranks = ranks_of(name)
    marks = (
        ("<|endoftext|>", CONTROL),
        ("<|im_start|>", CONTROL),
        ("<|im_end|>", CONTROL),
        ("<think>", USER_DEFINED),
    )
    markers = {len(ranks) + place: text for place, text in enumerate(marks)}
    tokenizer = tokenizer_of(of_ranks(ranks, markers, pre, eos_token_id=len(ranks)), cache)
    encode = by_ranks(SPLITS[pre].expressions, ranks)

    def expected(text: str) -> list[int]:
        return encode(unicodedata.normalize("NFC", text))

    check(tokenizer, expected, TEXTS)
    for text in TEXTS[:200]:
        ids = tokenizer.encode(f"<|im_start|>{text}<think>").ids
        assert ids == [len(ranks) + 1, *expected(text), len(ranks) + 3]


@pytest.mark.long
def test_tekken(cache: Path) -> None:
    """Mistral's since 2024: whole words before merges, and BOS unless the file says otherwise."""
    file = path_of("tekken 240911")
    ranks, expression = tekken_ranks(file, 130_072, first=1000)
    names = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]"}
    markers = {i: (names.get(i, f"<SPECIAL_{i}>"), CONTROL) for i in range(1000)}
    tokenizer = tokenizer_of(of_ranks(ranks, markers, "tekken", bos_token_id=1, eos_token_id=2), cache)
    check(tokenizer, by_ranks([expression], ranks), TEXTS)
    assert tokenizer.encode("[INST]Oslo").ids[:2] == [1, 3]


def test_smollm2(cache: Path) -> None:
    """The file of a package, whose tokens are read by gguf's own reader."""
    file = path_of("smollm2")
    fields = gguf.GGUFReader(file).fields
    pieces, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    ranks = {"".join(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    assert len(ranks) == len(merges), "a pair for each token: the token's rank is the pair's"
    start = time.process_time()
    folder = model_folder(file)
    assert time.process_time() - start < 2 * SECONDS  # with 135 million weights
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


@pytest.mark.long_unless(kept=lambda given: given["count"] < 100_000)
@pytest.mark.parametrize("count", [30_000, 250_000])
def test_a_vocabulary_like_that_of_gemma(count: int, cache: Path) -> None:
    """No leading blank, runs of blanks and lines as user-defined tokens, unused ones, many pieces."""
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    tokens = [*ranks_of("qwen 3.6")]
    decoded = [text for token in tokens[:count] if (text := _text(token)) and not {*"\n\0"} & {*text}]
    plain = dict.fromkeys(text.replace(" ", "\u2581") for text in decoded)
    plain |= dict.fromkeys(character for text in [*plain] for character in text)  # as in all that is trained
    runs = [*("\n" * n for n in range(1, 9)), *(" " * n for n in range(2, 32)), "<table>", "<think>"]
    rows = [("<pad>", 3, 0.0), ("<eos>", 3, 0.0), ("<bos>", 3, 0.0), ("<unk>", 2, 0.0)]
    rows += [(f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)]
    rows += [(f"<unused{n}>", UNUSED, 0.0) for n in range(20)] + [(run, USER_DEFINED, -1000.0) for run in runs]
    rows += [
        (text, NORMAL, -float(n)) for n, text in enumerate(plain) if set(text) != {"\u2581"} or len(text) == 1
    ]
    pieces, types, scores = map(list, zip(*rows, strict=True))
    proto = ModelProto()
    for piece, kind, score in rows:
        proto.pieces.add(piece=piece.replace(" ", "\u2581"), type=kind, score=score)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.remove_extra_whitespaces = False
    own = SentencePieceProcessor(model_proto=proto.SerializeToString())
    scalars = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_space_prefix": False}
    vocabulary = Vocabulary("llama", pieces, types, scores=scores, scalars=scalars)
    start = time.process_time()
    tokenizer = tokenizer_of(vocabulary, cache, checkpoints.gemma3)
    print(f"{len(pieces):,} tokens: {time.process_time() - start:.1f} s")
    assert time.process_time() - start < SECONDS
    # Where a text spells blanks as the vocabulary does, sentencepiece takes them for blanks.
    check(tokenizer, own.encode, [text.replace("\u2581", "") for text in TEXTS])
    assert tokenizer.decode(tokenizer.encode("<think>\n\n  Oslo").ids) == "<think>\n\n  Oslo"


def _text(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


# A text that tells ways of splitting apart, and its parts.
SPLIT = "I'M don't WE'LL helloWorld 12345 x=1;\n\n  e\u0301日本。ab/\n"
PARTS = {
    "llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe": (
        "I|'M| don|'t| WE|'LL| helloWorld| |123|45| x|=|1|;\n\n| | e|\u0301日本|。ab|/\n"
    ),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2": (
        "I|'M| don|'t| WE|'LL| helloWorld| |1|2|3|4|5| x|=|1|;\n\n| | e|\u0301日本|。ab|/\n"
    ),
    "qwen35": "I|'M| don|'t| WE|'LL| helloWorld| |1|2|3|4|5| x|=|1|;\n\n| | e\u0301日本|。ab|/\n",
    "deepseek-llm": "I|'|M| don|'|t| WE|'|LL| helloWorld| |12345| x|=|1|;|\n|\n| | e|\u0301|日本|。|ab|/|\n",
    "deepseek-coder": "I|'|M| don|'|t| WE|'|LL| helloWorld| |1|2|3|4|5| x|=|1|;|\n|\n| | e|\u0301|日本|。|ab|/|\n",
    "deepseek-v3 hunyuan-dense joyai-llm": (
        "I|'M| don|'t| WE|'LL| helloWorld| |123|45| x|=|1|;\n\n| | e\u0301|日本|。|ab|/\n"
    ),
    "tekken": "I|'M| don|'t| WE|'LL| hello|World| |1|2|3|4|5| x|=|1|;\n\n| | e\u0301日本|。ab|/\n",
    "gpt-4o llama4 kanana2 minimax-m2": (
        "I'M| don't| WE'LL| hello|World| |123|45| x|=|1|;\n\n| | e\u0301日本|。ab|/\n"
    ),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion mpt olmo": (
        "I|'|M| don|'t| WE|'|LL| helloWorld| 12345| x|=|1|;|\n\n | e|\u0301|日本|。|ab|/|\n"
    ),
    "smollm starcoder refact codeshell exaone minerva-7b command-r": (
        "I|'|M| don|'t| WE|'|LL| helloWorld| |1|2|3|4|5| x|=|1|;|\n\n | e|\u0301|日本|。|ab|/|\n"
    ),
    "falcon": "I|'|M| don|'|t| WE|'|LL| helloWorld| |123|45| x|=|1|;|\n\n | e|\u0301|日本|。|ab|/|\n",
    "seed-coder": "I|'M| don|'t| WE|'LL| helloWorld| |1|2|3|4|5| x|=|1|;|\n\n| | e|\u0301日本|。ab|/|\n",
}
COMPOSE = ["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "qwen35", "mpt", "olmo", "command-r"]
IGNORE_MERGES = ["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken"]


def test_every_name_has_parts() -> None:
    assert sorted(name for names in PARTS for name in names.split()) == sorted(SPLITS)


@pytest.mark.parametrize("names", PARTS)
def test_splits(names: str, cache: Path) -> None:
    """Each name's own way, in a file with that name; and what else goes with the name."""
    for pre in names.split():
        (cache / pre).mkdir()
        vocabulary = small_vocabulary(BYTE_LEVEL_SIZE, pre)
        vocabulary.pieces[-2:] = ["xy", "\u00c3\u00a9"]  # two bytes of é, which no merge makes
        folder = converted(vocabulary, cache / pre)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        parts = [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(SPLIT)]
        assert parts == [spelled(part.encode()) for part in PARTS[names].split("|")], pre
        composed = tokenizer.decode(tokenizer.encode("e\u0301").ids)
        assert composed == ("é" if pre in COMPOSE else "e\u0301"), pre
        ignores = pre in IGNORE_MERGES
        assert tokenizer.encode("xy", add_special_tokens=False).tokens == (["xy"] if ignores else ["x", "y"]), pre
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert config["add_bos_token"] is ignores, pre
        assert (tokenizer.encode("x").ids[0] == 1) is ignores, pre


def small_llama(**scalars: bool | int | str) -> Vocabulary:
    """Of sentencepiece, without bytes."""
    given = small_vocabulary(101, "llama")
    return replace(given, scalars={**given.scalars, **scalars}, types=[*given.types])


@pytest.mark.parametrize(
    ("scalars", "expected"),
    [
        ({}, ["<s>", "\u2581", "He", "\u2581", "371", "2"]),
        ({"add_bos_token": False}, ["\u2581", "He", "\u2581", "371", "2"]),
        ({"add_eos_token": True}, ["<s>", "\u2581", "He", "\u2581", "371", "2", "</s>"]),
        ({"add_space_prefix": False}, ["<s>", "He", "\u2581", "371", "2"]),
    ],
)
def test_what_a_file_says_is_added(scalars: dict[str, bool], expected: list[str], cache: Path) -> None:
    folder = converted(small_llama(**scalars), cache)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("He 3712").tokens == expected
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is ("<s>" in expected)
    assert config["add_eos_token"] is ("</s>" in expected)


def test_types_of_tokens(cache: Path) -> None:
    """Control tokens are special; user-defined ones are found in texts, and are text; unused ones are neither."""
    given = small_llama()
    pieces, types = [*given.pieces], [*given.types]
    for place, (piece, kind) in enumerate(
        [("<think>", USER_DEFINED), ("[INST]", CONTROL), ("zz", UNUSED)], start=20
    ):
        pieces[place], types[place] = piece, kind
    folder = converted(replace(given, pieces=pieces, types=types), cache)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("[INST]He<think>zz", add_special_tokens=False).ids
    assert ids[0] == 21
    assert 20 in ids
    assert 22 not in ids
    assert tokenizer.decode(ids).replace(" ", "") == "He<think>zz"
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert (added["20"]["special"], added["21"]["special"]) == (False, True)
    assert "22" not in added


def test_special_tokens_of_phi_3_take_the_blanks_after_them(cache: Path) -> None:
    tokenizer = tokenizer_of(small_llama(), cache, checkpoints.phi3)
    pieces = small_llama().pieces
    for text, expected in (
        ("<|im_end|>\n He", ["<|im_end|>", "\u2581", "He"]),
        ("<s> He", ["<s>", "\u2581", "\u2581", "He"]),
    ):
        assert [pieces[i] for i in tokenizer.encode(text, add_special_tokens=False).ids] == expected


def test_templates(cache: Path) -> None:
    templates = {"default": "{{ bos_token }}", "tool_use": "{{ tools }}"}
    folder = converted(replace(small_llama(), templates=templates), cache)
    assert (folder / "chat_template.jinja").read_text() == "{{ bos_token }}"
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def small(**changes: Any) -> Vocabulary:
    return replace(small_llama(), **changes)


def with_piece(piece: str, kind: int = NORMAL, score: float = 0.0) -> Vocabulary:
    """In place of number 50."""
    given = small_llama()
    assert given.scores is not None
    pieces, types, scores = [*given.pieces], [*given.types], [*given.scores]
    pieces[50], types[50], scores[50] = piece, kind, score
    return replace(given, pieces=pieces, types=types, scores=scores)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (
            small(kind="t5"),
            "of the kind 't5' .tokenizer.ggml.model., which is not supported; these are: gpt2, llama",
        ),
        (small(kind="gemma4"), "of the kind 'gemma4'"),
        (small(scores=None), "merges by scores .tokenizer.ggml.scores., and lacks them"),
        (small(scores=[0.0] * 100), "merges by scores"),
        (small(types=[1] * 100), "101 tokens and 100 types"),
        (with_piece("He"), "the tokens 4 and 50 are both spelled 'He'"),
        (with_piece("x" * 2000), "token 50 has 2,000 characters; 1,024"),
        (with_piece("<0x0A>", kind=6), "sentencepiece cannot use its vocabulary: "),
        (with_piece("HeH", kind=UNUSED, score=1.0), None),
        (
            small_vocabulary(150, "qwen2"),
            "the tokenizer that was made of its files changes text: .{1,99} becomes .{1,99}$",
        ),
        (replace(small_vocabulary(320, "qwen2"), merges=["abc"]), "the merge 'abc' is not of two pieces"),
        (replace(small_vocabulary(320, "qwen2"), merges=["a q"]), "out of vocabulary"),
    ],
)
def test_what_is_refused(vocabulary: Vocabulary, message: str | None, cache: Path) -> None:
    if message is None:
        converted(vocabulary, cache)
        return
    with pytest.raises(ModelError, match=f"model.gguf cannot be used: .*{message}"):
        converted(vocabulary, cache)


def test_more_tokens_than_embeddings(cache: Path) -> None:
    made = checkpoints.llama(num_hidden_layers=1, vocab_size=100)
    with pytest.raises(ModelError, match="it has 101 tokens, and embeddings of 100"):
        model_folder(write_gguf(made, cache / "model.gguf", vocabulary=small_llama()))


def test_more_merges_than_vocabularies_have(cache: Path) -> None:
    """All parts of one text: their number grows with its square, that of the merges with its cube."""
    text = "".join(random.Random(5).choices("abcdefghijklmnop", k=110))
    parts = [*dict.fromkeys(text[first:end] for first in range(110) for end in range(first + 1, 111))]
    given = small_llama()
    pieces = [*given.pieces[:4], *parts]
    types = [*given.types[:4], *[NORMAL] * len(parts)]
    with pytest.raises(ModelError, match=r"can be made of two others in at least 11\d,\d{3} ways; 11\d,\d{3} are"):
        converted(replace(given, pieces=pieces, types=types, scores=[0.0] * len(pieces)), cache)


def test_a_vocabulary_that_merges_otherwise_is_refused(cache: Path) -> None:
    """An unused piece takes letters from others: sentencepiece takes it apart again, merges alone cannot."""
    given = with_piece("eH", kind=UNUSED, score=1.0)
    pieces, scores = [*given.pieces], [*(given.scores or [])]
    pieces[51], scores[51] = "HeHe", -99.0
    with pytest.raises(
        ModelError, match=r"does not encode as sentencepiece says: the ids of 'HeHe' from place . on are"
    ):
        converted(replace(given, pieces=pieces, scores=scores), cache)
