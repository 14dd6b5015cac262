"""Vocabularies of published models as codecs, in each form that checkpoints have them in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from radixrt.builtin import MODEL_PATH
from radixrt.models.gguf_splits import SPLITS
from radixrt.text.byte_level import spelled
from radixrt.text.codec import Codec, JsonCodec
from radixrt.text.tekken import merges_by_rank
from radixrt.text.tokenizer import load_tokenizer
from tests.support.real_vocabularies import path_of, ranks_of, write_config

# What some of them search texts for.
MARKERS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<unk>", "[TOOL_CALLS]", "<tool>", "<t>", "  <l>"),  # noqa: RUF001
)


def _file(name: str, as_name: str, **config: Any) -> Codec:
    with TemporaryDirectory() as folder:
        (Path(folder) / as_name).symlink_to(path_of(name))
        if config:
            write_config(Path(folder), "LlamaTokenizer", "mistral", bos_token="<s>", eos_token="</s>", **config)
        return load_tokenizer(folder).codec


def _qwen(name: str, pre: str) -> Codec:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ranks = ranks_of(name)
    backend = Tokenizer(models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges_by_rank(ranks)))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre].expressions]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    backend.decoder, backend.normalizer = decoders.ByteLevel(), normalizers.NFC()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    return JsonCodec(backend)


def _of_gguf(file: Path) -> Codec:
    """The tokenizer of a file; its weights are left alone."""
    from radixrt.models.gguf_header import read_header
    from radixrt.models.gguf_tokenizer import Vocabulary, write_tokenizer

    header = read_header(file)
    with TemporaryDirectory() as folder:
        write_tokenizer(Vocabulary.of(header), header, Path(folder))
        return load_tokenizer(folder).codec


def _smollm2() -> Codec:
    return _of_gguf(path_of("smollm2"))


def _written(make: Callable[[], Any], model: str = "llama") -> Codec:
    """Of a file that is written with a vocabulary."""
    from tests.support import checkpoints
    from tests.support.gguf_files import write_gguf

    vocabulary = make()
    tiny = getattr(checkpoints, model)(num_hidden_layers=1, vocab_size=len(vocabulary.pieces))
    with TemporaryDirectory() as name:
        return _of_gguf(write_gguf(tiny, Path(name) / "a.gguf", vocabulary=vocabulary))


def _gguf_mistral(name: str, prefix: bool) -> Any:
    from tests.support.gguf_vocabularies import of_sentencepiece

    return of_sentencepiece(path_of(name), prefix)


def _gguf_qwen(name: str, pre: str) -> Any:
    from tests.support.gguf_vocabularies import CONTROL, USER_DEFINED, of_ranks

    ranks = ranks_of(name)
    marks = (
        ("<|endoftext|>", CONTROL),
        ("<|im_start|>", CONTROL),
        ("<think>", USER_DEFINED),
        ("  ", USER_DEFINED),
    )
    markers = {len(ranks) + place: mark for place, mark in enumerate(marks)}
    return of_ranks(ranks, markers, pre, eos_token_id=len(ranks))


def _gguf_deepseek() -> Any:
    from tests.support.gguf_vocabularies import of_json

    return of_json(path_of("deepseek v4"), "deepseek-v3", bos_token_id=0, eos_token_id=1, add_bos_token=True)


def _of_transformers(name: str) -> Codec:
    """As transformers 5 converts a sentencepiece model."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.model").symlink_to(path_of(name))
        write_config(Path(folder), "LlamaTokenizer", "llama", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
        return load_tokenizer(folder).codec


_TOOLS = {
    "40000": {"content": "<tool>", "special": False},
    "40001": {"content": "<t>", "special": False, "rstrip": True},
    "40002": {"content": "<l>", "special": False, "lstrip": True, "single_word": True},
}
_MISTRAL = ("mistral v1", "mistral v2", "mistral v3", "mistral v7")
_VOCABULARIES: dict[str, Callable[[], Codec]] = {
    "deepseek v4": partial(_file, "deepseek v4", "tokenizer.json"),
    "built-in": lambda: load_tokenizer(MODEL_PATH).codec,
    **{name: partial(_file, name, "tokenizer.model") for name in _MISTRAL},
    "mistral v3, tokens": partial(_file, "mistral v3", "tokenizer.model", added_tokens_decoder=_TOOLS),
    "mistral v3, legacy": partial(
        _file, "mistral v3", "tokenizer.model", added_tokens_decoder=_TOOLS, legacy=True
    ),
    "mistral v1, of transformers": partial(_of_transformers, "mistral v1"),
    "tekken 240718": partial(_file, "tekken 240718", "tekken.json"),
    "tekken 240911": partial(_file, "tekken 240911", "tekken.json"),
    "qwen": partial(_qwen, "qwen", "qwen2"),
    "qwen 3.6": partial(_qwen, "qwen 3.6", "qwen35"),
    "smollm2": _smollm2,
    "gguf, mistral v1": partial(_written, partial(_gguf_mistral, "mistral v1", True)),
    "gguf, mistral v3 as phi 3": partial(_written, partial(_gguf_mistral, "mistral v3", True), "phi3"),
    "gguf, mistral v7 as gemma": partial(_written, partial(_gguf_mistral, "mistral v7", False)),
    "gguf, qwen 3.6": partial(_written, partial(_gguf_qwen, "qwen 3.6", "qwen35")),
    "gguf, deepseek v4": partial(_written, _gguf_deepseek),
}
VOCABULARIES = tuple(_VOCABULARIES)


@cache
def vocabulary(name: str) -> Codec:
    """One of VOCABULARIES; the test is skipped where its package is not installed."""
    return _VOCABULARIES[name]()
