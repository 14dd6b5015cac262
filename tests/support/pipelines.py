"""Tokenizers of the package tokenizers and of sentencepiece, small ones, by what they do with a text.

Their vocabularies were trained on texts that nothing had split: a text that is cut where it must not be has other
tokens.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken as Added
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers as norms

from radixrt.models.gguf_splits import SPLITS
from radixrt.text.added_token import AddedToken
from radixrt.text.codec import Codec, JsonCodec, SentencePieceCodec
from radixrt.text.tokenizer_json import OF_LLAMA_3, OF_TEKKEN
from tests.support.expressions import CL100K, O200K
from tests.support.shared_texts import shared_texts

BLANK = "▁"
PLAIN = (Added("<s>", special=True), Added("</s>", special=True), Added("<tool>", normalized=False))
# What texts are searched for, of every kind.
MARKERS = (
    *PLAIN,
    Added("<t>", rstrip=True, normalized=False),
    Added("<l>", lstrip=True, normalized=False),
    Added("[w]", single_word=True, normalized=False),
    Added("[W]", single_word=True, normalized=True, rstrip=True),
    Added(" x", normalized=True),
    Added("x y", normalized=True),
    Added("a\nb", normalized=False),
    Added("1é", normalized=True),
    Added("é", normalized=True, single_word=True),
    Added("Ab", normalized=True, lstrip=True),
    Added("\n\n", normalized=False),
    Added("    ", normalized=False),
    Added("  ", normalized=True),
)
TEXT_MARKERS = (*(one.content for one in MARKERS), "<s> ", "<t>  ", "  <l>", "1e\u0301", "x\u3000y", "e\u0301")


@cache
def corpus() -> tuple[str, ...]:
    rng = random.Random(7)
    return tuple(text for _ in range(30) for text in shared_texts(rng, TEXT_MARKERS))


@cache
def _bpe(kind: str, ignore_merges: bool = False) -> str:
    """A trained model: of bytes, or of characters with a blank that is spelled out."""
    backend = Backend(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    texts: Sequence[str] = corpus()
    alphabet: list[str] = []
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        texts = [BLANK + text.replace(" ", BLANK) for text in texts]
        if kind == "words":  # no piece has a blank inside; a run of blanks is one
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{BLANK}+[^{BLANK}]*"), "isolated")
        elif kind == "words without runs":
            backend.pre_tokenizer = pre_tokenizers.Split(BLANK, "merged_with_next")
    special = [] if kind == "bytes" else ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=alphabet,
        limit_alphabet=400,
        special_tokens=special,
        max_token_length=12,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    spec = json.loads(backend.to_str())["model"]
    spec["ignore_merges"] = ignore_merges
    return json.dumps(spec)


def json_pipeline(
    model: str | Callable[[], str],
    splits: Sequence[Any] = (),
    normalizers: Sequence[Any] = (),
    added: Sequence[Added] = (),
    **of_model: Any,
) -> Codec:
    spec = json.loads(_bpe(model) if isinstance(model, str) else model())
    backend = Backend(models.BPE())
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(list(splits)) if len(splits) > 1 else splits[0]
    if normalizers:
        backend.normalizer = norms.Sequence(list(normalizers)) if len(normalizers) > 1 else normalizers[0]
    whole = json.loads(backend.to_str())
    whole["model"] = {**spec, **of_model}
    backend = Backend.from_str(json.dumps(whole))
    backend.decoder = decoders.ByteFallback()
    backend.add_tokens([one for one in added if not one.special])
    backend.add_special_tokens([one for one in added if one.special])
    return JsonCodec(backend)


def _unigram() -> str:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=3000, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(corpus(), trainer)
    return json.dumps(json.loads(backend.to_str())["model"])


def _word_pieces() -> str:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    return json.dumps(json.loads(backend.to_str())["model"])


@cache
def _sentencepiece(**more: Any) -> bytes:
    model = io.BytesIO()
    settings = {
        "vocab_size": 900,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 1.0,
        **more,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(["".join(one for one in text if " " <= one < "ʀ") for text in corpus()]),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


def _with_prefix(model: bytes, prefix: bool, **more: Any) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    schema: Any = sentencepiece_model_pb2
    proto = schema.ModelProto.FromString(model)
    proto.normalizer_spec.add_dummy_prefix = prefix
    return bytes(proto.SerializeToString())


SP_ADDED = {
    1: AddedToken("<s>", True),
    2: AddedToken("</s>", True),
    5000: AddedToken("<tool>", False),
    5001: AddedToken("<t>", False, rstrip=True),
    5002: AddedToken("<l>", False, lstrip=True),
    5003: AddedToken("[w]", False, single_word=True),
    5004: AddedToken("x y", False),
    5005: AddedToken("    ", False),
    5006: AddedToken("a\nb", False),
}


def sentencepiece_pipeline(
    added: dict[int, AddedToken], *, prefix: bool = True, is_legacy: bool = False, **more: Any
) -> Codec:
    return SentencePieceCodec(_with_prefix(_sentencepiece(**more), prefix), added, is_legacy=is_legacy)


def _split(expression: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(expression), behavior, invert)


AS_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA_2 = (norms.Prepend(BLANK), norms.Replace(" ", BLANK))
GEMMA = (norms.Replace(" ", BLANK),)


def _metaspace(scheme: str, split: bool) -> Any:
    return pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme=scheme, split=split)


def _of_splits() -> dict[str, Callable[[], Codec]]:
    """By each way to split texts that GGUF files name."""
    names = {split: name for name, split in SPLITS.items()}
    return {
        f"split as {name}": partial(
            json_pipeline,
            "bytes",
            [*map(_split, split.expressions), AS_BYTES],
            [norms.NFC()] if split.composes else [],
            MARKERS,
            ignore_merges=split.ignores_merges,
        )
        for split, name in names.items()
    }


def _bytes(*splits: Any, normalizers: Sequence[Any] = (), added: Sequence[Added] = MARKERS) -> Callable[[], Codec]:
    return partial(json_pipeline, "bytes", splits, normalizers, added)


def _blanks(
    *splits: Any,
    model: str = "words",
    normalizers: Sequence[Any] = (),
    added: Sequence[Added] = PLAIN,
    **more: Any,
) -> Callable[[], Codec]:
    return partial(json_pipeline, model, splits, normalizers, added, **more)


def _sp(added: bool, **more: Any) -> Callable[[], Codec]:
    return partial(sentencepiece_pipeline, SP_ADDED if added else {}, **more)


FALLS_BACK = {"byte_fallback": True}
PIPELINES: dict[str, Callable[[], Codec]] = {
    **_of_splits(),
    "gpt-2": _bytes(GPT2, added=PLAIN),
    "gpt-2, a blank before texts": _bytes(pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)),
    "llama 3": _bytes(_split(OF_LLAMA_3), AS_BYTES),
    "tekken": _bytes(_split(OF_TEKKEN), AS_BYTES),
    "o200k": _bytes(_split(O200K), AS_BYTES),
    "cl100k": _bytes(_split(CL100K), AS_BYTES),
    "split and removed": _bytes(_split(r"\s+", "removed"), AS_BYTES),
    "split and inverted": _bytes(_split(r"[^\s]+|\s", "removed", True), AS_BYTES),
    "split and contiguous": _bytes(_split(r"\s", "contiguous"), GPT2),
    "split, merged with what precedes": _bytes(_split(r"\p{N}", "merged_with_previous"), GPT2),
    "split, merged with what follows": _bytes(_split(r"\p{N}", "merged_with_next"), GPT2),
    "split at a text": _bytes(pre_tokenizers.Split(". ", "isolated"), GPT2),
    "split by lines": _bytes(_split(r"a+$|[^a]"), AS_BYTES),
    "digits": _bytes(pre_tokenizers.Digits(individual_digits=True), GPT2),
    "digits together": _bytes(pre_tokenizers.Digits(individual_digits=False), GPT2),
    "punctuation": _bytes(pre_tokenizers.Punctuation("isolated"), GPT2),
    "punctuation together": _bytes(pre_tokenizers.Punctuation("contiguous"), AS_BYTES),
    "whitespace": _bytes(pre_tokenizers.Whitespace(), AS_BYTES),
    "words and marks": _bytes(pre_tokenizers.BertPreTokenizer(), AS_BYTES),
    "a delimiter": _bytes(pre_tokenizers.CharDelimiterSplit("x"), GPT2),
    "after bytes": _bytes(GPT2, pre_tokenizers.Digits(individual_digits=True), _split("[^Ġ]+")),
    **{
        f"{name}, {split}": _bytes(*splits, normalizers=normalizers)
        for name, normalizers in {
            "nfc": [norms.NFC()],
            "nfd": [norms.NFD()],
            "nfkc": [norms.NFKC()],
            "nfkd": [norms.NFKD()],
            "lowercase": [norms.Lowercase()],
            "nfkc and lowercase": [norms.NFKC(), norms.Lowercase()],
            "replace": [norms.Replace("x", " "), norms.Replace("ab", "é"), norms.Replace("é", "e\u0301")],
            "replace and nfc": [norms.Replace("q", "e\u0301"), norms.Replace("k", ""), norms.NFC()],
        }.items()
        for split, splits in {"gpt-2": [GPT2], "llama 3": [_split(OF_LLAMA_3), AS_BYTES]}.items()
    },
    "nfkc, every letter": _bytes(_split(r"[\s\S]"), AS_BYTES, normalizers=[norms.NFKC()]),
    "nfc, every letter": _bytes(_split(r"[\s\S]"), AS_BYTES, normalizers=[norms.NFC()]),
    "every letter": _bytes(_split(r"[\s\S]"), AS_BYTES),
    "llama 2": _blanks(normalizers=LLAMA_2, **FALLS_BACK),
    "llama 2, markers": _blanks(normalizers=LLAMA_2, added=MARKERS, **FALLS_BACK),
    "llama 2, no runs": _blanks(model="words without runs", normalizers=LLAMA_2, added=MARKERS, **FALLS_BACK),
    "llama 2, unknown": _blanks(normalizers=LLAMA_2, fuse_unk=True),
    "llama 2, blanks inside": _blanks(model="anything", normalizers=LLAMA_2, **FALLS_BACK),
    "llama 2, a blank is a marker": _blanks(normalizers=LLAMA_2, added=(*PLAIN, Added(" ", normalized=True))),
    "a marker takes blanks": _bytes(
        pre_tokenizers.Digits(individual_digits=True), GPT2, added=(*PLAIN, Added("<t>", rstrip=True))
    ),
    "a blank is put, and stays": _blanks(
        pre_tokenizers.WhitespaceSplit(), normalizers=[norms.Prepend(BLANK)], **FALLS_BACK
    ),
    "gemma": _blanks(_split(" ", "merged_with_previous"), normalizers=GEMMA, added=MARKERS, **FALLS_BACK),
    "gemma, no runs": _blanks(model="words without runs", normalizers=GEMMA, added=MARKERS, **FALLS_BACK),
    "gemma, unknown": _blanks(normalizers=GEMMA, fuse_unk=True),
    **{
        f"metaspace {scheme}{', split' if split else ''}, {model}": _blanks(
            _metaspace(scheme, split), model=model, added=added, normalizers=normalizers, **FALLS_BACK
        )
        for scheme in ("always", "first", "never")
        for split in (True, False)
        for model, normalizers, added in (
            ("words", [], MARKERS),
            ("words without runs", [norms.NFKC()], MARKERS),
            ("anything", [], MARKERS),
        )
    },
    **{
        f"unigram {scheme}{', split' if split else ''}": partial(
            json_pipeline, _unigram, [_metaspace(scheme, split)], [], PLAIN
        )
        for scheme in ("always", "first", "never")
        for split in (True, False)
    },
    "wordpiece": partial(
        json_pipeline, _word_pieces, [pre_tokenizers.BertPreTokenizer()], [norms.Lowercase()], PLAIN
    ),
    **{
        f"sentencepiece{'' if added else ', bare'}{', ' if name else ''}{name}": _sp(added, **more)
        for added in (True, False)
        for name, more in {
            "": {},
            "legacy": {"is_legacy": True},
            "no blank before texts": {"prefix": False},
            "extra blanks removed": {"remove_extra_whitespaces": True},
            "extra blanks removed, legacy": {"remove_extra_whitespaces": True, "is_legacy": True},
            "unknown": {"byte_fallback": False},
            "user-defined": {"user_defined_symbols": ("<table>", "▁▁", "▁▁▁", "e▁f", "x", "\n")},
            "user-defined, no blank": {
                "user_defined_symbols": ("<table>", "▁▁", "▁▁▁", "e▁f", "x", "\n"),
                "prefix": False,
            },
        }.items()
    },
}
WITHOUT_CUTS: dict[str, Callable[[], Codec]] = {
    "strip": _bytes(GPT2, normalizers=[norms.Strip()]),
    "expression": _bytes(GPT2, normalizers=[norms.Replace(Regex("a+"), "b")]),
    "look behind": _bytes(_split(r"(?<=a)b|\s"), AS_BYTES),
    "two blanks": _blanks(_metaspace("first", True), normalizers=[norms.Prepend(BLANK)]),
    "no blank": _blanks(_metaspace("first", True), GPT2, _metaspace("first", True)),
    "another before texts": _blanks(normalizers=[norms.Prepend("_")]),
    "scripts": _bytes(pre_tokenizers.UnicodeScripts(), GPT2),
    "sentencepiece, unigram": _sp(False, model_type="unigram"),
    "sentencepiece, nfkc": _sp(False, normalization_rule_name="nmt_nfkc"),
    "sentencepiece, no blank, and extra ones removed": _sp(False, prefix=False, remove_extra_whitespaces=True),
    "sentencepiece, blanks at the end of words": _sp(False, treat_whitespace_as_suffix=True),
}
