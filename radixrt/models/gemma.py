"""Gemma 2 (Google DeepMind, 2024) and the text part of Gemma 3 (2025)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from layers.input_metadata import InputMetadata
from layers.norm import RMSNorm
from layers.radix_attention import KVCache
from layers.vocabulary import Embedding, LogitsHead
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Attention, Block, Decoder


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


class GemmaBlock(Block):
    """Norms before and after attention and feed-forward: `x + norm(attention(norm(x)))`.

    A norm after a part is fused with the addition and the norm that follow. The one after the feed-forward layer
    is therefore left to the next layer, as its `entry_norm`, or to the decoder.
    """

    checkpoint_names = MappingProxyType(
        {
            "attention_norm": "input_layernorm",
            "attention": "self_attn",
            "after_attention_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "feed_forward": "mlp",
            "after_feed_forward_norm": "post_feedforward_layernorm",
        }
    )

    def __init__(
        self,
        *,
        entry_norm: RMSNorm | None,
        after_attention_norm: RMSNorm,
        after_feed_forward_norm: RMSNorm,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self.entry_norm = entry_norm
        self.after_attention_norm = after_attention_norm
        self.after_feed_forward_norm = after_feed_forward_norm

    def forward(
        self, hidden: Tensor, residual: Tensor | None, metadata: InputMetadata, kv_pool: KVCache
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.attention_norm(hidden), hidden
        else:
            hidden, residual = self.attention_norm.add(hidden, residual, before=self.entry_norm)
        hidden = self.attention(hidden, metadata, kv_pool)
        hidden, residual = self.feed_forward_norm.add(hidden, residual, before=self.after_attention_norm)
        return self.feed_forward(hidden), residual


class Gemma2(Decoder):
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

    def build_block(self, layer_id: int) -> GemmaBlock:
        size = self.config.hidden_size
        return GemmaBlock(
            entry_norm=self._exit_norm() if layer_id else None,
            attention_norm=self.build_norm(size),
            attention=self.build_attention(layer_id),
            after_attention_norm=self.build_norm(size),
            feed_forward_norm=self.build_norm(size),
            feed_forward=self.build_feed_forward(layer_id),
            after_feed_forward_norm=self.build_norm(size),
        )

    def final_norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        assert residual is not None
        return self.norm.add(hidden, residual, before=self._exit_norm())[0]

    def _exit_norm(self) -> RMSNorm:
        """The last norm of the last layer built so far."""
        last = self.blocks[-1]
        assert isinstance(last, GemmaBlock)
        return last.after_feed_forward_norm

    def build_head(self) -> LogitsHead:
        return LogitsHead(self.head_weight(), softcap=self.config.logits_softcap, placement=self.placement)


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
