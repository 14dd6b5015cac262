"""Ministral 3 (Mistral AI, 2025): Mistral with YaRN, and queries that grow with the logarithm of the position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Attention, Decoder


@dataclass(frozen=True)
class Ministral3Config(ModelConfig):
    """A query at position p is multiplied by `1 + query_beta * log(1 + floor(p / query_length))`; with a beta of
    0, as in Mistral Small 3.1, all queries stay as they are.
    """

    query_beta: float
    query_length: int

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        rope = source.rope_parameters
        beta, length = rope.get("llama_4_scaling_beta") or 0.0, rope.get("original_max_position_embeddings") or 0
        if beta and length < 1:
            raise ModelError(f"llama_4_scaling_beta is {beta}, but there is no original_max_position_embeddings")
        return {"query_beta": float(beta), "query_length": int(length)}


class Ministral3(Decoder):
    """The factors on queries are part of their rotation; Mistral Small 3.1 and 3.2 have none."""

    config: Ministral3Config
    config_class = Ministral3Config

    @cached_property
    def q_factors(self) -> nn.Buffer | None:
        """Float32 `[context_length]`; None where all of them are 1."""
        config = self.config
        if not config.query_beta or config.context_length <= config.query_length:
            return None
        positions = torch.arange(config.context_length, device="cpu")
        factors = 1 + config.query_beta * torch.log(1 + torch.floor(positions / config.query_length))
        return nn.Buffer(factors.to(self.placement.device))

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(
            self.config, layer_id, self.rotary(layer_id), q_factors=self.q_factors, placement=self.placement
        )
