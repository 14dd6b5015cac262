"""The config of a GGUF file's model, from its fields and tensors, as one of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixrt.errors import ModelError
from radixrt.models.config import check_sizes
from radixrt.models.gguf_header import Header, StoredTensor

# The class and transformers' type of a model, by general.architecture.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Numbers of layers of the two models that scale scores by hidden_size / num_heads; all others do by head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Sizes of config.json, by what a file calls them.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_OPTIONAL_SIZES = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# What else may be told of yarn, and what changes nothing.
_OF_YARN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0, "yarn_log_multiplier": 0.0}


def checked_architecture(header: Header) -> str:
    """The architecture that a file holds. Raises ModelError where it, or a size, is not one that can be read."""
    arch = header.field("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"it holds the architecture {arch!r}, which is not supported; these are: " + ", ".join(ARCHITECTURES)
        )
    sizes = _sizes(header, arch)
    if lists := [name for name, size in sizes.items() if isinstance(size, list)]:
        raise ModelError(f"it has layers of different sizes ({', '.join(lists)}), which is not supported")
    if bad := [f"{name} is {size!r}" for name, size in sizes.items() if type(size) is not int]:
        raise ModelError(f"its sizes must be whole numbers: {', '.join(bad)}")
    check_sizes(sizes)
    if sizes["num_hidden_layers"] > len(header.tensors):
        raise ModelError(f"it has {sizes['num_hidden_layers']:,} layers and {len(header.tensors):,} tensors")
    if "num_experts" in sizes and arch != "qwen3moe":
        raise ModelError(f"it is a mixture of experts of the architecture {arch}, which is not supported")
    if header.field(f"{arch}.attention.causal") in (False, 0):
        raise ModelError("it has attention that is not causal, which is not supported")
    if (header.field("split.count", int) or 1) > 1:
        raise ModelError("it is one of several files; join them: llama-gguf-split --merge FIRST JOINED")
    if (embeddings := header.tensors.get("token_embd.weight")) is None or len(embeddings.shape) != 2:
        raise ModelError("it lacks the tensor token_embd.weight, of a row for each token")
    return str(arch)


def _sizes(header: Header, arch: str) -> dict[str, Any]:
    """By their names in config.json; None where the file lacks one that it needs."""
    sizes = {ours: header.field(f"{arch}.{theirs}") for theirs, ours in _SIZES.items()}
    more = {ours: header.field(f"{arch}.{theirs}") for theirs, ours in _OPTIONAL_SIZES.items()}
    if more["num_experts"] == 0:
        more["num_experts"] = None
    return sizes | {name: size for name, size in more.items() if size is not None}


def read_config(header: Header, arch: str) -> Any:
    """A config of transformers. Raises ModelError where the file's rope is not one that can be read."""
    from transformers import AutoConfig

    def number(name: str) -> Any:
        return header.field(f"{arch}.{name}", int, float)

    class_name, model_type = ARCHITECTURES[arch]
    rows = header.tensors["token_embd.weight"].shape[0]
    known = {
        "num_key_value_heads": number("attention.head_count"),
        **_sizes(header, arch),
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "sliding_window": number("attention.sliding_window"),
        **{
            f"{ours}_token_id": header.id(f"tokenizer.ggml.{theirs}_token_id", rows)
            for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
        },
    }
    for name in ("rms_norm_eps", "rope_theta"):
        if known[name] is not None:
            known[name] = _as_written(known[name])
    if arch not in ("gemma2", "gemma3", "phi3"):
        del known["sliding_window"]  # they have none, whatever the file says
    if arch == "qwen3moe":
        known |= {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    if "head_dim" not in known:
        known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
    if arch == "llama" and "blk.0.attn_q.bias" in header.tensors:
        known["attention_bias"] = True
    if arch in _SCALED_BY_WIDTH:
        by_width = known["num_hidden_layers"] == _SCALED_BY_WIDTH[arch]
        width = known["hidden_size"] // known["num_attention_heads"]
        known["query_pre_attn_scalar"] = width if by_width else known["head_dim"]
        known |= {name: number(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    told = {name: value for name, value in known.items() if value is not None}
    config: Any = AutoConfig.for_model(model_type, **told)
    if arch == "phi3":
        config.sliding_window = known["sliding_window"] or None
    config.architectures, config.dtype = [class_name], torch.bfloat16
    rope = config.rope_parameters
    # Layers with a window are not scaled.
    rope.get("full_attention", rope).update(_rope(config, arch, header))
    return config


def _rope(config: Any, arch: str, header: Header) -> dict[str, Any]:
    """What differs from a rope without scaling. Raises ModelError."""

    def number(name: str) -> Any:
        return header.field(f"{arch}.rope.{name}", int, float)

    def factors(name: str) -> list[float]:
        return [float(factor) for factor in dequantised(header.tensors[name]).tolist()]

    found: dict[str, Any] = {}
    rotated = number("dimension_count") or config.head_dim
    if rotated != config.head_dim:
        found["partial_rotary_factor"] = rotated / config.head_dim
    trained = config.max_position_embeddings
    original = number("scaling.original_context_length") or trained
    factor = number("scaling.factor") or number("scale_linear")
    kind = header.field(f"{arch}.rope.scaling.type", str) or ("none" if factor in (None, 1.0) else "linear")

    def written_factor() -> float:
        if factor is None:
            raise ModelError(f"{arch}.rope.scaling.factor is missing; rope.scaling.type {kind!r} needs it")
        return _as_written(factor)

    if ROPE_TENSORS[0] in header.tensors:  # Llama 3.1's, worked out
        same = factors(ROPE_TENSORS[0])
        found |= {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
        found["original_max_position_embeddings"] = trained
    elif ROPE_TENSORS[1] in header.tensors:
        found |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        found |= {"long_factor": factors(ROPE_TENSORS[1]), "short_factor": factors(ROPE_TENSORS[2])}
        if (attention_factor := number("scaling.attn_factor")) is not None:
            found["attention_factor"] = attention_factor
    elif kind == "linear":
        found |= {"rope_type": "linear", "factor": written_factor()}
    elif kind == "yarn":
        for name, neutral in _OF_YARN.items():
            if (value := number(f"scaling.{name}")) not in (None, neutral):
                raise ModelError(f"{arch}.rope.scaling.{name} is {value}, which is not supported with yarn")
        found |= {"rope_type": "yarn", "factor": written_factor(), "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (beta := number(f"scaling.yarn_{name}")) is not None:
                found[name] = _as_written(beta)
    elif kind != "none":
        raise ModelError(f"{arch}.rope.scaling.type is {kind!r}; none, linear and yarn are supported")
    return found


def dequantised(tensor: StoredTensor) -> Tensor:
    """In float32, in the order of a checkpoint."""
    from gguf import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.kind), np.float32)
    return torch.from_numpy(values.copy()).view(tensor.shape)


def _as_written(number: float) -> float:
    """Such as 1e-6 for the float32 that is nearest to it."""
    return float(f"{number:.7g}")
