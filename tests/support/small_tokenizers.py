"""Tokenizers of every kind, made in milliseconds."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radixrt.text.tokenizer import Tokenizer, load_tokenizer

TEXT = "Mira likes Oslo. Tarek counts 37. the quick brown fox, hello again; 日本 é 😀"
KINDS = (
    "byte level",
    "byte fallback",  # sentencepiece converted by transformers, as Llama 2
    "sentencepiece",  # with tokenizer_config.json
    "byte fallback, no strip",  # as Gemma
    "bare",
    "bare, with BOS blanks removed",
    "bare, no byte fallback",
    "metaspace",
    "wordpiece",
    "ends of words",  # as CLIP: what follows a word decides whether its blank is there
    "no decoder",
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As gpt-oss has it: an answer names its channel, and only the final channel's text is an answer of the history.
HARMONY = (
    "{% macro system() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}{% endmacro %}<|start|>system<|message|>{{ system() }}<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('the content names channels') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def sentencepiece_model(**more: Any) -> bytes:
    model = io.BytesIO()
    settings = {
        "vocab_size": 330,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        **more,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT[:50], "the quick brown fox", "hello again"] * 20),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


def byte_level(special: tuple[str, ...] = ("<s>", "</s>"), **more: Any) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 5, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **more
    )


def _trained(
    model: Any, trainer: Any, pre_tokenizer: Any = None, decoder: Any = None, normalizer: Any = None
) -> PreTrainedTokenizerFast:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.WhitespaceSplit()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator([TEXT] * 5, trainer)
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _fast(kind: str) -> PreTrainedTokenizerFast:
    special = ["<unk>", "<s>", "</s>"]
    if kind == "byte level":
        return byte_level()
    if kind == "byte fallback, no strip":
        fast = _trained(
            models.BPE(unk_token="<unk>", byte_fallback=True),
            trainers.BpeTrainer(
                vocab_size=400,
                special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
                show_progress=False,
            ),
            pre_tokenizers.Split(" ", "merged_with_previous"),
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            normalizers.Replace(" ", "▁"),
        )
        # byte pieces are ordinary tokens: only the trainer wanted them to be special
        spelled = json.loads(fast.backend_tokenizer.to_str())
        spelled["added_tokens"] = [token for token in spelled["added_tokens"] if token["content"] in special]
        backend = Backend.from_str(json.dumps(spelled))
        return PreTrainedTokenizerFast(tokenizer_object=backend)
    if kind == "metaspace":
        return _trained(
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False),
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
        )
    if kind == "wordpiece":
        return _trained(
            models.WordPiece(unk_token="<unk>"),
            trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False),
            None,
            decoders.WordPiece(),
        )
    if kind == "ends of words":
        return _trained(
            models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
            trainers.BpeTrainer(
                vocab_size=150, special_tokens=special, end_of_word_suffix="</w>", show_progress=False
            ),
            pre_tokenizers.BertPreTokenizer(),
            decoders.BPEDecoder("</w>"),
        )
    return _trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=special, show_progress=False),
    )


def write_llama(folder: Path, model: bytes | None = None, **more: Any) -> Path:
    """A folder with a `tokenizer.model`, and the configuration of Llama's."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model() if model is None else model)
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def small_tokenizer(kind: str) -> Tokenizer:
    """One of KINDS."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "byte fallback":
            AutoTokenizer.from_pretrained(write_llama(folder)).save_pretrained(folder)
        elif kind == "sentencepiece":
            write_llama(folder)
        elif kind == "bare":
            (folder / "tokenizer.model").write_bytes(sentencepiece_model())
        elif kind == "bare, with BOS blanks removed":
            (folder / "tokenizer.model").write_bytes(sentencepiece_model(remove_extra_whitespaces=True))
        elif kind == "bare, no byte fallback":
            (folder / "tokenizer.model").write_bytes(sentencepiece_model(byte_fallback=False, vocab_size=60))
        else:
            _fast(kind).save_pretrained(folder)
        return load_tokenizer(folder)


def chat_tokenizer(folder: Path, template: str = CHATML, **more: Any) -> Tokenizer:
    """A byte-level tokenizer with a chat template."""
    own = HARMONY_TOKENS if template is HARMONY else ("<|im_start|>", "<|im_end|>")
    fast = byte_level(("<s>", "</s>", *own), **more)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(folder)
