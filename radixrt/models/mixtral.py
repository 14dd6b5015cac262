"""Mixtral (Mistral AI, 2024): Mistral whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.moe import SparseMoE, fits_experts
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Block, Decoder

# Of an expert's gate, up and down projections, in a checkpoint.
NUMBERED_NAMES = ("w1", "w3", "w2")
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|up_proj|down_proj)")


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """A token goes through `top_k` of `num_experts` experts; `expert_size` is their intermediate size.

    `experts_field` is the name of the number of experts in transformers' config.
    """

    experts_field: ClassVar[str] = "num_experts"
    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**ModelConfig.inner_sizes, "expert_size": "moe_intermediate_size"}
    )

    num_experts: int
    top_k: int
    expert_size: int

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        activation = getattr(source, "hidden_act", "silu")  # LFM2's configs have none
        if activation != "silu":
            raise ModelError(f"experts with hidden_act {activation!r} are not supported; 'silu' is")
        return cls.read_experts(source)

    @classmethod
    def read_experts(cls, source: Any) -> dict[str, Any]:
        """Read the fields. Raises ModelError."""
        num_experts = getattr(source, cls.experts_field)
        if not 1 <= source.num_experts_per_tok <= num_experts:
            raise ModelError(f"num_experts_per_tok is {source.num_experts_per_tok}; it must be 1 to {num_experts}")
        return {
            "num_experts": num_experts,
            "top_k": source.num_experts_per_tok,
            "expert_size": getattr(source, "moe_intermediate_size", None) or source.intermediate_size,
        }

    @property
    def size_of_all(self) -> int:
        return 0

    @property
    def expert_size_of_all(self) -> int:
        """`expert_size`, if each layer has so many experts with gates."""
        return self.expert_size

    @property
    def experts_fit_e4m3(self) -> bool:
        """Whether experts are held in e4m3 where other layers are."""
        return fits_experts(self.quantization, self.hidden_size, self.expert_size)

    @property
    def bytes_of_expert_weights(self) -> float | None:
        """Of each in memory; None: those of the model's dtype."""
        return None


class MixtralBlock(Block):
    checkpoint_names = MappingProxyType({**Block.checkpoint_names, "feed_forward": "block_sparse_moe"})


class Mixtral(Decoder):
    """The weights of a token's experts sum to 1."""

    config: MixtureConfig
    config_class = MixtureConfig
    block_class = MixtralBlock

    def build_feed_forward(self, layer_id: int) -> SparseMoE:
        config = self.config
        return SparseMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=True,
            names=NUMBERED_NAMES,
            placement=self.placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        # Stacked experts have another name.
        return split_experts(name.replace(".mlp.", ".block_sparse_moe."), tensor, NUMBERED_NAMES)


def split_experts(name: str, tensor: Tensor, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of a checkpoint expert by expert, under the names of `SparseMoE.checkpoint_tensors`.

    Experts may be stored stacked: `...experts.gate_up_proj` `[num_experts, 2 * intermediate_size, hidden_size]`
    and `...experts.down_proj`; without gates, `...experts.up_proj`. Any other tensor is yielded as it is. `names`
    are those of an expert's gate, up and down projections, or of the last two.
    """
    match = _STACKED.fullmatch(name)
    if match is None or tensor.dim() != 3:
        yield name, tensor
        return
    experts, stack = match.groups()
    *gate_up, down = names
    parts = [down] if stack == "down_proj" else gate_up
    for expert, weights in enumerate(tensor):
        for part, weight in zip(parts, weights.chunk(len(parts)), strict=True):
            yield f"{experts}.{expert}.{part}.weight", weight
