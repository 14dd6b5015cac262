"""Granite 3 (IBM, 2024): Llama with factors on embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from layers.input_metadata import InputMetadata
from layers.placement import Placement
from layers.ranks import PartialSum
from layers.vocabulary import Embedding, LogitsHead
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Attention, Block, Decoder


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    """`residual_factor` is on what attention and feed-forward add; logits are divided by `logits_divisor`."""

    embedding_scale: float
    attention_scale: float
    residual_factor: float
    logits_divisor: float

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        return {
            "embedding_scale": float(source.embedding_multiplier),
            "attention_scale": float(source.attention_multiplier),
            "residual_factor": float(source.residual_multiplier),
            "logits_divisor": float(source.logits_scaling),
        }


class GraniteBlock(Block):
    """`x + factor * attention(norm(x))`, and the same for the feed-forward layer."""

    joins = False

    def __init__(self, *, factor: float, **parts: Any) -> None:
        super().__init__(**parts)
        self.factor = factor

    def forward(
        self, hidden: PartialSum, residual: Tensor | None, metadata: InputMetadata
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.attention_norm.add(hidden, residual)
        attended = self.attention(normed, metadata) * self.factor
        normed, residual = self.feed_forward_norm.add(attended, residual)
        return self.feed_forward(normed, metadata) * self.factor, residual


class GraniteHead(LogitsHead):
    """Divides the logits."""

    def __init__(self, weight: Any, vocab_size: int, divisor: float, placement: Placement) -> None:
        super().__init__(weight, vocab_size, placement=placement)
        self.divisor = divisor

    def forward(
        self, hidden_states: Tensor, logits_indices: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        logits: Tensor = super().forward(hidden_states, logits_indices, out=out)
        return logits.div_(self.divisor)


class Granite(Decoder):
    """Four factors of its config."""

    config: GraniteConfig
    config_class: ClassVar[type[GraniteConfig]] = GraniteConfig
    granite_class: ClassVar[type[GraniteBlock]] = GraniteBlock

    def build_embedding(self) -> Embedding:
        config = self.config
        return Embedding(
            config.vocab_size, config.hidden_size, scale=config.embedding_scale, placement=self.placement
        )

    def build_attention(self, layer_id: int) -> Attention:
        scale = self.config.attention_scale
        return Attention(self.config, layer_id, self.rotary(layer_id), scale=scale, placement=self.placement)

    def build_block(self, layer_id: int) -> GraniteBlock:
        size = self.config.hidden_size
        return self.granite_class(
            factor=self.config.residual_factor,
            attention_norm=self.build_norm(size),
            attention=self.build_mixer(layer_id),
            feed_forward_norm=self.build_norm(size),
            feed_forward=self.build_feed_forward(layer_id),
        )

    def build_head(self) -> LogitsHead:
        config = self.config
        return GraniteHead(self.head_weight(), config.vocab_size, config.logits_divisor, self.placement)
