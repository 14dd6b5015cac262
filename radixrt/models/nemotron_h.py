"""Nemotron-H (NVIDIA, 2025): Mamba-2, a few layers of attention, and feed-forward layers of squared ReLUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.mamba2 import Mamba2Sizes
from layers.squared_relu import SquaredReLU
from radixrt.errors import ModelError
from radixrt.models.config import RECURRENT, AttentionKind
from radixrt.models.decoder import Block, Decoder, Mixer, MixerBlock
from radixrt.models.mamba2 import Mamba2Config

# By transformers' names and by those of checkpoints; a layer is a norm and a mixer of one kind or another.
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(norm|mixer)(\..+)")
_OTHERS = re.compile(r"(?:model|backbone)\.(embeddings|norm_f)(\..+)")
_NAMES = MappingProxyType({"embeddings": "embed_tokens", "norm_f": "norm"})
_AHEAD = "mtp."  # begins the names of layers that predict tokens ahead, which are not loaded


@dataclass(frozen=True)
class NemotronHConfig(Mamba2Config):
    """A layer is what a checkpoint has as one or two: Mamba-2 or attention, and a feed-forward layer after it, if
    there is one. `stored_layers`: of each in a checkpoint its number here, and whether it is a feed-forward layer.
    """

    stored_layers: tuple[tuple[int, bool], ...]

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        if "moe" in source.layer_types:
            raise ModelError(
                f"{source.layer_types.count('moe')} layers are mixtures of experts without gates, which are not "
                "supported; dense Nemotron-H and Nemotron Nano 2 are"
            )
        for name, supported in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if (found := getattr(source, name)) != supported:
                raise ModelError(f"{name} is {found!r}; {supported!r} alone is supported")
        kinds = {"linear_attention": RECURRENT, "full_attention": AttentionKind(rope=None)}
        attention = tuple(kinds[kind] for kind in source.layer_types if kind != "mlp")
        return {
            "num_layers": len(attention),
            "stored_layers": _stored_layers(source.layer_types),
            "attention": attention,
            "attention_bias": False,
            "rms_norm_eps": source.layer_norm_epsilon,
            "activation": source.mamba_hidden_act,
            "mamba_sizes": Mamba2Sizes(
                source.mamba_num_heads,
                source.mamba_head_dim,
                source.n_groups,
                source.ssm_state_size,
                source.conv_kernel,
            ),
            "dt_limits": tuple(float(limit) for limit in source.time_step_limit),
            "conv_bias": source.use_conv_bias,
            "mamba_bias": source.use_bias,
        }

    @property
    def size_of_all(self) -> int:
        """Some layers have feed-forward layers, of two matrices and not three."""
        count = sum(is_feed_forward for _, is_feed_forward in self.stored_layers)
        return round(self.intermediate_size * 2 * count / (3 * self.num_layers))


def _stored_layers(kinds: Sequence[str]) -> tuple[tuple[int, bool], ...]:
    stored: list[tuple[int, bool]] = []
    count = 0
    for kind in kinds:
        if kind == "mlp" and (not stored or stored[-1][1]):
            raise ModelError("layers of kind mlp are supported after others alone, not first and not in a row")
        count += kind != "mlp"
        stored.append((count - 1, kind == "mlp"))
    return tuple(stored)


class NemotronH(Decoder):
    """No positions, and a feed-forward layer after some of the others alone."""

    config: NemotronHConfig
    config_class: ClassVar[type[NemotronHConfig]] = NemotronHConfig

    def build_attention(self, layer_id: int) -> Mixer:
        config = self.config
        if not config.attention[layer_id].is_recurrent:
            return super().build_attention(layer_id)
        groups = config.mamba_sizes.num_groups
        return config.build_mamba2(layer_id, self.layers, norm_groups=groups, placement=self.placement)

    def build_block(self, layer_id: int) -> MixerBlock:
        config, placement = self.config, self.placement
        norm, attention = self.build_norm(config.hidden_size), self.build_attention(layer_id)
        if (layer_id, True) not in config.stored_layers:
            return MixerBlock(attention_norm=norm, attention=attention)
        return Block(
            attention_norm=norm,
            attention=attention,
            feed_forward_norm=self.build_norm(config.hidden_size),
            feed_forward=SquaredReLU(
                config.hidden_size, config.intermediate_size, bias=config.mlp_bias, placement=placement
            ),
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name.startswith(_AHEAD):
            return
        if match := _OTHERS.fullmatch(name):
            name = f"model.{_NAMES[match[1]]}{match[2]}"
        elif (match := _LAYER.fullmatch(name)) and int(match[1]) < len(self.config.stored_layers):
            layer_id, is_feed_forward = self.config.stored_layers[int(match[1])]
            kind = "feed_forward" if is_feed_forward else "attention"
            part = kind if match[2] == "mixer" else f"{kind}_norm"
            name = f"model.layers.{layer_id}.{Block.checkpoint_names[part]}{match[3]}"
        yield name, tensor
