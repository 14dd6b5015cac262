"""Granite 3 (IBM, 2024): Llama with factors on embeddings, scores, what layers add, and logits; Granite 4 (2025)
where it is dense and has attention alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.input_metadata import InputMetadata
from layers.placement import Placement
from layers.radix_attention import KVCache
from layers.ranks import Addend, whole
from layers.vocabulary import Embedding, LogitsHead
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig, read_attention
from radixrt.models.decoder import Attention, Block, Decoder, FeedForward


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

    def __init__(self, *, factor: float, **parts: Any) -> None:
        super().__init__(**parts)
        self.factor = factor

    def forward(
        self, hidden: Addend, residual: Tensor | None, metadata: InputMetadata, kv_pool: KVCache
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = whole(hidden)
            hidden = self.attention_norm(residual)
        else:
            hidden, residual = self.attention_norm.add(hidden, residual)
        hidden = self.attention(hidden, metadata, kv_pool) * self.factor
        hidden, residual = self.feed_forward_norm.add(hidden, residual)
        return self.feed_forward(hidden) * self.factor, residual


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
    config_class = GraniteConfig
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
            attention=self.build_attention(layer_id),
            feed_forward_norm=self.build_norm(size),
            feed_forward=self.build_feed_forward(layer_id),
        )

    def build_head(self) -> LogitsHead:
        config = self.config
        return GraniteHead(self.head_weight(), config.vocab_size, config.logits_divisor, self.placement)


@dataclass(frozen=True)
class Granite4Config(GraniteConfig):
    """Of a checkpoint without Mamba and experts; some have no positions."""

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        others = sum(kind != "full_attention" for kind in source.layer_types)
        if others:
            raise ModelError(
                f"{others} of {source.num_hidden_layers} layers are Mamba's, which are not supported; checkpoints "
                "of attention alone are: of Granite 4 micro, 1B and 350M, those without an h in their names"
            )
        if source.num_local_experts:
            raise ModelError(
                f"a Granite 4 with {source.num_local_experts} experts is not supported; dense ones are"
            )
        attention = read_attention(source)
        if source.position_embedding_type != "rope":
            attention = tuple(replace(kind, rope=None) for kind in attention)
        return {
            **super().read_family(source),
            "attention": attention,
            "intermediate_size": source.shared_intermediate_size,
        }


class Granite4Block(GraniteBlock):
    checkpoint_names = MappingProxyType({**Block.checkpoint_names, "feed_forward": "shared_mlp"})


class Granite4(Granite):
    """Granite 3 by other names; gate and up are stored as one matrix."""

    config_class = Granite4Config
    granite_class = Granite4Block

    def build_feed_forward(self, layer_id: int) -> FeedForward:
        names = "gate_proj", "up_proj", "output_linear"
        return FeedForward(self.config, packed_as="input_linear", names=names, placement=self.placement)
