"""Nemotron-H (NVIDIA, 2025): Mamba-2, a few layers of attention, and squared ReLUs; its mixtures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.mamba2 import Mamba2
from layers.moe import SharedMoE
from layers.placement import Placement
from layers.ranks import ALONE
from layers.relu2_mlp import Relu2MLP
from radixrt.errors import ModelError
from radixrt.models.config import RECURRENT, AttentionKind, check_sizes
from radixrt.models.decoder import Block, Decoder, MixerBlock
from radixrt.models.glm_moe import SHARED, SigmoidMixtureConfig
from radixrt.models.mamba2 import Mamba2Config, read_dt_limits
from radixrt.models.mixtral import split_experts
from triton_ops.activations.squared_relu import squared_relu

# By transformers' names and by those of checkpoints; a layer is a norm and a mixer of one kind or another.
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(norm|mixer)(\..+)")
_OTHERS = re.compile(r"(?:model|backbone)\.(embeddings|norm_f)(\..+)")
_NAMES = MappingProxyType({"embeddings": "embed_tokens", "norm_f": "norm"})
_FEED_FORWARD = ("mlp", "moe")  # kinds of layers
_EXPERT_NAMES = ("up_proj", "down_proj")
_AHEAD = "mtp."  # begins the names of layers that predict tokens ahead, which are not loaded


@dataclass(frozen=True)
class NemotronHConfig(Mamba2Config, SigmoidMixtureConfig):
    """A layer is what a checkpoint has as one or two: Mamba-2 or attention, and a feed-forward layer after it, if
    there is one. `stored_layers`: of each in a checkpoint its number here, and its kind. Without mixtures,
    `num_experts` is 0.
    """

    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **SigmoidMixtureConfig.inner_sizes,
            "shared_size": "moe_shared_expert_intermediate_size",
            "num_mamba_heads": "mamba_num_heads",
        }
    )
    shared_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**Mamba2Config.shared_sizes, "num_mamba_groups": "n_groups"}
    )

    stored_layers: tuple[tuple[int, str], ...]

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        has_experts = "moe" in source.layer_types
        if has_experts and source.moe_latent_size is not None:
            raise ModelError(
                f"moe_latent_size is {source.moe_latent_size}; experts of another size than the model's are not "
                "supported; Nemotron 3 Nano's are"
            )
        for name, supported in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if (found := getattr(source, name)) != supported:
                raise ModelError(f"{name} is {found!r}; {supported!r} alone is supported")
        check_sizes({"num_hidden_layers": len(source.layer_types)})
        kinds = {"linear_attention": RECURRENT, "full_attention": AttentionKind(rope=None)}
        attention = tuple(kinds[kind] for kind in source.layer_types if kind in kinds)
        return {
            **(cls.read_experts(source) if has_experts else _DENSE),
            "shared_size": source.moe_shared_expert_intermediate_size if has_experts else 0,
            "num_layers": len(attention),
            "stored_layers": _stored_layers(source.layer_types),
            "attention": attention,
            "attention_bias": False,
            "rms_norm_eps": source.layer_norm_epsilon,
            "activation": source.mamba_hidden_act,
            "num_mamba_heads": source.mamba_num_heads,
            "mamba_head_dim": source.mamba_head_dim,
            "num_mamba_groups": source.n_groups,
            "state_size": source.ssm_state_size,
            "conv_width": source.conv_kernel,
            "norm_groups": source.n_groups,
            **read_dt_limits(source),
            "conv_bias": source.use_conv_bias,
            "mamba_bias": source.use_bias,
        }

    def check_stages(self, count: int) -> None:
        if count > self.num_layers:
            raise ModelError(
                f"the model has {self.num_layers} layers, each with the feed-forward layer after it, fewer than "
                f"pipeline_parallel_size {count}"
            )

    @property
    def size_of_all(self) -> int:
        return self._as_if_gated(mlp=self.intermediate_size, moe=self.shared_size)

    @property
    def expert_size_of_all(self) -> int:
        return self._as_if_gated(moe=self.expert_size)

    def _as_if_gated(self, **sizes: int) -> int:
        """The size at which feed-forward layers of three matrices in each layer have as many weights as those of
        two that are there, by kind.
        """
        return round(2 * sum(sizes.get(kind, 0) for _, kind in self.stored_layers) / (3 * self.num_layers))


_DENSE: Mapping[str, Any] = MappingProxyType(
    {
        "num_experts": 0,
        "top_k": 0,
        "expert_size": 0,
        "renormalize": True,
        "weight_factor": 1.0,
        "num_groups": 1,
        "top_groups": 1,
    }
)


def _stored_layers(kinds: Sequence[str]) -> tuple[tuple[int, str], ...]:
    stored: list[tuple[int, str]] = []
    count = 0
    for kind in kinds:
        if kind in _FEED_FORWARD and (not stored or stored[-1][1] in _FEED_FORWARD):
            raise ModelError(f"layers of kind {kind} are supported after others alone, not first and not in a row")
        count += kind not in _FEED_FORWARD
        stored.append((count - 1, kind))
    return tuple(stored)


class NemotronH(Decoder):
    """No positions, and a feed-forward layer after some of the others alone."""

    config: NemotronHConfig
    config_class: ClassVar[type[NemotronHConfig]] = NemotronHConfig

    def build_recurrent(self, layer_id: int) -> Mamba2:
        return self.config.build_mamba2(layer_id, self.layers, self.placement)

    def build_block(self, layer_id: int) -> MixerBlock:
        norm, attention = self.build_norm(self.config.hidden_size), self.build_mixer(layer_id)
        kinds = [kind for own, kind in self.config.stored_layers if own == layer_id]
        if len(kinds) == 1:
            return MixerBlock(attention_norm=norm, attention=attention)
        return Block(
            attention_norm=norm,
            attention=attention,
            feed_forward_norm=self.build_norm(self.config.hidden_size),
            feed_forward=self._mixture() if kinds[1] == "moe" else self._feed_forward(self.placement),
        )

    def _feed_forward(self, placement: Placement, size: int | None = None) -> Relu2MLP:
        config = self.config
        size = config.intermediate_size if size is None else size
        return Relu2MLP(config.hidden_size, size, bias=config.mlp_bias, placement=placement)

    def _mixture(self) -> SharedMoE:
        config, placement = self.config, self.placement
        return SharedMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=config.renormalize,
            activation=squared_relu,
            names=_EXPERT_NAMES,
            router=config.build_router(placement),
            shared=self._feed_forward(replace(placement, ranks=ALONE), config.shared_size),
            shared_name=SHARED,
            placement=placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name.startswith(_AHEAD):
            return
        if match := _OTHERS.fullmatch(name):
            name = f"model.{_NAMES[match[1]]}{match[2]}"
        elif (match := _LAYER.fullmatch(name)) and int(match[1]) < len(self.config.stored_layers):
            layer_id, kind = self.config.stored_layers[int(match[1])]
            part = "feed_forward" if kind in _FEED_FORWARD else "attention"
            part = part if match[2] == "mixer" else f"{part}_norm"
            name = f"model.layers.{layer_id}.{Block.checkpoint_names[part]}{match[3]}"
        yield from split_experts(name, tensor, _EXPERT_NAMES)
