"""Tiny random models in Hugging Face format, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB_SIZE = 101

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC_ROPE: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
# Of the four pairs of a head of 8.
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
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
    "pad_token_id": None,
}


# Of families that look at it: shorter than every prompt that matters, and no divisor of anything.
WINDOW = 11


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama in float32; `changes` go to its config. So with the other families."""
    return _build(LlamaForCausalLM, LlamaConfig, seed, changes)


def mistral(seed: int = 0, **changes: Any) -> MistralForCausalLM:
    return _build(MistralForCausalLM, MistralConfig, seed, {"sliding_window": WINDOW, **changes})


def qwen2(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    return _build(Qwen2ForCausalLM, Qwen2Config, seed, changes)


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    return _build(Qwen3ForCausalLM, Qwen3Config, seed, {"head_dim": 16, **changes})


def phi3(seed: int = 0, **changes: Any) -> Phi3ForCausalLM:
    return _build(Phi3ForCausalLM, Phi3Config, seed, changes)


def olmo2(seed: int = 0, **changes: Any) -> Olmo2ForCausalLM:
    return _build(Olmo2ForCausalLM, Olmo2Config, seed, changes)


def smollm3(seed: int = 0, **changes: Any) -> SmolLM3ForCausalLM:
    """Its second layer has no rope."""
    own = {"no_rope_layer_interval": 2, "tie_word_embeddings": False}
    return _build(SmolLM3ForCausalLM, SmolLM3Config, seed, {**own, **changes})


def gemma2(seed: int = 0, **changes: Any) -> Gemma2ForCausalLM:
    """Its first layer has a window. The softcaps are low enough to bend what they cap."""
    own = {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
        "attn_implementation": "eager",
    }
    return _build(Gemma2ForCausalLM, Gemma2Config, seed, {**own, **changes})


def gemma3(seed: int = 0, **changes: Any) -> Gemma3ForCausalLM:
    """Two layers with a window, one without; each kind with a rope of its own."""
    own = {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    }
    return _build(Gemma3ForCausalLM, Gemma3TextConfig, seed, {**own, **changes})


def mixtral(seed: int = 0, **changes: Any) -> MixtralForCausalLM:
    return _build(MixtralForCausalLM, MixtralConfig, seed, {"num_local_experts": 5, **changes})


def qwen3_moe(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """Its first layer is dense."""
    own = {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [0],
    }
    return _build(Qwen3MoeForCausalLM, Qwen3MoeConfig, seed, {**own, **changes})


def _build(model_class: Any, config_class: Any, seed: int, changes: dict[str, Any]) -> Any:
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **changes}))
    # Biases and norm weights, which transformers leaves at 0 and 1, random too: a swapped one shows.
    centred = 0.0 if "gemma" in model.config.model_type else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(centred - 0.5, centred + 0.5)
            elif name.endswith("mlp.gate.weight"):  # of a router, which is left at 0 in Qwen3-MoE
                parameter.normal_(std=0.5)
    return model.eval()


def write(
    model: Any, folder: Path, *, max_shard_size: str = "1GB", eos: int | list[int] | None = None, **options: Any
) -> Path:
    """Save `model` into `folder` in float32, with `eos` in generation_config.json if given."""
    if eos is not None:
        model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder, max_shard_size=max_shard_size, **options)
    return folder
