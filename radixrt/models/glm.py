"""Ropes whose pairs are neighbours: GLM-4 of 2025 (Z.ai), on half of a head and with norms before and after each
part, and the dense ERNIE 4.5 (Baidu, 2025).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Attention, Decoder, FeedForward
from radixrt.models.sandwich import SandwichBlock, SandwichDecoder
from triton_ops.activations.quantised_rows import BLOCK

_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias|weight_scale|weight_packed)")
_ROTATED_SCALES = re.compile(r".*\.self_attn\.[qk]_proj\.weight_scale")
_ROTATED_BLOCKS = re.compile(r".*\.self_attn\.[qk]_proj\.(weight_scale_inv|qweight|qzeros|scales)")


@dataclass(frozen=True)
class Ernie4_5Config(ModelConfig):
    """One field says whether any projection has a bias."""

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        return {"attention_bias": bool(source.use_bias), "mlp_bias": bool(source.use_bias)}


class Glm4Block(SandwichBlock):
    """Its names."""

    checkpoint_names = MappingProxyType(
        {
            "attention_norm": "input_layernorm",
            "attention": "self_attn",
            "after_attention_norm": "post_self_attn_layernorm",
            "feed_forward_norm": "post_attention_layernorm",
            "feed_forward": "mlp",
            "after_feed_forward_norm": "post_mlp_layernorm",
        }
    )


class Glm4(SandwichDecoder):
    """Biases on q, k and v by config; gate and up are stored as one matrix.

    Its rope turns elements 2i and 2i + 1 together, ours i and i + n: the rows of q and k are brought into that
    order as they are loaded, which changes no score.
    """

    sandwich_class = Glm4Block

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.config, layer_id, self.rotary(layer_id), output_bias=False, placement=self.placement)

    def build_feed_forward(self, layer_id: int) -> FeedForward:
        return FeedForward(self.config, packed_as="gate_up_proj", placement=self.placement)

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, in_halves(self.config, name, tensor)


class Ernie4_5(Decoder):
    """Llama with a rope whose pairs are neighbours, all of a head."""

    config_class = Ernie4_5Config

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, in_halves(self.config, name, tensor)


def in_halves(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """The stored weight or bias of q or k, `[heads * head_dim, ...]`, with the even rows of what is rotated of
    each head before the odd ones; any other tensor as it is.
    """
    if _ROTATED_BLOCKS.fullmatch(name):
        raise ModelError(
            f"tensor {name} is of blocks or words of rows, but these rows are loaded in another order"
        )
    rope = config.attention[0].rope
    if _ROTATED_SCALES.fullmatch(name) and config.quantization.units[0] == BLOCK:
        if BLOCK % config.head_dim:
            raise ModelError(
                f"tensor {name} is of blocks of {BLOCK} rows, but these rows are loaded in another order, which "
                f"blocks do not see where head_dim divides {BLOCK}; it is {config.head_dim}"
            )
        return tensor
    if not _ROTATED.fullmatch(name) or len(tensor) % config.head_dim or rope is None:
        return tensor
    heads = tensor.view(-1, config.head_dim, *tensor.shape[1:])
    rotated, rest = heads.tensor_split([int(config.head_dim * rope.partial_rotary_factor)], dim=1)
    return torch.cat((rotated[:, 0::2], rotated[:, 1::2], rest), dim=1).view(tensor.shape)
