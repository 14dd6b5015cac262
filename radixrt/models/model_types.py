"""The model types that a config.json may name: the fields that each knows, with their defaults.

Families share types, and a type's defaults say nothing of an architecture: they are what a config.json leaves out.
Nothing here needs torch.
"""

# Tests: tests/models/test_config_fields.py

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True)
class ModelType:
    """`defaults`: of the fields that it knows. `other_names`: of fields, which come before the fields' own.

    `derive`: called in turn with the values of a config.json over the defaults, they fill in what follows from
    others, or raise ValueError. `theta`: the rope's, if it says none; None: there is no rope. `local_theta`: of
    layers with a window; None: they have no rope of their own. `rope`: what is not said otherwise of it.
    `renamed_ropes`: other names of kinds of ropes.
    """

    defaults: Mapping[str, Any]
    other_names: Mapping[str, str] = field(default_factory=dict)
    derive: tuple[Callable[[Values], None], ...] = ()
    theta: float | None = 10_000.0
    local_theta: float | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)
    renamed_ropes: Mapping[str, str] = field(default_factory=dict)


# --- what follows from other fields ---

# Kinds of layers by older names.
_LATER_KINDS = MappingProxyType(
    {"mamba": "linear_attention", "conv": "linear_attention", "attention": "full_attention"}
)
_NEMOTRON_KINDS = MappingProxyType({"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"})


def _window_if_used(values: Values) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None


def _windows_above(values: Values) -> None:
    """On layers from `max_window_layers` on."""
    if values["layer_types"] is None:
        first = values["num_hidden_layers"] if values["sliding_window"] is None else values["max_window_layers"]
        if first is None:
            raise ValueError("max_window_layers is None; with a sliding_window it must be a whole number")
        layers = range(values["num_hidden_layers"])
        values["layer_types"] = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]


def _interval(values: Values, name: str) -> int:
    """A field that says how often a kind of layers comes. Raises ValueError."""
    interval = values[name]
    if type(interval) is not int or interval < 1:
        raise ValueError(f"{name} is {interval!r}; without a list of the layers it must be a whole number from 1")
    return interval


def _full_attention_on_each(interval: int | str, others: str) -> Callable[[Values], None]:
    """The last layer of each `interval`, a number or the field that says it, is of full attention."""

    def derive(values: Values) -> None:
        if values["layer_types"] is None:
            length = _interval(values, interval) if isinstance(interval, str) else interval
            layers = range(1, values["num_hidden_layers"] + 1)
            values["layer_types"] = [others if layer % length else "full_attention" for layer in layers]

    return derive


def _later_kinds(values: Values) -> None:
    values["layer_types"] = [_LATER_KINDS.get(kind, kind) for kind in values["layer_types"]]


def _smollm3_layers(values: Values) -> None:
    num_layers = values["num_hidden_layers"]
    if values["no_rope_layers"] is None:
        interval = _interval(values, "no_rope_layer_interval")
        values["no_rope_layers"] = [int(layer % interval != 0) for layer in range(1, num_layers + 1)]
    if values["layer_types"] is None:
        kinds = ["full_attention"] * num_layers
        if values["use_sliding_window"] and values["sliding_window"] is not None:
            has_rope = values["no_rope_layers"]
            kinds = [
                kind if rotated else "sliding_attention" for kind, rotated in zip(kinds, has_rope, strict=False)
            ]
        values["layer_types"] = kinds


def _exaone_layers(values: Values) -> None:
    if values["layer_types"] is None and values["sliding_window"] is None:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    _full_attention_on_each("sliding_window_pattern", "sliding_attention")(values)


def _lfm2_layers(values: Values) -> None:
    if values["layer_types"] is None:
        layers, attending = range(values["num_hidden_layers"]), values["full_attn_idxs"]
        attending = layers if attending is None else attending
        values["layer_types"] = ["full_attention" if layer in attending else "conv" for layer in layers]


def _granite4_layers(values: Values) -> None:
    if values["layer_types"] is None:
        values["layer_types"] = ["linear_attention"] * values["num_hidden_layers"]
    heads, inner = values["mamba_n_heads"], values["mamba_expand"] * values["hidden_size"]
    if values["mamba_d_head"] == "auto":
        values["mamba_d_head"] = inner // heads
    if type(values["mamba_d_head"]) is not int:
        raise ValueError(f"mamba_d_head is {values['mamba_d_head']!r}; it must be a whole number or 'auto'")
    if heads * values["mamba_d_head"] != inner:
        raise ValueError(
            f"mamba_n_heads {heads} of mamba_d_head {values['mamba_d_head']} are not mamba_expand "
            f"{values['mamba_expand']} times hidden_size {values['hidden_size']}"
        )


def _nemotron_layers(values: Values) -> None:
    """They are counted by their kinds alone."""
    if values["layer_types"] is None:
        values["layer_types"] = [_NEMOTRON_KINDS.get(kind, kind) for kind in values["hybrid_override_pattern"]]
    _later_kinds(values)
    if unknown := set(values["layer_types"]) - {*_NEMOTRON_KINDS.values()}:
        raise ValueError(f"layers of kind {', '.join(sorted(unknown))} are not known")
    values["num_hidden_layers"] = len(values["layer_types"])


def _no_dense_layers(values: Values) -> None:
    if values["mlp_only_layers"] is None:
        values["mlp_only_layers"] = []


# --- the types ---


def _shape(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None, length: int
) -> Values:
    """Sizes, and what most types have in common; without KV heads, all heads are of keys, too."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "head_dim": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }


def _without(values: Values, *names: str) -> Values:
    return {name: value for name, value in values.items() if name not in names}


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_DELTA_NETS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_NET_LAYERS = (_full_attention_on_each("full_attention_interval", "linear_attention"), _later_kinds)
_LFM2 = {
    "bos_token_id": 1,
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": None,
}
_GRANITE_FACTORS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_LOCAL_EXPERTS = {"num_local_experts": "num_experts"}

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "llama": ModelType({**_shape(32_000, 4096, 11_008, 32, 32, None, 2048), "bos_token_id": 1, **_BIASES}),
        "mistral": ModelType(
            {**_shape(32_000, 4096, 14_336, 32, 32, 8, 2**17), "bos_token_id": 1, "sliding_window": 4096}
        ),
        "ministral3": ModelType(
            {
                **_shape(131_072, 4096, 14_336, 34, 32, 8, 2**18),
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "sliding_window": None,
            },
            rope={
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        "mixtral": ModelType(
            {
                **_shape(32_000, 4096, 14_336, 32, 32, 8, 2**17),
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "sliding_window": None,
                "num_experts": 8,
                "num_experts_per_tok": 2,
            },
            _LOCAL_EXPERTS,
            theta=1_000_000.0,
        ),
        "smollm3": ModelType(
            {
                **_shape(128_256, 2048, 11_008, 36, 16, 4, 32_768),
                "bos_token_id": 128_000,
                "tie_word_embeddings": True,
                **_BIASES,
                "use_sliding_window": False,
                "sliding_window": None,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
                "layer_types": None,
            },
            derive=(_smollm3_layers,),
            theta=2_000_000.0,
        ),
        "qwen2": ModelType(
            {**_shape(151_936, 4096, 22_016, 32, 32, 32, 32_768), **_QWEN_WINDOW},
            derive=(_window_if_used, _windows_above),
        ),
        "qwen3": ModelType(
            {
                **_shape(151_936, 4096, 22_016, 32, 32, 32, 32_768),
                **_QWEN_WINDOW,
                "head_dim": 128,
                "attention_bias": False,
            },
            derive=(_window_if_used, _windows_above),
        ),
        "qwen3_moe": ModelType(
            {
                **_shape(151_936, 2048, 6144, 24, 32, 4, 32_768),
                "attention_bias": False,
                "use_sliding_window": False,
                "sliding_window": 4096,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": None,
            },
            _LOCAL_EXPERTS,
            (_window_if_used, _no_dense_layers),
        ),
        "qwen2_5_vl_text": ModelType(
            {
                **_without(_shape(152_064, 8192, 29_568, 80, 64, 8, 32_768), "tie_word_embeddings"),
                **_QWEN_WINDOW,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 151_643,
                "max_window_layers": 80,
            },
            derive=(_window_if_used, _windows_above),
            theta=1_000_000.0,
            renamed_ropes={"mrope": "default"},
        ),
        "qwen3_vl_text": ModelType(
            {
                **_without(
                    _shape(151_936, 4096, 22_016, 32, 32, 32, 128_000), "tie_word_embeddings", "bos_token_id"
                ),
                "head_dim": 128,
                "attention_bias": False,
            },
            theta=500_000.0,
        ),
        "qwen3_vl_moe_text": ModelType(
            {
                **_shape(151_936, 2048, 5632, 24, 16, 16, 128_000),
                "tie_word_embeddings": True,
                "attention_bias": False,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "decoder_sparse_step": 1,
                "mlp_only_layers": None,
            },
            _LOCAL_EXPERTS,
            (_no_dense_layers,),
            theta=500_000.0,
        ),
        "qwen3_next": ModelType(
            {
                **_shape(151_936, 2048, 5632, 48, 16, 2, 32_768),
                **_DELTA_NETS,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": None,
            },
            derive=(*_DELTA_NET_LAYERS, _no_dense_layers),
        ),
        "qwen3_5_text": ModelType(
            {**_shape(248_320, 4096, 12_288, 32, 16, 4, 32_768), **_DELTA_NETS}, derive=_DELTA_NET_LAYERS
        ),
        "qwen3_5_moe_text": ModelType(
            {
                **_without(_shape(248_320, 2048, 0, 40, 16, 2, 32_768), "intermediate_size"),
                **_DELTA_NETS,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
            },
            derive=_DELTA_NET_LAYERS,
        ),
        "seed_oss": ModelType(
            {
                **_shape(155_136, 4096, 27_648, 64, 80, 8, 524_288),
                "head_dim": 128,
                "bos_token_id": 0,
                "attention_bias": True,
                "attention_out_bias": False,
                "mlp_bias": False,
            }
        ),
        "phi3": ModelType(
            {
                **_shape(32_064, 3072, 8192, 32, 32, None, 4096),
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "original_max_position_embeddings": 4096,
                "sliding_window": None,
            },
            renamed_ropes={"su": "longrope", "yarn": "longrope"},
        ),
        "olmo2": ModelType(
            {**_shape(50_304, 4096, 11_008, 32, 32, None, 2048), "rms_norm_eps": 1e-5, "attention_bias": False}
        ),
        "olmo3": ModelType(
            {
                **_shape(50_304, 4096, 11_008, 32, 32, None, 2048),
                "rms_norm_eps": 1e-5,
                "attention_bias": False,
                "sliding_window": 4096,
                "layer_types": None,
            },
            derive=(_full_attention_on_each(4, "sliding_attention"),),
            theta=500_000.0,
            local_theta=500_000.0,
        ),
        "glm4": ModelType(
            {
                **_shape(151_552, 4096, 13_696, 40, 32, 2, 131_072),
                "head_dim": 128,
                "rms_norm_eps": 1.5625e-7,
                "attention_bias": True,
                "partial_rotary_factor": 0.5,
            }
        ),
        "glm4_moe": ModelType(
            {
                **_shape(151_552, 4096, 10_944, 46, 96, 8, 131_072),
                "rms_norm_eps": 1e-5,
                "attention_bias": False,
                "partial_rotary_factor": 0.5,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1408,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "use_qk_norm": False,
                "num_nextn_predict_layers": 1,
            },
            {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        ),
        "ernie4_5": ModelType(
            {
                **_shape(103_424, 1024, 3072, 18, 16, 2, 131_072),
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "tie_word_embeddings": True,
                "use_bias": False,
            },
            theta=500_000.0,
        ),
        "exaone4": ModelType(
            {
                **_shape(102_400, 4096, 16_384, 32, 32, 32, 2048),
                "rms_norm_eps": 1e-5,
                "bos_token_id": 0,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "layer_types": None,
            },
            derive=(_exaone_layers,),
        ),
        "hunyuan_v1_dense": ModelType(
            {
                **_shape(290_943, 4096, 11_008, 32, 32, None, 2048),
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "attention_bias": False,
            }
        ),
        "gemma2": ModelType(
            {
                **_without(_shape(256_000, 2304, 9216, 26, 8, 4, 8192), "hidden_act"),
                **_GEMMA,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "use_bidirectional_attention": None,
            },
            derive=(_full_attention_on_each(2, "sliding_attention"),),
        ),
        "gemma3_text": ModelType(
            {
                **_without(_shape(262_208, 2304, 9216, 26, 8, 4, 131_072), "hidden_act"),
                **_GEMMA,
                "sliding_window_pattern": 6,
                "rope_local_base_freq": None,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "use_bidirectional_attention": False,
            },
            derive=(_full_attention_on_each("sliding_window_pattern", "sliding_attention"),),
            theta=1_000_000.0,
            local_theta=10_000.0,
        ),
        "gpt_oss": ModelType(
            {
                **_shape(201_088, 2880, 2880, 36, 64, 8, 131_072),
                "head_dim": 64,
                "rms_norm_eps": 1e-5,
                "attention_bias": True,
                "sliding_window": 128,
                "layer_types": None,
                "num_experts": 128,
                "num_experts_per_tok": 4,
            },
            _LOCAL_EXPERTS,
            (_full_attention_on_each(2, "sliding_attention"),),
            theta=150_000.0,
            rope={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        ),
        "granite": ModelType(
            {
                **_shape(32_000, 4096, 11_008, 32, 32, None, 2048),
                "bos_token_id": 1,
                **_BIASES,
                **_GRANITE_FACTORS,
            }
        ),
        "granitemoehybrid": ModelType(
            {
                **_shape(32_000, 4096, 11_008, 32, 32, None, 2048),
                "bos_token_id": 1,
                "attention_bias": False,
                **_GRANITE_FACTORS,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 1024,
                "position_embedding_type": None,
                "layer_types": None,
                "mamba_n_heads": 128,
                "mamba_n_groups": 1,
                "mamba_d_state": 256,
                "mamba_d_head": "auto",
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "mamba_conv_bias": True,
                "mamba_proj_bias": False,
                "time_step_limit": (0.0, math.inf),
            },
            {"layers_block_type": "layer_types"},
            (_granite4_layers, _later_kinds),
        ),
        "nemotron_h": ModelType(
            {
                **_without(
                    _shape(131_072, 4096, 21_504, 0, 32, 8, 4096),
                    *("num_hidden_layers", "rms_norm_eps", "hidden_act"),
                ),
                "bos_token_id": 1,
                "head_dim": 128,
                "sliding_window": None,
                **_BIASES,
                "layer_norm_epsilon": 1e-5,
                "layer_types": None,
                "hybrid_override_pattern": "ME*-",
                "mlp_hidden_act": "relu2",
                "mamba_hidden_act": "silu",
                "mamba_num_heads": 128,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "ssm_state_size": 128,
                "conv_kernel": 4,
                "time_step_limit": (0.0, math.inf),
                "use_conv_bias": True,
                "use_bias": False,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 7688,
                "moe_shared_expert_intermediate_size": 7688,
                "moe_latent_size": None,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
                "n_group": 1,
                "topk_group": 1,
            },
            {
                "layers_block_type": "layer_types",
                "num_local_experts": "n_routed_experts",
                "mamba_n_groups": "n_groups",
                "mamba_d_conv": "conv_kernel",
                "mamba_dt_limit": "time_step_limit",
                "mamba_conv_bias": "use_conv_bias",
            },
            (_nemotron_layers,),
            theta=None,
        ),
        "lfm2": ModelType(
            {
                **_without(_shape(65_536, 2560, 12_288, 32, 32, 8, 128_000), "rms_norm_eps", "hidden_act"),
                **_LFM2,
                "block_auto_adjust_ff_dim": True,
                "block_ffn_dim_multiplier": 1.0,
                "block_multiple_of": 256,
                "full_attn_idxs": None,
            },
            {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
            (_lfm2_layers,),
            theta=1_000_000.0,
        ),
        "lfm2_moe": ModelType(
            {
                **_without(_shape(65_536, 2048, 7168, 32, 32, 8, 128_000), "rms_norm_eps", "hidden_act"),
                **_LFM2,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1792,
                "num_dense_layers": 2,
                "use_expert_bias": True,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
            },
            {"tie_embedding": "tie_word_embeddings"},
            theta=1_000_000.0,
        ),
    }
)

# Of a model of several parts, the type of its text_config, if that names none.
TEXT_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
