"""GLM-4.5, 4.6 and 4.5 Air (Z.ai, 2025): mixtures with a router of sigmoids and a shared expert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.moe import EXPERT_NAMES, SharedMoE, SparseMoE
from layers.placement import Placement
from layers.ranks import ALONE
from layers.sigmoid_router import SigmoidRouter
from radixrt.errors import ModelError
from radixrt.models.decoder import Attention, Decoder, FeedForward
from radixrt.models.mixtral import MixtureConfig, split_experts

SHARED = "shared_experts"  # the name of the shared expert
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class SigmoidMixtureConfig(MixtureConfig):
    """`renormalize` to `top_groups` are for `topk_sigmoid`; `shared_size` is the shared expert's inner size."""

    experts_field: ClassVar[str] = "n_routed_experts"

    renormalize: bool
    weight_factor: float
    num_groups: int
    top_groups: int
    shared_size: int

    @classmethod
    def read_experts(cls, source: Any) -> dict[str, Any]:
        """All of them, but for `shared_size`."""
        mixture = super().read_experts(source)
        num_experts, num_groups, top_groups = mixture["num_experts"], source.n_group, source.topk_group
        if not 1 <= top_groups <= num_groups or num_experts % num_groups:
            raise ModelError(f"n_group is {num_groups} and topk_group {top_groups}, with {num_experts} experts")
        if num_groups > 1 and num_experts < 2 * num_groups:
            raise ModelError(f"n_group is {num_groups}, with {num_experts} experts; a group has at least two")
        if mixture["top_k"] > num_experts // num_groups * top_groups:
            raise ModelError(
                f"num_experts_per_tok is {mixture['top_k']}; the {top_groups} groups of topk_group have "
                f"{num_experts // num_groups * top_groups} experts"
            )
        return {
            **mixture,
            "expert_size": source.moe_intermediate_size,
            "renormalize": source.norm_topk_prob,
            "weight_factor": float(source.routed_scaling_factor),
            "num_groups": num_groups,
            "top_groups": top_groups,
        }

    def build_router(self, placement: Placement) -> SigmoidRouter:
        return SigmoidRouter(
            self.hidden_size,
            self.num_experts,
            self.top_k,
            renormalize=self.renormalize,
            factor=self.weight_factor,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            placement=placement,
        )


@dataclass(frozen=True)
class Glm4MoeConfig(SigmoidMixtureConfig):
    """The first `num_dense_layers` have no experts; `norms_heads`: whether each query and key head is normed.
    `num_predict_layers` further layers of a checkpoint predict tokens ahead, and are not loaded.
    """

    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**MixtureConfig.inner_sizes, "shared_size": "moe_intermediate_size"}
    )

    num_dense_layers: int
    norms_heads: bool
    num_predict_layers: int

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        return {
            **super().read_family(source),
            "num_dense_layers": source.first_k_dense_replace,
            "shared_size": source.moe_intermediate_size * source.n_shared_experts,
            "norms_heads": source.use_qk_norm,
            "num_predict_layers": getattr(source, "num_nextn_predict_layers", None) or 0,
        }

    @property
    def size_of_all(self) -> int:
        return self.shared_size


class Glm4Moe(Decoder):
    """Dense layers, then mixtures; by config, a norm on each query and key head, and biases on q, k and v."""

    config: Glm4MoeConfig
    config_class = Glm4MoeConfig

    def build_attention(self, layer_id: int) -> Attention:
        config = self.config
        return Attention(
            config,
            layer_id,
            self.rotary(layer_id),
            q_norm=self.build_norm(config.head_dim) if config.norms_heads else None,
            k_norm=self.build_norm(config.head_dim) if config.norms_heads else None,
            output_bias=False,
            placement=self.placement,
        )

    def build_feed_forward(self, layer_id: int) -> FeedForward | SparseMoE:
        config, placement = self.config, self.placement
        if layer_id < config.num_dense_layers:
            return super().build_feed_forward(layer_id)
        return SharedMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=config.renormalize,
            router=config.build_router(placement),
            shared=FeedForward(
                replace(config, intermediate_size=config.shared_size), placement=replace(placement, ranks=ALONE)
            ),
            shared_name=SHARED,
            placement=placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        layer, config = _LAYER.match(name), self.config
        if layer and config.num_layers <= int(layer[1]) < config.num_layers + config.num_predict_layers:
            return iter(())
        return split_experts(name, tensor, EXPERT_NAMES)
