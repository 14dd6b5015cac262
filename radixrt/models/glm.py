"""GLM-4 of 2025 (Z.ai): norms before and after each part, a rope on half of a head, whose pairs are neighbours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import Tensor

from radixrt.errors import ModelError
from radixrt.models.decoder import Attention, FeedForward
from radixrt.models.sandwich import SandwichBlock, SandwichDecoder

_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias|weight_scale)")
_ROTATED_BLOCKS = re.compile(r".*\.self_attn\.[qk]_proj\.weight_scale_inv")


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
        if _ROTATED_BLOCKS.fullmatch(name):
            raise ModelError(f"tensor {name} is of blocks of rows, but these rows are loaded in another order")
        if _ROTATED.fullmatch(name) and len(tensor) % self.config.head_dim == 0:
            yield name, self._in_halves(tensor)
        else:
            yield name, tensor

    def _in_halves(self, tensor: Tensor) -> Tensor:
        """`[heads * head_dim, ...]` with the even rows of what is rotated of each head before the odd ones."""
        rope = self.config.attention[0].rope
        assert rope is not None
        heads = tensor.view(-1, self.config.head_dim, *tensor.shape[1:])
        rotated, rest = heads.tensor_split([int(self.config.head_dim * rope.partial_rotary_factor)], dim=1)
        return torch.cat((rotated[:, 0::2], rotated[:, 1::2], rest), dim=1).view(tensor.shape)
