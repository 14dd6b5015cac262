"""Tiny random models in Hugging Face format, written by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from layers.linear import Linear
from layers.weight import Weight
from radixrt.models.decoder import Decoder

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
MINISTRAL_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}
# Of the four pairs of a head of 8.
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
}

# Phi-4 mini's peculiarities: three heads for one of keys, three quarters of which are rotated: six pairs of 16.
PHI4_MINI: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.5, 2.0, 2.2, 3.0],
        "long_factor": [1.0, 2.0, 5.0, 9.0, 12.0, 15.0],
    },
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


def ministral3(seed: int = 0, **changes: Any) -> Ministral3ForCausalLM:
    """Queries are scaled from position 32 on, and more from position 64 on."""
    own = {"head_dim": 16, "rope_parameters": MINISTRAL_ROPE}
    return _build(Ministral3ForCausalLM, Ministral3Config, seed, {**own, **changes})


def qwen2(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    return _build(Qwen2ForCausalLM, Qwen2Config, seed, changes)


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    return _build(Qwen3ForCausalLM, Qwen3Config, seed, {"head_dim": 16, **changes})


def phi3(seed: int = 0, **changes: Any) -> Phi3ForCausalLM:
    return _build(Phi3ForCausalLM, Phi3Config, seed, changes)


def olmo2(seed: int = 0, **changes: Any) -> Olmo2ForCausalLM:
    return _build(Olmo2ForCausalLM, Olmo2Config, seed, changes)


def olmo3(seed: int = 0, **changes: Any) -> Olmo3ForCausalLM:
    """Its first layer has a window, and its ropes differ."""
    own = {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": YARN_ROPE,
        },
    }
    return _build(Olmo3ForCausalLM, Olmo3Config, seed, {**own, **changes})


def glm4(seed: int = 0, **changes: Any) -> Glm4ForCausalLM:
    return _build(Glm4ForCausalLM, Glm4Config, seed, {"head_dim": 16, "attention_bias": True, **changes})


def glm4_moe(seed: int = 0, **changes: Any) -> Glm4MoeForCausalLM:
    """Its first layer is dense; the correction changes what is chosen, and the factor is another than 1."""
    own = {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "attention_bias": True,
        "use_qk_norm": True,
    }
    model = _build(Glm4MoeForCausalLM, Glm4MoeConfig, seed, {**own, **changes})
    _correct_choices(model)
    return model


def _correct_choices(model: Any) -> None:
    """Of routers of sigmoids."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)


_GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}


def granite(seed: int = 0, **changes: Any) -> GraniteForCausalLM:
    return _build(GraniteForCausalLM, GraniteConfig, seed, {**_GRANITE_FACTORS, **changes})


def granite4(seed: int = 0, **changes: Any) -> GraniteMoeHybridForCausalLM:
    """Of attention alone, without experts."""
    own = {
        **_GRANITE_FACTORS,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.8,
        "layer_types": ["full_attention", "full_attention"],
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 2,
    }
    return _build(GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, seed, {**own, **changes})


# Two layers of Mamba-2, attention between them; heads of two groups.
_MAMBA2: dict[str, Any] = {
    "initializer_range": 0.12,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "attention_multiplier": 3.0,
    "residual_multiplier": 1.5,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}


def granite4_hybrid(seed: int = 0, **changes: Any) -> GraniteMoeHybridForCausalLM:
    """Steps of Mamba-2 are limited."""
    return granite4(seed, **{**_MAMBA2, "time_step_limit": [0.3, 1.2], **changes})


def granite4_hybrid_moe(seed: int = 0, **changes: Any) -> GraniteMoeHybridForCausalLM:
    own = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20}
    return granite4_hybrid(seed, **{**own, **changes})


def nemotron_h(seed: int = 0, **changes: Any) -> NemotronHForCausalLM:
    """Layers with and without a feed-forward layer after them; steps are not limited."""
    kinds = {"M": "mamba", "*": "attention", "-": "mlp"}
    own = {
        "initializer_range": 0.18,
        "head_dim": 8,
        "layers_block_type": [kinds[kind] for kind in "M-MM*-"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "time_step_min": 1e-9,
        "layer_norm_epsilon": 1e-6,
    }
    model = _build(NemotronHForCausalLM, NemotronHConfig, seed, {**own, **changes})
    _correct_choices(model)
    return model


def nemotron_h_moe(seed: int = 0, **changes: Any) -> NemotronHForCausalLM:
    own = {
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp", "mamba", "moe"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "routed_scaling_factor": 1.7,
    }
    return nemotron_h(seed, **{**own, **changes})


def exaone4(seed: int = 0, **changes: Any) -> Exaone4ForCausalLM:
    """Its first layer has a window, and positions; the second one has neither."""
    own = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    return _build(Exaone4ForCausalLM, Exaone4Config, seed, {**own, **changes})


def ernie4_5(seed: int = 0, **changes: Any) -> Ernie4_5ForCausalLM:
    return _build(Ernie4_5ForCausalLM, Ernie4_5Config, seed, {"head_dim": 16, **changes})


def hunyuan(seed: int = 0, **changes: Any) -> HunYuanDenseV1ForCausalLM:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
    own = {"head_dim": 16, "rope_parameters": rope}
    return _build(HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config, seed, {**own, **changes})


def seed_oss(seed: int = 0, **changes: Any) -> SeedOssForCausalLM:
    return _build(SeedOssForCausalLM, SeedOssConfig, seed, {"head_dim": 16, **changes})


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


# Two layers that are gated delta nets, attention between them; two value heads for one of keys. Weights are small:
# the larger they are, the more depends on the last bits, by these nets' norms and decays.
_DELTA_NETS: dict[str, Any] = {
    "initializer_range": 0.12,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}


def qwen3_next(seed: int = 0, **changes: Any) -> Qwen3NextForCausalLM:
    """Its last layer is dense."""
    own = {**_DELTA_NETS, **_EXPERTS, "mlp_only_layers": [2]}
    return _build(Qwen3NextForCausalLM, Qwen3NextConfig, seed, {**own, **changes})


def qwen3_5(seed: int = 0, **changes: Any) -> Qwen3_5ForCausalLM:
    return _build(Qwen3_5ForCausalLM, Qwen3_5TextConfig, seed, {**_DELTA_NETS, **changes})


def qwen3_5_moe(seed: int = 0, **changes: Any) -> Qwen3_5MoeForCausalLM:
    own = {**_DELTA_NETS, **_EXPERTS}
    return _build(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, seed, {**own, **changes})


# Two layers that are short convolutions, attention between them. What those add is of the fifth degree in weights:
# with larger ones, attention would not show.
_SHORT_CONVS: dict[str, Any] = {
    "initializer_range": 0.2,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 4,
}


def lfm2(seed: int = 0, **changes: Any) -> Lfm2ForCausalLM:
    """Of an intermediate size that is adjusted, to 60."""
    own = {**_SHORT_CONVS, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 20}
    return _build(Lfm2ForCausalLM, Lfm2Config, seed, {**own, **changes})


def lfm2_moe(seed: int = 0, **changes: Any) -> Lfm2MoeForCausalLM:
    """Its first layer is dense."""
    own = {
        **_SHORT_CONVS,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.7,
    }
    model = _build(Lfm2MoeForCausalLM, Lfm2MoeConfig, seed, {**own, **changes})
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model


def gpt_oss(seed: int = 0, **changes: Any) -> GptOssForCausalLM:
    """Its first layer has a window. Biases of the experts bring many of their gates beyond the clamp."""
    own = {
        "head_dim": 16,
        "num_attention_heads": 6,
        "intermediate_size": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": WINDOW,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
    }
    model = _build(GptOssForCausalLM, GptOssConfig, seed, {**own, **changes})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-2.0, 4.0)
            layer.mlp.experts.gate_up_proj_bias.normal_(std=6.0)
            layer.mlp.experts.down_proj_bias.normal_(std=0.3)
            layer.mlp.router.weight.normal_(std=0.5)
    return model


def gpt_oss_in_mxfp4(seed: int = 0, **changes: Any) -> GptOssForCausalLM:
    """Its experts' weights are what `packed` means: the tensors that `write` stores in their places."""
    model = gpt_oss(seed, **{"intermediate_size": 64, **changes})
    packed: dict[str, torch.Tensor] = {}
    draw = partial(
        torch.randint, dtype=torch.uint8, generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    )
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, depth, columns = weight.shape
            groups = num_experts, columns, depth // 32
            blocks, scales = draw(256, (*groups, 16)), draw(121, 126, groups)
            weight.data = convert_moe_packed_tensors(
                blocks.to(weight.device), scales.to(weight.device), dtype=torch.float32
            )
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    vars(model)["packed"] = packed
    return model


# Of one small layer, which is never used.
_VISION = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_VISION_SIZES = {"hidden_size": 16, "intermediate_size": 16}


def gemma3_with_images(seed: int = 0, **changes: Any) -> Gemma3ForConditionalGeneration:
    vision = {**_VISION, **_VISION_SIZES}
    own = {"vision_config": vision, "mm_tokens_per_image": 4}
    return _around(gemma3(seed, **changes), Gemma3ForConditionalGeneration, Gemma3Config, own)


def mistral_with_images(seed: int = 0, **changes: Any) -> Mistral3ForConditionalGeneration:
    return _around_mistral(mistral(seed, sliding_window=None, **changes))


def ministral3_with_images(seed: int = 0, **changes: Any) -> Mistral3ForConditionalGeneration:
    return _around_mistral(ministral3(seed, **changes))


def _around_mistral(text: Any) -> Mistral3ForConditionalGeneration:
    vision = {**_VISION, **_VISION_SIZES, "model_type": "pixtral", "head_dim": 8}
    return _around(text, Mistral3ForConditionalGeneration, Mistral3Config, {"vision_config": vision})


def qwen2_vl(seed: int = 0, **changes: Any) -> Qwen2_5_VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "num_heads": 2}
    text = qwen2(seed, **changes)
    own = {"vision_config": vision, **_IMAGE_TOKENS}
    return _around(text, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, own, rope)


def qwen3_vl(seed: int = 0, **changes: Any) -> Qwen3VLForConditionalGeneration:
    return _around_qwen3(qwen3(seed, **changes), Qwen3VLForConditionalGeneration, Qwen3VLConfig)


def qwen3_vl_moe(seed: int = 0, **changes: Any) -> Qwen3VLMoeForConditionalGeneration:
    text = qwen3_moe(seed, norm_topk_prob=True, **changes)
    return _around_qwen3(text, Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig)


def qwen3_5_with_images(seed: int = 0, **changes: Any) -> Qwen3_5ForConditionalGeneration:
    return _around_qwen3(qwen3_5(seed, **changes), Qwen3_5ForConditionalGeneration, Qwen3_5Config)


def qwen3_5_moe_with_images(seed: int = 0, **changes: Any) -> Qwen3_5MoeForConditionalGeneration:
    return _around_qwen3(qwen3_5_moe(seed, **changes), Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig)


def _around_qwen3(text: Any, model_class: Any, config_class: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "num_heads": 2}
    own = {"vision_config": {**vision, "deepstack_visual_indexes": []}, **_IMAGE_TOKENS}
    return _around(text, model_class, config_class, own, rope)


_IMAGE_TOKENS = {
    "image_token_id": VOCAB_SIZE + 1,
    "video_token_id": VOCAB_SIZE + 2,
    "vision_start_token_id": VOCAB_SIZE + 3,
    "vision_end_token_id": VOCAB_SIZE + 4,
}


def _around(
    text: Any, model_class: Any, config_class: Any, own: dict[str, Any], rope: dict[str, Any] | None = None
) -> Any:
    """A model with images whose text part is `text`."""
    given = text.config.to_dict()
    if rope is not None:  # a type of its own
        del given["model_type"]
        given["rope_parameters"] = rope
    tied = text.config.tie_word_embeddings
    model = model_class(config_class(text_config=given, tie_word_embeddings=tied, **own)).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


_CENTRED = ("gemma", "qwen3_next", "qwen3_5")  # whose norms have weights around 0


_STATES = {"linear_key_head_dim", "mamba_d_state", "ssm_state_size"}  # of configs of models that keep states


def _build(model_class: Any, config_class: Any, seed: int, changes: dict[str, Any]) -> Any:
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **changes}))
    # Biases and norm weights, which transformers leaves at 0 and 1, random too: a swapped one shows.
    centred = 0.0 if model.config.model_type.startswith(_CENTRED) else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif name.endswith("A_log"):  # some heads forget soon, some late
                parameter.uniform_(-4.0, 0.0)
            elif name.endswith(".D"):
                parameter.normal_()
            elif changes.keys() & _STATES and name.endswith("o_proj.weight"):
                parameter.normal_(std=0.4)
            elif name.endswith("self_attn.out_proj.weight"):  # LFM2's, beside convolutions
                parameter.normal_(std=0.6)
            elif "linear_attn.norm" in name:  # of heads, not centred
                parameter.uniform_(0.5, 1.5)
            elif "norm" in name:
                parameter.uniform_(centred - 0.5, centred + 0.5)
            elif name.endswith(("mlp.gate.weight", "mixer.gate.weight")):  # of routers, which may be left at 0
                parameter.normal_(std=0.5)
    return model.eval()


def write(
    model: Any, folder: Path, *, max_shard_size: str = "1GB", eos: int | list[int] | None = None, **options: Any
) -> Path:
    """Save `model` into `folder` in float32, with `eos` in generation_config.json if given."""
    if eos is not None:
        model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder, max_shard_size=max_shard_size, **options)
    if packed := getattr(model, "packed", None):
        _store_packed(folder, packed)
    return folder


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def linear_weights(model: Decoder) -> list[Weight]:
    """Those of its linear layers, in the order of the layers."""
    return [layer.weight for layer in model.modules() if isinstance(layer, Linear)]


def _store_packed(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    """Put tensors into a checkpoint, in place of those that they are read as."""
    replaced = {name.rpartition("_")[0] for name in packed}
    kept = {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if name not in replaced
    }
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(kept, folder / "model-00001-of-00002.safetensors")
    save_file(packed, folder / "model-00002-of-00002.safetensors")
    places = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
