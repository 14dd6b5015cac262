"""OLMo 2 (Ai2, 2024): norms after attention and feed-forward, not before them, and on all of q and k."""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor

from layers.input_metadata import InputMetadata
from layers.norm import JointRMSNorm, RMSNorm
from layers.ranks import PartialSum, whole
from radixrt.models.decoder import Attention, Block, Decoder


class Olmo2Block(Block):
    """`x + norm(attention(x))`, then `x + norm(feed_forward(x))`; no residual is left to add."""

    joins = False
    checkpoint_names = MappingProxyType(
        {
            "attention": "self_attn",
            "attention_norm": "post_attention_layernorm",
            "feed_forward": "mlp",
            "feed_forward_norm": "post_feedforward_layernorm",
        }
    )

    def forward(
        self, hidden: PartialSum, residual: Tensor | None, metadata: InputMetadata
    ) -> tuple[Tensor, None]:
        hidden = whole(hidden)
        hidden = self.attention_norm.onto(self.attention(hidden, metadata), hidden)
        return self.feed_forward_norm.onto(self.feed_forward(hidden, metadata), hidden), None


class Olmo2(Decoder):
    """A norm on q and k spans all heads of the projection."""

    block_class = Olmo2Block

    def build_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, offset=0.0, placement=self.placement)

    def build_heads_norm(self, num_heads: int) -> JointRMSNorm:
        size = num_heads * self.config.head_dim
        return JointRMSNorm(size, self.config.rms_norm_eps, offset=0.0, placement=self.placement)

    def build_attention(self, layer_id: int) -> Attention:
        config = self.config
        return Attention(
            config,
            layer_id,
            self.rotary(layer_id),
            q_norm=self.build_heads_norm(config.num_heads),
            k_norm=self.build_heads_norm(config.num_kv_heads),
            placement=self.placement,
        )
