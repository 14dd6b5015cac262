"""EXAONE 4.0 (LG AI Research, 2025): norms after attention and feed-forward as in OLMo 2, of heads as in Qwen3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from radixrt.models.config import ModelConfig, read_attention
from radixrt.models.olmo import Olmo2Block
from radixrt.models.qwen import Qwen3


@dataclass(frozen=True)
class Exaone4Config(ModelConfig):
    """Where layers with a window are mixed with others, the others have no positions."""

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        attention = read_attention(source)
        if source.sliding_window is not None:
            attention = tuple(kind if kind.window else replace(kind, rope=None) for kind in attention)
        return {"attention": attention}


class Exaone4(Qwen3):
    """By config, windows on some layers; the layers without one have no rope then."""

    config_class = Exaone4Config
    block_class = Olmo2Block
