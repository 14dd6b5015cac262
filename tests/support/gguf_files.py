"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from radixrt.text.byte_level import LETTERS

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
}
F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    model: Any,
    file: Path,
    *,
    stored_as: gguf.GGMLQuantizationType = F32,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    without: str | None = None,
    pre: str | None = "llama",
    adds_bos: bool | None = None,
    vocabulary: Vocabulary | None = None,
) -> Path:
    """Write a transformers model. Matrices are `stored_as`, all else is in float32.

    `fields` are more of the architecture's, `extra` more tensors; the tensor `without` is left out. The tokenizer
    is the `vocabulary`, or a small one that splits texts by `pre`.
    """
    config = model.config
    number = ARCHITECTURES[config.model_type]
    arch = gguf.MODEL_ARCH_NAMES[number]
    writer = gguf.GGUFWriter(file, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters
    known = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(ropes.get("full_attention", ropes)["rope_theta"]),
        **(fields or {}),
    }
    for name, value in known.items():
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add = writer.add_array if isinstance(value, list) else writer.add_string if isinstance(value, str) else add
        add(f"{arch}.{name}" if "." not in name or name.split(".")[0] in _OF_ARCH else name, value)
    (vocabulary or small_vocabulary(config.vocab_size, pre)).add_to(writer)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)

    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, value in _checkpoint(model):
        stem, _, kind = name.rpartition(".")
        stored = names.get_name(stem)
        assert stored is not None, name
        if arch == "llama" and stored.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if stored.endswith("q") else config.num_key_value_heads
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if "gemma" in arch and name.endswith("norm.weight"):
            value = value + 1
        if f"{stored}.{kind}" != without:
            _add_tensor(writer, f"{stored}.{kind}", value.contiguous().numpy(), stored_as)
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _checkpoint(model: Any) -> Any:
    """Names and tensors; experts as llama.cpp stacks them, gate and up apart."""
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), value.chunk(2, dim=1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}.weight", half
        else:
            yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), value


def _add_tensor(writer: Any, name: str, value: np.ndarray, stored_as: gguf.GGMLQuantizationType) -> None:
    if value.ndim > 1 and stored_as != F32:
        writer.add_tensor(name, gguf.quants.quantize(value, stored_as), raw_dtype=stored_as)
    else:
        writer.add_tensor(name, value)


_OF_ARCH = ("attention", "rope")
BYTE_LEVEL_SIZE = 320  # rows that a model needs for a tokenizer with all bytes
MERGED = {"He": "H e", "(He": "( He", "37": "3 7", "371": "37 1"}
MARKERS = ["<unk>", "<s>", "</s>", "<|im_end|>"]


@dataclass(frozen=True)
class Vocabulary:
    """What `tokenizer.ggml.*` says, its scalars by their names there. `types` are gguf.TokenType's."""

    kind: str
    pieces: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    scalars: dict[str, bool | int | str] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)

    def add_to(self, writer: Any) -> None:
        writer.add_tokenizer_model(self.kind)
        writer.add_token_list(self.pieces)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for name, value in self.scalars.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
            (writer.add_string if isinstance(value, str) else add)(f"tokenizer.ggml.{name}", value)
        if self.templates:
            writer.add_chat_template([{"name": name, "template": each} for name, each in self.templates.items()])


def small_vocabulary(size: int, pre: str | None) -> Vocabulary:
    """Of `size` tokens at most, split by `pre`; "llama" is one of sentencepiece's."""
    is_llama = pre == "llama"
    letters = [*map(chr, range(33, 125)), "\u2581"] if is_llama else [*LETTERS.values()]
    pieces = [*MARKERS, *MERGED, *letters, *(f"<extra_{n}>" for n in range(size))][:size]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    return Vocabulary(
        "llama" if is_llama else "gpt2",
        pieces,
        [control if piece in MARKERS else normal for piece in pieces],
        scores=[-float(number) for number in range(size)] if is_llama else None,
        merges=None if is_llama else list(MERGED.values()),
        scalars={
            **({} if is_llama or pre is None else {"pre": pre}),
            "unknown_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "padding_token_id": 2,
        },
    )


def rounded(model: Any, stored_as: gguf.GGMLQuantizationType = F32) -> Any:
    """Change the model's weights to what a GGUF file of it holds, in bfloat16."""
    is_gemma = "gemma" in model.config.model_type
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = parameter.data
            if stored_as != F32 and value.dim() > 1:
                stored = gguf.quants.quantize(value.numpy(), stored_as)
                value = torch.from_numpy(gguf.quants.dequantize(stored, stored_as))
            elif is_gemma and name.endswith("norm.weight"):
                value = (value + 1) - 1
            parameter.copy_(value.bfloat16().float())
    return model
