"""Qwen3-Next (Qwen team, 2025), Qwen3.5 and 3.6 (2026): most layers are gated delta nets, all others attention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from layers.checkpoint_slot import CheckpointSlot
from layers.formats.e4m3 import E4M3Format
from layers.formats.int4 import Int4Format, Int4Packing
from layers.formats.weight_format import WeightFormat
from layers.gated_delta_net import DeltaSizes, GatedDeltaNet
from layers.input_metadata import InputMetadata
from layers.linear import Linear
from layers.moe import EXPERT_NAMES, SharedMoE, SparseMoE
from layers.norm import RMSNorm
from layers.ranks import ALONE
from memory_pool.layout import Part
from memory_pool.state_pool import state_parts
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig, optional
from radixrt.models.decoder import Attention, Block, Decoder, FeedForward
from radixrt.models.mixtral import MixtureConfig, split_experts
from triton_ops.activations.sigmoid import sigmoid

# Projections whose outputs are stored head by head, and what each is made of here.
_PARTS = MappingProxyType(
    {
        "q_proj": ("q_proj", "q_gate"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
)
_FUSED = re.compile(rf"(.*layers\.\d+\.\w+\.)({'|'.join(_PARTS)})(\.\w+)")
_AHEAD = "mtp."  # begins the names of layers that predict tokens ahead, which are not loaded


@dataclass(frozen=True)
class HybridConfig(ModelConfig):
    """The sizes of layers that are gated delta nets: see `DeltaSizes`."""

    recurrent_type: ClassVar[str | None] = "linear_attention"
    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **ModelConfig.inner_sizes,
            "num_key_heads": "linear_num_key_heads",
            "num_value_heads": "linear_num_value_heads",
        }
    )
    output_sizes: ClassVar[frozenset[str]] = ModelConfig.output_sizes | {"num_key_heads"}

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        if source.hidden_act != "silu":
            raise ModelError(
                f"gated delta nets with hidden_act {source.hidden_act!r} are not supported; 'silu' is"
            )
        return {
            **super().read_family(source),
            "num_key_heads": source.linear_num_key_heads,
            "num_value_heads": source.linear_num_value_heads,
            "key_dim": source.linear_key_head_dim,
            "value_dim": source.linear_value_head_dim,
            "conv_width": source.linear_conv_kernel_dim,
        }

    @classmethod
    def read_quantization(cls, given: object) -> WeightFormat:
        found = super().read_quantization(given)
        if not isinstance(found, E4M3Format | Int4Format):
            return found
        if isinstance(found, Int4Format) and found.words is not Int4Packing.COMPRESSED:
            raise ModelError(
                "the quantization_config of config.json packs numbers of 4 bits along outputs, which are put in "
                "another order here; take a checkpoint in FP8, of compressed-tensors, or one that is not quantised"
            )
        # Where one projection is left as it is, so are the parts that are made of it.
        last = {name: name.rpartition(".") for name in found.ignored}
        parts = [before + dot + part for before, dot, own in last.values() for part in _PARTS.get(own, ())]
        return replace(found, ignored=(*found.ignored, *parts))

    @property
    def delta_sizes(self) -> DeltaSizes:
        return DeltaSizes(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.conv_width)

    def check(self) -> None:
        super().check()
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.num_key_heads}"
            )

    @property
    def widths(self) -> dict[str, int]:
        return {**super().widths, "num_key_heads": self.key_dim, "num_value_heads": self.value_dim}

    def state_parts(self, num_layers: int, dtype: torch.dtype) -> tuple[Part, ...]:
        sizes = self.delta_sizes
        matrices = sizes.num_value_heads, sizes.key_dim, sizes.value_dim
        return state_parts(num_layers, (*sizes.parts,), sizes.conv_width, matrices, dtype)

    @property
    def recurrent_weights(self) -> int:
        sizes = self.delta_sizes
        # Of queries, keys and values; of gates and the output; of decays and shares.
        return self.hidden_size * (sizes.channels + 2 * sizes.values + 2 * sizes.num_value_heads)


class RecurrentBlock(Block):
    checkpoint_names = MappingProxyType({**Block.checkpoint_names, "attention": "linear_attn"})


class Qwen3_5(Decoder):
    """Norms centred on 1, and heads whose outputs are gated."""

    config: HybridConfig
    config_class: ClassVar[type[HybridConfig]] = HybridConfig
    recurrent_class = RecurrentBlock

    def build_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, offset=1.0, placement=self.placement)

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(
            self.config,
            layer_id,
            self.rotary(layer_id),
            q_norm=self.build_norm(self.config.head_dim),
            k_norm=self.build_norm(self.config.head_dim),
            output_gate="q_gate",
            placement=self.placement,
        )

    def build_recurrent(self, layer_id: int) -> GatedDeltaNet:
        config = self.config
        return GatedDeltaNet(
            config.place_of(layer_id, self.layers),
            config.hidden_size,
            config.delta_sizes,
            config.rms_norm_eps,
            placement=self.placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name.startswith(_AHEAD):
            return
        match = _FUSED.fullmatch(name)
        if match is None:
            yield name, tensor
            return
        before, fused, kind = match.groups()
        for part, rows in zip(_PARTS[fused], self._unfused(fused, tensor), strict=True):
            yield f"{before}{part}{kind}", rows

    def _unfused(self, fused: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The two parts of a projection whose outputs are stored head by head."""
        config, sizes = self.config, self.config.delta_sizes
        if len(tensor) == 1:
            return tensor, tensor  # the scale of all
        if fused == "q_proj":
            query, gate = _regrouped(tensor, config.num_heads, (config.head_dim, config.head_dim))
            return query, gate
        group = sizes.num_value_heads // sizes.num_key_heads
        if fused == "in_proj_ba":
            b, a = _regrouped(tensor, sizes.num_key_heads, (group, group))
            return b, a
        each = sizes.key_dim, sizes.key_dim, group * sizes.value_dim, group * sizes.value_dim
        *qkv, z = _regrouped(tensor, sizes.num_key_heads, each)
        return torch.cat(qkv), z


def _regrouped(tensor: Tensor, num_groups: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The parts of `num_groups` groups of rows, of `sizes` each in every group, those of all groups together.

    Rows may be those of scales, of which one serves several rows of the weight. What has another number of rows is
    returned as the first part, to be found wrong.
    """
    rows, all_rows = len(tensor), num_groups * sum(sizes)
    own = [size * rows // all_rows for size in sizes]
    if any(part * all_rows != size * rows for part, size in zip(own, sizes, strict=True)):
        return tensor, *(tensor[:0] for _ in sizes[1:])
    groups = tensor.view(num_groups, sum(own), *tensor.shape[1:])
    return tuple(part.flatten(0, 1) for part in torch.split(groups, own, dim=1))


@dataclass(frozen=True)
class HybridMixtureConfig(HybridConfig, MixtureConfig):
    """`shared_size` is the shared expert's intermediate size. The rest as in `Qwen3MoeConfig`."""

    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **HybridConfig.inner_sizes,
            **MixtureConfig.inner_sizes,
            "shared_size": "shared_expert_intermediate_size",
        }
    )

    shared_size: int
    dense_layers: frozenset[int]
    renormalize: bool

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        step = optional(source, "decoder_sparse_step", 1)  # Qwen3.5's configs have neither
        dense = {i for i in range(source.num_hidden_layers) if (i + 1) % step}
        return {
            **super().read_family(source),
            "expert_size": source.moe_intermediate_size,
            "shared_size": source.shared_expert_intermediate_size,
            "dense_layers": frozenset(dense.union(optional(source, "mlp_only_layers", ()))),
            "renormalize": optional(source, "norm_topk_prob", True),
        }

    @property
    def size_of_all(self) -> int:
        return self.shared_size


class GatedSharedMoE(SharedMoE):
    """As much of the shared expert as a gate says, which each rank has whole."""

    def __init__(self, *sizes: int, shared_gate: Linear, **options: Any) -> None:
        super().__init__(*sizes, shared_name="shared_expert", **options)
        self.shared_gate = shared_gate

    def of_shared(self, x: Tensor, metadata: InputMetadata) -> Tensor:
        share = sigmoid(self.shared_gate(x, metadata), deterministic=self.deterministic)
        return super().of_shared(x, metadata) * share

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from super().checkpoint_tensors(name)
        yield from self.shared_gate.checkpoint_tensors(f"{name}.shared_expert_gate")


class Qwen3_5Moe(Qwen3_5):
    """Qwen3.5 and Qwen3-Next whose feed-forward layers are mixtures of experts, except for `dense_layers`."""

    config: HybridMixtureConfig
    config_class = HybridMixtureConfig

    def build_feed_forward(self, layer_id: int) -> FeedForward | SparseMoE:
        config, placement = self.config, self.placement
        if layer_id in config.dense_layers:
            return super().build_feed_forward(layer_id)
        return GatedSharedMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=config.renormalize,
            shared=FeedForward(
                replace(config, intermediate_size=config.shared_size), placement=replace(placement, ranks=ALONE)
            ),
            shared_gate=Linear(config.hidden_size, 1, bias=False, placement=placement.unquantised()),
            placement=placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for part, rows in super().split_stored(name, tensor):
            yield from split_experts(part, rows, EXPERT_NAMES)
