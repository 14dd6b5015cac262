"""Which architectures there are, and what builds them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from radixrt.errors import ModelError
from radixrt.models.decoder import Decoder

# From the names of Hugging Face configs. What tells the kin of one decoder apart stands in ModelConfig.
ARCHITECTURES: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "LlamaForCausalLM": Decoder,
        "Qwen3ForCausalLM": Decoder,
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
