"""gpt-oss (OpenAI, 2025): attention with sinks, windows on every second layer, experts with biases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layers.moe import EXPERT_NAMES, SparseMoE
from layers.norm import RMSNorm
from radixrt.errors import ModelError
from radixrt.models.decoder import Attention, Decoder
from radixrt.models.mixtral import MixtureConfig
from triton_ops.activations.clamped_swiglu import LIMIT, clamped_swiglu

_STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?")


@dataclass(frozen=True)
class GptOssConfig(MixtureConfig):
    """Its mixture has no numbers of its own; the activation's are fixed."""

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        if (limit := getattr(source, "swiglu_limit", LIMIT)) != LIMIT:
            raise ModelError(f"swiglu_limit is {limit}; {LIMIT} alone is supported")
        return super().read_family(source)


class GptOss(Decoder):
    """Llama with biases everywhere, sinks, and a mixture of experts whose weights sum to 1 in each layer.

    Checkpoints hold the experts stacked and transposed, the rows of gate and up in turns: they are put apart as
    they are loaded.
    """

    config: GptOssConfig
    config_class = GptOssConfig

    def build_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, offset=0.0, placement=self.placement)

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.config, layer_id, self.rotary(layer_id), sinks=True, placement=self.placement)

    def build_feed_forward(self, layer_id: int) -> SparseMoE:
        config = self.config
        return SparseMoE(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.top_k,
            renormalize=True,
            bias=True,
            activation=clamped_swiglu,
            placement=self.placement,
        )

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        match = _STACKED.fullmatch(name)
        if match is None or tensor.dim() != (2 if match[3] else 3):
            yield name.replace(".mlp.router.", ".mlp.gate."), tensor
            return
        experts, kind = match[1], "bias" if match[3] else "weight"
        gate, up, down = EXPERT_NAMES
        for expert, stored in enumerate(tensor):
            rows = stored if match[3] else stored.T
            parts = {gate: rows[0::2], up: rows[1::2]} if match[2] == "gate_up" else {down: rows}
            for part, own in parts.items():
                yield f"{experts}.{expert}.{part}.{kind}", own
