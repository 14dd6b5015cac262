"""Real vocabularies, of packages on the index, as llama.cpp's converter writes them into GGUF files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import gguf
import regex

from radixrt.text.byte_level import spelled
from radixrt.text.tekken import merges_by_rank
from tests.support.gguf_files import Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    int(gguf.TokenType[name]) for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
)


def of_sentencepiece(file: Path, prefix: bool = True) -> Vocabulary:
    from sentencepiece import SentencePieceProcessor

    own = SentencePieceProcessor(model_file=str(file))
    kinds = [
        (own.is_unknown, UNKNOWN),
        (own.is_control, CONTROL),
        (own.is_unused, UNUSED),
        (own.is_byte, BYTE),
    ]
    ids = range(own.vocab_size())
    return Vocabulary(
        "llama",
        [own.id_to_piece(i) for i in ids],
        [next((kind for is_it, kind in kinds if is_it(i)), NORMAL) for i in ids],
        scores=[own.get_score(i) for i in ids],
        scalars={
            "bos_token_id": own.bos_id(),
            "eos_token_id": own.eos_id(),
            "unknown_token_id": own.unk_id(),
            "add_space_prefix": prefix,
        },
    )


def of_json(file: Path, pre: str, **scalars: bool | int | str) -> Vocabulary:
    """Of a byte-level tokenizer.json."""
    given = json.loads(file.read_text(encoding="utf-8"))
    pieces = {number: piece for piece, number in given["model"]["vocab"].items()}
    added = {token["id"]: token for token in given["added_tokens"]}
    pieces |= {number: token["content"] for number, token in added.items()}
    types = []
    for number in range(max(pieces) + 1):
        if number not in pieces:
            pieces[number] = f"[PAD{number}]"
            types.append(UNUSED)
        elif number in added:
            token = added[number]
            looks_special = token["content"].startswith("<｜") and token["content"].endswith("｜>")  # noqa: RUF001
            types.append(CONTROL if token["special"] or looks_special else USER_DEFINED)
        else:
            types.append(NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in given["model"]["merges"]]
    ordered = [pieces[number] for number in range(len(pieces))]
    return Vocabulary("gpt2", ordered, types, merges=merges, scalars={"pre": pre, **scalars})


def of_ranks(ranks: dict[bytes, int], markers: dict[int, tuple[str, int]], pre: str, **scalars: int) -> Vocabulary:
    """Of a vocabulary of bytes, and markers with their types, by id."""
    pieces = {number: spelled(token) for token, number in ranks.items()}
    pieces |= {number: text for number, (text, _) in markers.items()}
    merges = [" ".join(pair) for pair in merges_by_rank(ranks)]
    types = [markers[number][1] if number in markers else NORMAL for number in range(len(pieces))]
    ordered = [pieces[number] for number in range(len(pieces))]
    return Vocabulary("gpt2", ordered, types, merges=merges, scalars={"pre": pre, **scalars})


def tekken_ranks(file: Path, count: int, first: int) -> tuple[dict[bytes, int], str]:
    """Ids of `count` tokens from `first` on, and the expression that splits texts."""
    given = json.loads(file.read_text(encoding="utf-8"))
    tokens = [base64.b64decode(each["token_bytes"]) for each in given["vocab"][:count]]
    return {token: first + rank for rank, token in enumerate(tokens)}, given["config"]["pattern"]


def by_ranks(expressions: Iterable[str], ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    """What encodes a text by merging the pair of bytes that makes the token of the lowest rank."""
    compiled = [regex.compile(each) for each in expressions]

    @lru_cache(maxsize=100_000)
    def of_word(word: bytes) -> tuple[int, ...]:
        if word in ranks:
            return (ranks[word],)
        parts = [bytes([byte]) for byte in word]
        while len(parts) > 1:
            pairs = [ranks.get(a + b, len(ranks) * 2) for a, b in pairwise(parts)]
            best = min(pairs)
            if best == len(ranks) * 2:
                break
            place = pairs.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return tuple(ranks[part] for part in parts)

    def encode(text: str) -> list[int]:
        words = [text]
        for each in compiled:
            words = [part for word in words for part in _isolated(each, word)]
        return [number for word in words for number in of_word(word.encode())]

    return encode


def _isolated(expression: regex.Pattern[str], text: str) -> Iterable[str]:
    end = 0
    for found in expression.finditer(text):
        if found.start() == found.end():
            continue
        if found.start() > end:
            yield text[end : found.start()]
        yield found[0]
        end = found.end()
    if end < len(text):
        yield text[end:]
