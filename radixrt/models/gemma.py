"""Gemma 2 (Google DeepMind, 2024) and the text part of Gemma 3 (2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layers.norm import RMSNorm
from layers.vocabulary import Embedding, LogitsHead
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Attention
from radixrt.models.sandwich import SandwichDecoder


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """`attention_scale` is the factor on the scores; a softcap of None is off."""

    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        return {
            "attention_scale": source.query_pre_attn_scalar**-0.5,
            "attention_softcap": source.attn_logit_softcapping,
            "logits_softcap": source.final_logit_softcapping,
        }


class Gemma2(SandwichDecoder):
    """Scaled embeddings, norms centred on 1, a scale of its own for the scores, softcaps."""

    config: GemmaConfig
    config_class = GemmaConfig

    def build_embedding(self) -> Embedding:
        size = self.config.hidden_size
        return Embedding(self.config.vocab_size, size, scale=size**0.5, placement=self.placement)

    def build_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, offset=1.0, placement=self.placement)

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            scale=self.config.attention_scale,
            softcap=self.config.attention_softcap,
            placement=self.placement,
        )

    def build_head(self) -> LogitsHead:
        config = self.config
        return LogitsHead(
            self.head_weight(), config.vocab_size, softcap=config.logits_softcap, placement=self.placement
        )


class Gemma3(Gemma2):
    """A norm on each query and key head; its configs set no softcap for the scores."""

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            q_norm=self.build_norm(self.config.head_dim),
            k_norm=self.build_norm(self.config.head_dim),
            scale=self.config.attention_scale,
            placement=self.placement,
        )
