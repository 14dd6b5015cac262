"""The supported families of models. Nothing is imported here, so names are listed without torch."""

# Tests: tests/models/test_adding.py, tests/models/test_loader.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Family:
    """An architecture's family: its name, the module and name of its class, some of its checkpoints.

    `text_models`: of a checkpoint with more parts than text, the `model_type` that its `text_config` may have.
    """

    name: str
    module: str
    decoder: str
    checkpoints: str
    text_models: tuple[str, ...] = ()


# Keys are the names in `architectures` of Hugging Face configs.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            "Llama",
            "radixrt.models.decoder",
            "Decoder",
            "Llama 2, 3, 3.1, 3.2, 3.3, TinyLlama, SmolLM 1 and 2, Yi, CodeLlama, Vicuna",
        ),
        "MistralForCausalLM": Family("Mistral", "radixrt.models.decoder", "Decoder", "Mistral 7B, Nemo"),
        "SmolLM3ForCausalLM": Family("SmolLM3", "radixrt.models.decoder", "Decoder", "SmolLM3 3B"),
        "Qwen2ForCausalLM": Family("Qwen2", "radixrt.models.qwen", "Qwen2", "Qwen2, Qwen2.5, QwQ"),
        "Qwen3ForCausalLM": Family("Qwen3", "radixrt.models.qwen", "Qwen3", "Qwen3 dense"),
        "Qwen3MoeForCausalLM": Family("Qwen3 MoE", "radixrt.models.qwen", "Qwen3Moe", "Qwen3 30B-A3B"),
        "Qwen3NextForCausalLM": Family(
            "Qwen3-Next", "radixrt.models.qwen_hybrid", "Qwen3_5Moe", "Qwen3-Next 80B-A3B"
        ),
        "Qwen3_5ForCausalLM": Family("Qwen3.5", "radixrt.models.qwen_hybrid", "Qwen3_5", "Qwen3.5 dense (text)"),
        "Qwen3_5MoeForCausalLM": Family(
            "Qwen3.5 MoE", "radixrt.models.qwen_hybrid", "Qwen3_5Moe", "Qwen3.5 mixtures (text)"
        ),
        "Lfm2ForCausalLM": Family(
            "LFM2", "radixrt.models.lfm2", "Lfm2", "LFM2 350M, 700M, 1.2B, 2.6B, LFM2.5 1.2B"
        ),
        "Lfm2MoeForCausalLM": Family("LFM2 MoE", "radixrt.models.lfm2", "Lfm2Moe", "LFM2 8B-A1B"),
        "MixtralForCausalLM": Family("Mixtral", "radixrt.models.mixtral", "Mixtral", "Mixtral 8x7B"),
        "Phi3ForCausalLM": Family(
            "Phi-3", "radixrt.models.phi", "Phi3", "Phi-3 mini, Phi-3.5 mini, Phi-4, Phi-4 mini"
        ),
        "Olmo2ForCausalLM": Family("OLMo 2", "radixrt.models.olmo", "Olmo2", "OLMo 2"),
        "Olmo3ForCausalLM": Family("OLMo 3", "radixrt.models.olmo", "Olmo2", "OLMo 3 7B, 32B"),
        "Glm4ForCausalLM": Family("GLM-4", "radixrt.models.glm", "Glm4", "GLM-4 and GLM-Z1 9B, 32B (0414)"),
        "Glm4MoeForCausalLM": Family(
            "GLM-4.5", "radixrt.models.glm_moe", "Glm4Moe", "GLM-4.5 Air, GLM-4.5, GLM-4.6, GLM-4.7"
        ),
        "GraniteForCausalLM": Family("Granite", "radixrt.models.granite", "Granite", "Granite 3 2B, 8B"),
        "GraniteMoeHybridForCausalLM": Family(
            "Granite 4",
            "radixrt.models.granite_hybrid",
            "Granite4",
            "Granite 4 micro, 1B, 350M, and those with an h: h-micro, h-tiny, h-small",
        ),
        "NemotronHForCausalLM": Family(
            "Nemotron-H",
            "radixrt.models.nemotron_h",
            "NemotronH",
            "Nemotron-H 4B, 8B, 47B, 56B, Nemotron Nano 2 9B, 12B, Nemotron 3 Nano 30B-A3B",
        ),
        "SeedOssForCausalLM": Family("Seed-OSS", "radixrt.models.qwen", "SeedOss", "Seed-OSS 36B"),
        "GptOssForCausalLM": Family("gpt-oss", "radixrt.models.gpt_oss", "GptOss", "gpt-oss 20b, 120b"),
        "Exaone4ForCausalLM": Family("EXAONE 4", "radixrt.models.exaone", "Exaone4", "EXAONE 4.0 1.2B, 32B"),
        "Ernie4_5ForCausalLM": Family("ERNIE 4.5", "radixrt.models.glm", "Ernie4_5", "ERNIE 4.5 0.3B (dense)"),
        "HunYuanDenseV1ForCausalLM": Family(
            "Hunyuan", "radixrt.models.hunyuan", "HunYuanDense", "Hunyuan 0.5B, 1.8B, 4B, 7B (dense)"
        ),
        "Gemma2ForCausalLM": Family("Gemma 2", "radixrt.models.gemma", "Gemma2", "Gemma 2 2B, 9B, 27B"),
        "Gemma3ForCausalLM": Family("Gemma 3", "radixrt.models.gemma", "Gemma3", "Gemma 3 270M, 1B (text)"),
        "Gemma3ForConditionalGeneration": Family(
            "Gemma 3", "radixrt.models.gemma", "Gemma3", "Gemma 3 4B, 12B, 27B: text", ("gemma3_text",)
        ),
        "Ministral3ForCausalLM": Family(
            "Ministral 3", "radixrt.models.ministral", "Ministral3", "Ministral 3 (text)"
        ),
        "Mistral3ForConditionalGeneration": Family(
            "Mistral",
            "radixrt.models.ministral",
            "Ministral3",
            "Mistral Small 3.1, 3.2, Ministral 3 3B, 8B, 14B: text",
            ("mistral", "ministral3"),
        ),
        "Qwen2_5_VLForConditionalGeneration": Family(
            "Qwen2", "radixrt.models.qwen", "Qwen2", "Qwen2.5-VL: text", ("qwen2_5_vl_text",)
        ),
        "Qwen3VLForConditionalGeneration": Family(
            "Qwen3", "radixrt.models.qwen", "Qwen3", "Qwen3-VL: text", ("qwen3_vl_text",)
        ),
        "Qwen3VLMoeForConditionalGeneration": Family(
            "Qwen3 MoE", "radixrt.models.qwen", "Qwen3VLMoe", "Qwen3-VL 30B-A3B: text", ("qwen3_vl_moe_text",)
        ),
        "Qwen3_5ForConditionalGeneration": Family(
            "Qwen3.5", "radixrt.models.qwen_hybrid", "Qwen3_5", "Qwen3.5 4B, 9B, 27B: text", ("qwen3_5_text",)
        ),
        "Qwen3_5MoeForConditionalGeneration": Family(
            "Qwen3.5 MoE",
            "radixrt.models.qwen_hybrid",
            "Qwen3_5Moe",
            "Qwen3.5 35B-A3B, Qwen3.6 35B-A3B: text",
            ("qwen3_5_moe_text",),
        ),
    }
)

_GEMMA4 = (
    "its layers with and without a window have heads of different sizes, and some read the keys of others, where "
    "the KV pool has one size and each layer its own; Gemma 3 is supported"
)
_LLAMA4 = "most of its layers attend within chunks of the context; Llama 3.3 is supported"
_LATENT = "it has latent attention (MLA); of mixtures, GLM-4.5 Air and Qwen3 30B-A3B are supported"

# Why architectures that many ask for are not in the table, and what is.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": _GEMMA4,
        "Llama4ForCausalLM": _LLAMA4,
        "Llama4ForConditionalGeneration": _LLAMA4,
        "DeepseekV2ForCausalLM": _LATENT,
        "DeepseekV3ForCausalLM": _LATENT,
    }
)


def text_models_of(architecture: str) -> tuple[str, ...]:
    """The `text_models` of an architecture; none for one that is about text alone, or not in the table."""
    family = FAMILIES.get(architecture)
    return () if family is None else family.text_models
