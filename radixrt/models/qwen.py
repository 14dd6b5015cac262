"""Qwen2 and 2.5 (Qwen team, 2024), Qwen3 and its mixtures of experts (2025), and Seed-OSS (ByteDance, 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layers.moe import EXPERT_NAMES, SparseMoE
from radixrt.models.config import ModelConfig, optional
from radixrt.models.decoder import Attention, Decoder, FeedForward
from radixrt.models.mixtral import MixtureConfig, split_experts


class Qwen2(Decoder):
    """Llama with biases on q, k and v."""

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            qkv_bias=True,
            output_bias=False,
            placement=self.placement,
        )


@dataclass(frozen=True)
class SeedOssConfig(ModelConfig):
    """`output_bias`: whether attention's output has a bias; `attention_bias` is of q, k and v."""

    output_bias: bool

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        return {"output_bias": source.attention_out_bias}


class SeedOss(Decoder):
    """Llama whose projections of attention have biases by config, the last one by a field of its own."""

    config: SeedOssConfig
    config_class = SeedOssConfig

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            output_bias=self.config.output_bias,
            placement=self.placement,
        )


class Qwen3(Decoder):
    """Llama with a norm on each query and key head."""

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            q_norm=self.build_norm(self.config.head_dim),
            k_norm=self.build_norm(self.config.head_dim),
            placement=self.placement,
        )


@dataclass(frozen=True)
class Qwen3MoeConfig(MixtureConfig):
    """`dense_layers` have no experts; with `renormalize` the weights of a token's experts sum to 1."""

    dense_layers: frozenset[int]
    renormalize: bool

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        dense = {i for i in range(source.num_hidden_layers) if (i + 1) % source.decoder_sparse_step}
        return {
            **super().read_family(source),
            "expert_size": source.moe_intermediate_size,
            "dense_layers": frozenset(dense.union(source.mlp_only_layers)),
            "renormalize": optional(source, "norm_topk_prob", True),  # Qwen3-VL's configs have no such field
        }


class Qwen3Moe(Qwen3):
    """Qwen3 whose feed-forward layers are mixtures of experts, except for `dense_layers`."""

    config: Qwen3MoeConfig
    config_class = Qwen3MoeConfig

    def build_feed_forward(self, layer_id: int) -> FeedForward | SparseMoE:
        config = self.config
        if layer_id in config.dense_layers:
            return super().build_feed_forward(layer_id)
        return SparseMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=config.renormalize,
            placement=self.placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        return split_experts(name, tensor, EXPERT_NAMES)


class Qwen3VLMoe(Qwen3Moe):
    """The text of Qwen3-VL's mixtures, whose experts are stored stacked: on the hub each of them transposed, by
    transformers 5 not. Their shape tells.
    """

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        hidden, inner = self.config.hidden_size, self.config.expert_size
        shape = (hidden, inner) if name.endswith("down_proj") else (2 * inner, hidden)
        if tensor.dim() == 3 and tensor.shape[1:] != shape:
            tensor = tensor.transpose(1, 2)
        return super().split_stored(name, tensor)
