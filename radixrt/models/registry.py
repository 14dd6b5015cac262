"""Which architectures there are, and what builds them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from radixrt.errors import ModelError
from radixrt.models.decoder import Decoder
from radixrt.models.gemma import Gemma2, Gemma3
from radixrt.models.mixtral import Mixtral
from radixrt.models.olmo import Olmo2
from radixrt.models.phi import Phi3
from radixrt.models.qwen import Qwen2, Qwen3, Qwen3Moe

# From the names of Hugging Face configs; docs/models.md has the same table with what differs.
ARCHITECTURES: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "LlamaForCausalLM": Decoder,
        "MistralForCausalLM": Decoder,
        "SmolLM3ForCausalLM": Decoder,
        "Qwen2ForCausalLM": Qwen2,
        "Qwen3ForCausalLM": Qwen3,
        "Phi3ForCausalLM": Phi3,
        "Olmo2ForCausalLM": Olmo2,
        "MixtralForCausalLM": Mixtral,
        "Qwen3MoeForCausalLM": Qwen3Moe,
        "Gemma2ForCausalLM": Gemma2,
        "Gemma3ForCausalLM": Gemma3,
    }
)


def find_architecture(name: str) -> type[Decoder]:
    """The class that is built with `(config, dtype=, device=)`; ModelError names those there are if
    `name` is none.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"architecture {name!r} is not supported; these are: {known}") from None
