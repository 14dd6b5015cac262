"""Tiny random models in Hugging Face format, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 101

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Weights large enough that the context decides the next token.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama in float32; `changes` go to its config."""
    torch.manual_seed(seed)
    return _randomised(LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})))


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 in float32; `changes` go to its config."""
    torch.manual_seed(seed)
    return _randomised(Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 16, **changes})))


def write(model: Any, folder: Path, *, max_shard_size: str = "1GB", eos: int | list[int] | None = None) -> Path:
    """Save `model` into `folder` in float32, with `eos` in generation_config.json if given."""
    if eos is not None:
        model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _randomised(model: Any) -> Any:
    """Biases and norm weights, which transformers leaves at 0 and 1, random too: a swapped one shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()
