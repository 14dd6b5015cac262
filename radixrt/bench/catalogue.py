"""What the benchmarks can measure: workloads and their sizes, shapes of models.

Nothing heavy is imported.
"""

# Tests: tests/bench/test_prefix_reuse.py

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixrt.checks import check_float
from radixrt.errors import ParameterError

Size = int | tuple[int, int]


@dataclass(frozen=True)
class Scale:
    """Sizes of the workloads, and default options of the Runtime.

    Attributes:
        description: a line for people.
        shape: of the model, one of SHAPES.
        sizes: by workload, the sizes that differ from the definition in `radixrt.workloads`.
        chunked_prefill_size, max_total_tokens: None leaves the choice to the Runtime.
    """

    description: str
    shape: str
    sizes: dict[str, dict[str, Size]] = field(default_factory=dict)
    chunked_prefill_size: int | None = None
    max_total_tokens: int | None = None


def _sizes(words: str) -> dict[str, Size]:
    """Of words such as "documents 3, document len 256-2048"."""
    sizes: dict[str, Size] = {}
    for part in words.split(", "):
        name, _, value = part.rpartition(" ")
        least, _, most = value.partition("-")
        sizes[name.replace(" ", "_")] = (int(least), int(most)) if most else int(least)
    return sizes


# Of the prefix-reuse benchmark; the throughput benchmark has LISTS.
WORKLOADS = ("unshared", "fewshot", "docqa", "system_prompt", "samples", "chat", "choices", "tree_search")

SCALES = {
    # Every shared prefix is longer than a pass: requests admitted together must still share it.
    "cpu": Scale(
        description="smaller sizes, a tiny model: minutes on two idle CPU cores",
        shape="tiny",
        sizes={
            "unshared": _sizes("requests 48, prompt len 20-200, new tokens 20-64"),
            "fewshot": _sizes(
                "subjects 8, questions 12, head len 16, examples len 200-500, question len 10-30, new tokens 8"
            ),
            "docqa": _sizes("documents 3, document len 1024, questions 12, question len 10-30, new tokens 16"),
            "system_prompt": _sizes("requests 48, system len 512, user len 8-64, new tokens 16-64"),
            "samples": _sizes("prompts 4, prompt len 256, samples 12, new tokens 48"),
            "judging": _sizes(
                "questions 6, rubric len 256, question len 10-40, answers 3, "
                "answer len 10-30, votes 2, new tokens 8-16"
            ),
            "documents": _sizes(
                "documents 3, document len 256-2048, questions 8, question len 5-30, new tokens 4-96, mean tail 12"
            ),
            "rollouts": _sizes("prompts 4, prompt len 150-250, samples 8, max new tokens 128, mean log 3"),
            "classification": _sizes("requests 120, instruction len 256, text len 10-40, new tokens 3"),
            "alone": _sizes("requests 4, prompt len 100, new tokens 64"),
            "agents": _sizes(
                "runs 6, turns 5, system len 256, task len 10-40, call len 4-16, result len 8-120, mean log 3"
            ),
            "repository": _sizes("questions 32, repository len 2048, question len 10-40, new tokens 24-64"),
            "extraction": _sizes(
                "requests 48, instruction len 256, document len 20-300, mean log 4, new tokens 8"
            ),
            "reasoning": _sizes("prompts 4, prompt len 150-250, samples 4, max new tokens 256, mean log 4"),
            "thoughts": _sizes(
                "roots 3, depth 3, branches 2, kept 4, instruction len 256, root len 10-40, thought len 8-16, "
                "judges 2, question len 6, judgement len 3"
            ),
            "evaluation": _sizes(
                "tasks 3, examples len 200-500, questions 12, question len 10-30, choices 4, choice len 1-6"
            ),
            "chat": _sizes("conversations 12, turns 4, system len 256, user len 16-64, new tokens 16-64"),
            "choices": _sizes("questions 32, choices 4, examples len 256, question len 16-64, choice len 2-8"),
            "tree_search": _sizes("roots 4, root len 256, rounds 4, branches 4, kept 2, new tokens 16"),
        },
        chunked_prefill_size=128,
        max_total_tokens=65_536,
    ),
    "full": Scale(description="the sizes of the definition, for a GPU", shape="qwen3-0.6b"),
}


def size_table(scale: str, workloads: Sequence[str]) -> list[tuple[str, str]]:
    """Each of these workloads with its sizes in words, at this scale."""

    def words(size: Size) -> str:
        return str(size) if isinstance(size, int) else f"{size[0]}-{size[1]}"

    return [
        (name, ", ".join(f"{size.replace('_', ' ')} {words(value)}" for size, value in sizes.items()))
        for name, sizes in SCALES[scale].sizes.items()
        if name in workloads
    ]


# -- shapes of models -----------------------------------------------------------------------------------

_GATED_DELTA_NETS: dict[str, Any] = {  # in three layers of four
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "torch_dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 10_240,
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
    },
    "qwen3-32b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {
        **_LLAMA3,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "block_ff_dim": 12_288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "conv_bias": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65_536,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_embedding": True,
        "torch_dtype": "bfloat16",
    },
    "qwen3.5-4b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        **_GATED_DELTA_NETS,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen3.6-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        **_GATED_DELTA_NETS,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    # Without its factors on embeddings, scores, residuals and logits, which cost nothing.
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 40,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "layer_types": [
            "full_attention" if layer in (5, 15, 25, 35) else "linear_attention" for layer in range(40)
        ],
        "position_embedding_type": "nope",
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 100_352,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}
"""By name: the contents of config.json."""


def write_shape(name: str, folder: Path) -> Path:
    """Write the config of a model without weights, for `load_format="dummy"`. Returns `folder`."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return folder


# -- the throughput benchmark ---------------------------------------------------------------------------

LISTS = (
    "unshared",
    "fewshot",
    "docqa",
    "system_prompt",
    "samples",
    "judging",
    "documents",
    "rollouts",
    "classification",
    "alone",
    "agents",
    "repository",
    "extraction",
    "reasoning",
    "thoughts",
    "evaluation",
)
CONFIGS = {"cpu": ("tiny",), "full": ("qwen3-0.6b", "llama-3.1-8b")}
"""By scale: the default shapes."""
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "no-prefix-cache": ("again without the prefix cache", {"enable_prefix_cache": False}),
    "no-overlap": ("again with passes that wait for one another's results", {"overlap": False}),
    "no-graphs": ("again without captured graphs", {"cuda_graphs": False}),
    "flat": ("again with attention that reads shared KV once for each request", {"attention": "flat"}),
    "deterministic": (
        "again with the same bits whatever runs beside (docs/same-bits.md)",
        {"deterministic": True},
    ),
}
"""By name: what it is, and options of the Runtime."""
BASELINES = ("transformers", "vllm", "sglang")


# -- options --------------------------------------------------------------------------------------------


def check_speed(bandwidth: float | None, flops: float | None) -> None:
    """Raise ParameterError unless both are above 0, or both None."""
    if (bandwidth is None) != (flops is None):
        raise ParameterError("bandwidth and flops are given together, or not at all")
    for name, figure in (("bandwidth", bandwidth), ("flops", flops)):
        if figure is not None:
            check_float(name, figure, 0.0, 1e18, above=True)


def one_of(name: str, value: str, known: Collection[str]) -> None:
    """Raise ParameterError unless `value` is known."""
    if value not in known:
        raise ParameterError(f"{name} is {value!r}; it must be one of: {', '.join(known)}")
