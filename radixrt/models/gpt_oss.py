"""gpt-oss (OpenAI, 2025): attention with sinks, windows on every second layer, experts with biases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layers.formats.mxfp4 import Mxfp4Format
from layers.formats.weight_format import PLAIN, WeightFormat
from layers.moe import EXPERT_NAMES, SparseMoE
from layers.norm import RMSNorm
from radixrt.errors import ModelError
from radixrt.models.decoder import Attention, Decoder
from radixrt.models.mixtral import MixtureConfig
from triton_ops.activations.clamped_swiglu import LIMIT, clamped_swiglu
from triton_ops.moe.mxfp4 import BYTES, GROUP

if TYPE_CHECKING:
    from typing import Self

_STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}  # of what is stored for all experts


@dataclass(frozen=True)
class GptOssConfig(MixtureConfig):
    """`mxfp4`: the experts' matrices are stored, and stay, in four bits."""

    mxfp4: bool

    @property
    def experts_fit_e4m3(self) -> bool:
        return not self.mxfp4 and super().experts_fit_e4m3

    @property
    def bytes_of_expert_weights(self) -> float | None:
        return (BYTES + 1) / GROUP if self.mxfp4 else None

    def for_ranks(self, size: int) -> Self:
        part = super().for_ranks(size)
        if self.mxfp4 and part.expert_size % GROUP:
            raise ModelError(
                f"intermediate_size gives a rank {part.expert_size} of {self.expert_size} features, but MXFP4 is "
                f"stored in units of {GROUP}, which cannot be cut; tensor_parallel_size must be smaller"
            )
        return part

    @classmethod
    def read_quantization(cls, given: object) -> WeightFormat:
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        if method not in (None, "mxfp4"):
            raise ModelError(f"weights quantised by {method!r} are not supported; 'mxfp4' is")
        return PLAIN  # that of linear layers

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        mxfp4 = getattr(source, "quantization_config", None) is not None
        for name in ("hidden_size", "intermediate_size"):
            if mxfp4 and getattr(source, name) % GROUP:
                raise ModelError(f"{name} is {getattr(source, name)}; in MXFP4 it must be a multiple of {GROUP}")
        if (limit := getattr(source, "swiglu_limit", LIMIT)) != LIMIT:
            raise ModelError(f"swiglu_limit is {limit}; {LIMIT} alone is supported")
        return {**super().read_family(source), "mxfp4": mxfp4}


class GptOss(Decoder):
    """Llama with biases everywhere, sinks, and a mixture of experts whose weights sum to 1 in each layer.

    Checkpoints hold the experts stacked, transposed unless they are in MXFP4, the rows of gate and up in turns:
    these are put apart as they are loaded.
    """

    config: GptOssConfig
    config_class = GptOssConfig

    def build_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, offset=0.0, placement=self.placement)

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.config, layer_id, self.rotary(layer_id), sinks=True, placement=self.placement)

    def build_feed_forward(self, layer_id: int) -> SparseMoE:
        config, placement = self.config, self.placement
        return SparseMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=True,
            bias=True,
            activation=clamped_swiglu,
            held=Mxfp4Format.on(placement.device, placement.dtype, placement.impl) if config.mxfp4 else None,
            placement=placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        match = _STACKED.fullmatch(name)
        if match is None or tensor.dim() != _DIMENSIONS[match[3]]:
            yield name.replace(".mlp.router.", ".mlp.gate."), tensor
            return
        experts, stack, kind = match.groups()
        gate, up, down = EXPERT_NAMES
        for expert, stored in enumerate(tensor):
            rows = stored if kind else stored.T
            parts = {gate: rows[0::2], up: rows[1::2]} if stack == "gate_up" else {down: rows}
            for part, own in parts.items():
                yield f"{experts}.{expert}.{part}.{kind[1:] or 'weight'}", own
