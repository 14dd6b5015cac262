"""LFM2 (Liquid AI, 2025): most layers are short convolutions between gates, all others attention; its mixtures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from layers.checkpoint_slot import CheckpointSlot
from layers.moe import SparseMoE
from layers.short_conv import ShortConv
from layers.sigmoid_router import SigmoidRouter
from memory_pool.layout import Part
from memory_pool.state_pool import state_parts
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig, check_sizes
from radixrt.models.decoder import Attention, Block, Decoder, FeedForward
from radixrt.models.mixtral import NUMBERED_NAMES, MixtureConfig, split_experts
from triton_ops.implementation import cdiv

_TINY = 1e-6  # beside the sum of the weights of a token's experts


@dataclass(frozen=True)
class Lfm2Config(ModelConfig):
    """`conv_channels` to `conv_bias` are of the short convolutions: see `ShortConv`."""

    recurrent_type: ClassVar[str | None] = "conv"
    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**ModelConfig.inner_sizes, "conv_channels": "hidden_size"}
    )

    conv_channels: int
    conv_width: int
    conv_bias: bool

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        return {
            **super().read_family(source),
            "conv_channels": source.hidden_size,
            "conv_width": source.conv_L_cache,
            "conv_bias": source.conv_bias,
            "rms_norm_eps": source.norm_eps,
            "activation": "silu",
            "intermediate_size": _intermediate_size(source),
        }

    def state_parts(self, num_layers: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return state_parts(num_layers, (self.conv_channels,), self.conv_width, (0, 0, 0), dtype)

    @property
    def recurrent_weights(self) -> int:
        return 4 * self.hidden_size * self.conv_channels


def _intermediate_size(source: Any) -> int:
    """That of the weights: the config's, or by `block_auto_adjust_ff_dim` two thirds of it, of which there may be
    a multiple, rounded up to whole units.
    """
    size = int(source.intermediate_size)
    if getattr(source, "block_auto_adjust_ff_dim", False):
        size = int(2 * size / 3)
        if source.block_ffn_dim_multiplier is not None:
            unit = source.block_multiple_of
            size = unit * cdiv(int(source.block_ffn_dim_multiplier * size), unit)
    check_sizes({"intermediate_size": size})
    return size


class Lfm2Attention(Attention):
    """Its names."""

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self.qkv.checkpoint_tensors(name)
        yield from self.output.checkpoint_tensors(f"{name}.out_proj")
        assert self.q_norm is not None
        assert self.k_norm is not None
        yield from self.q_norm.checkpoint_tensors(f"{name}.q_layernorm")
        yield from self.k_norm.checkpoint_tensors(f"{name}.k_layernorm")


class Lfm2Block(Block):
    checkpoint_names = MappingProxyType(
        {
            "attention_norm": "operator_norm",
            "attention": "self_attn",
            "feed_forward_norm": "ffn_norm",
            "feed_forward": "feed_forward",
        }
    )


class Lfm2ConvBlock(Lfm2Block):
    checkpoint_names = MappingProxyType({**Lfm2Block.checkpoint_names, "attention": "conv"})


class Lfm2(Decoder):
    """Attention with a norm on each query and key head; names of its own."""

    config: Lfm2Config
    config_class: ClassVar[type[Lfm2Config]] = Lfm2Config
    block_class = Lfm2Block
    recurrent_class = Lfm2ConvBlock

    def build_attention(self, layer_id: int) -> Attention:
        return Lfm2Attention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            q_norm=self.build_norm(self.config.head_dim),
            k_norm=self.build_norm(self.config.head_dim),
            placement=self.placement,
        )

    def build_recurrent(self, layer_id: int) -> ShortConv:
        config = self.config
        return ShortConv(
            config.place_of(layer_id, self.layers),
            config.hidden_size,
            config.conv_channels,
            config.conv_width,
            bias=config.conv_bias,
            placement=self.placement,
        )

    def build_feed_forward(self, layer_id: int) -> FeedForward | SparseMoE:
        return FeedForward(self.config, names=NUMBERED_NAMES, placement=self.placement)

    def checkpoint_tensors(self) -> Iterator[tuple[str, CheckpointSlot]]:
        for name, place in super().checkpoint_tensors():
            yield name.replace("model.norm.", "model.embedding_norm."), place


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config, MixtureConfig):
    """The first `num_dense_layers` have no experts; `renormalize` and `weight_factor` are for `topk_sigmoid`."""

    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**Lfm2Config.inner_sizes, **MixtureConfig.inner_sizes}
    )

    num_dense_layers: int
    renormalize: bool
    weight_factor: float

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        if not source.use_expert_bias:
            raise ModelError("use_expert_bias is False, which is not supported; True is")
        return {
            **super().read_family(source),
            "num_dense_layers": source.num_dense_layers,
            "renormalize": source.norm_topk_prob,
            "weight_factor": float(source.routed_scaling_factor),
        }


class Lfm2Mixture(SparseMoE):
    """Its name of a correction."""

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        for stored, place in super().checkpoint_tensors(name):
            yield stored.replace(".gate.e_score_correction_bias", ".expert_bias"), place


class Lfm2Moe(Lfm2):
    """Dense layers, then mixtures."""

    config: Lfm2MoeConfig
    config_class = Lfm2MoeConfig

    def build_feed_forward(self, layer_id: int) -> FeedForward | SparseMoE:
        config = self.config
        if layer_id < config.num_dense_layers:
            return super().build_feed_forward(layer_id)
        router = SigmoidRouter(
            config.hidden_size,
            config.num_experts,
            config.top_k,
            renormalize=config.renormalize,
            factor=config.weight_factor,
            tiny=_TINY,
            placement=self.placement,
        )
        return Lfm2Mixture(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=config.renormalize,
            names=NUMBERED_NAMES,
            router=router,
            placement=self.placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        return split_experts(name, tensor, NUMBERED_NAMES)
