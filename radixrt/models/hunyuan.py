"""Hunyuan dense (Tencent, 2025): Llama with a norm on each query and key head after they are rotated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from layers.checkpoint_slot import CheckpointSlot
from radixrt.errors import ModelError
from radixrt.models.config import AttentionKind, ModelConfig, head_dim_of, read_attention
from radixrt.models.decoder import Attention, Decoder


@dataclass(frozen=True)
class HunYuanConfig(ModelConfig):
    """A dynamic rope with an `alpha` is a fixed one of a greater theta, whatever the length."""

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        alpha, head_dim = source.rope_parameters.get("alpha"), head_dim_of(source)
        if source.rope_parameters["rope_type"] != "dynamic" or not alpha:
            return {}
        if alpha < 1:
            raise ModelError(f"the rope's alpha is {alpha}; it must be at least 1")
        greater = float(alpha) ** (head_dim / (head_dim - 2))

        def fixed(kind: AttentionKind) -> AttentionKind:
            assert kind.rope is not None
            return replace(kind, rope=replace(kind.rope, theta=kind.rope.theta * greater, scaling=None))

        return {"attention": tuple(fixed(kind) for kind in read_attention(source))}


class HunYuanAttention(Attention):
    """Its names."""

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        names = {f"{name}.{own}_norm.weight": f"{name}.{long}_layernorm.weight" for own, long in _NORMS}
        for stored, tensor in super().checkpoint_tensors(name):
            yield names.get(stored, stored), tensor


_NORMS = (("q", "query"), ("k", "key"))


class HunYuanDense(Decoder):
    """Biases by config."""

    config_class = HunYuanConfig

    def build_attention(self, layer_id: int) -> Attention:
        return HunYuanAttention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            q_norm=self.build_norm(self.config.head_dim),
            k_norm=self.build_norm(self.config.head_dim),
            norm_after_rotation=True,
            placement=self.placement,
        )
