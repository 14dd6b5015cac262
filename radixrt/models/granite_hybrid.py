"""Granite 4 (IBM, 2025): Granite whose layers may be Mamba-2 but for a few, and mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.checkpoint_slot import CheckpointSlot
from layers.mamba2 import Mamba2
from layers.moe import EXPERT_NAMES, SharedMoE, SparseMoE
from layers.placement import Placement
from layers.ranks import ALONE
from radixrt.errors import ModelError
from radixrt.models.config import check_sizes, read_attention
from radixrt.models.decoder import Block, FeedForward
from radixrt.models.granite import Granite, GraniteBlock, GraniteConfig
from radixrt.models.mamba2 import Mamba2Config, read_dt_limits
from radixrt.models.mixtral import MixtureConfig, split_experts

_MIXTURE = re.compile(r"(.*\.block_sparse_moe\.)(.*)")
# Of a mixture, by the names of checkpoints and by those of transformers.
_STORED = MappingProxyType(
    {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "gate.weight",
        "router.weight": "gate.weight",
    }
)


@dataclass(frozen=True)
class Granite4Config(Mamba2Config, MixtureConfig, GraniteConfig):
    """`intermediate_size` is of what all tokens go through; without experts, `num_experts` is 0."""

    experts_field: ClassVar[str] = "num_local_experts"
    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "intermediate_size": "shared_intermediate_size",
            "expert_size": "intermediate_size",
            "num_mamba_heads": "mamba_n_heads",
        }
    )
    shared_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**Mamba2Config.shared_sizes, "num_mamba_groups": "mamba_n_groups"}
    )

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        dense = {"num_experts": 0, "top_k": 0, "expert_size": 0}
        check_sizes({"mamba_d_head": source.mamba_d_head})  # which may be made of others
        attention = read_attention(source, recurrent="linear_attention")
        if source.position_embedding_type != "rope":
            attention = tuple(replace(kind, rope=None) for kind in attention)
        has_mamba = any(kind.is_recurrent for kind in attention)
        if source.hidden_act != "silu" and has_mamba:
            raise ModelError(
                f"layers of Mamba-2 with hidden_act {source.hidden_act!r} are not supported; 'silu' is"
            )
        return {
            **(super().read_family(source) if source.num_local_experts else dense),
            **GraniteConfig.read_family(source),
            "attention": attention,
            "intermediate_size": source.shared_intermediate_size,
            "num_mamba_heads": source.mamba_n_heads if has_mamba else 0,
            "mamba_head_dim": source.mamba_d_head,
            "num_mamba_groups": source.mamba_n_groups if has_mamba else 0,
            "state_size": source.mamba_d_state,
            "conv_width": source.mamba_d_conv,
            "norm_groups": 1,
            **read_dt_limits(source),
            "conv_bias": bool(source.mamba_conv_bias),
            "mamba_bias": bool(source.mamba_proj_bias),
        }

    @property
    def size_of_all(self) -> int:
        return self.intermediate_size


class Granite4Block(GraniteBlock):
    """Its parts have the names of their kinds."""

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        mixture = self.feed_forward if isinstance(self.feed_forward, SharedMoE) else None
        names = {**Block.checkpoint_names, "feed_forward": "block_sparse_moe" if mixture else "shared_mlp"}
        if isinstance(self.attention, Mamba2):
            names["attention"] = "mamba"
        for part, stored in names.items():
            yield from getattr(self, part).checkpoint_tensors(f"{name}.{stored}")
        if mixture:
            yield from mixture.shared.checkpoint_tensors(f"{name}.shared_mlp")


class Granite4(Granite):
    """Granite 3 by other names; gate and up are stored as one matrix."""

    config: Granite4Config
    config_class: ClassVar[type[Granite4Config]] = Granite4Config
    granite_class = Granite4Block

    def build_recurrent(self, layer_id: int) -> Mamba2:
        return self.config.build_mamba2(layer_id, self.layers, self.placement)

    def build_feed_forward(self, layer_id: int) -> FeedForward | SparseMoE:
        config, placement = self.config, self.placement
        if not config.num_experts:
            return self._shared(placement)
        return SharedMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=True,
            shared=self._shared(replace(placement, ranks=ALONE)),
            shared_name=None,
            placement=placement,
        )

    def _shared(self, placement: Placement) -> FeedForward:
        names = "gate_proj", "up_proj", "output_linear"
        return FeedForward(self.config, packed_as="input_linear", names=names, placement=placement)

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if match := _MIXTURE.fullmatch(name):
            before, part = match.groups()
            name = before + _STORED.get(part, part)
        return split_experts(name, tensor, EXPERT_NAMES)
