"""Layers with norms before and after attention and feed-forward (sandwich norm): Gemma, GLM."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.norm import RMSNorm
from layers.placement import Placement
from layers.ranks import PartialSum, whole
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Block, Decoder


class SandwichBlock(Block):
    """Norms before and after attention and feed-forward: `x + norm(attention(norm(x)))`.

    A norm after a part is fused with the addition and the norm that follow. The one after the feed-forward layer
    is therefore left to the next layer, as its `entry_norm`, or to the decoder.
    """

    joins = False
    checkpoint_names = MappingProxyType(
        {
            "attention_norm": "input_layernorm",
            "attention": "self_attn",
            "after_attention_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "feed_forward": "mlp",
            "after_feed_forward_norm": "post_feedforward_layernorm",
        }
    )

    def __init__(
        self,
        *,
        entry_norm: RMSNorm | None,
        after_attention_norm: RMSNorm,
        after_feed_forward_norm: RMSNorm,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self.after_attention_norm = after_attention_norm
        self.after_feed_forward_norm = after_feed_forward_norm
        self.attention_norm.before = () if entry_norm is None else (entry_norm,)
        self.feed_forward_norm.before = (after_attention_norm,)


class SandwichDecoder(Decoder):
    """A decoder of such layers, by the names of `sandwich_class`."""

    sandwich_class: ClassVar[type[SandwichBlock]] = SandwichBlock

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        if self.stage.is_last:
            self.norm.before = (self._exit_norm(),)

    def build_block(self, layer_id: int) -> SandwichBlock:
        size = self.config.hidden_size
        return self.sandwich_class(
            entry_norm=self._exit_norm() if self.blocks else None,
            attention_norm=self.build_norm(size),
            attention=self.build_attention(layer_id),
            after_attention_norm=self.build_norm(size),
            feed_forward_norm=self.build_norm(size),
            feed_forward=self.build_feed_forward(layer_id),
            after_feed_forward_norm=self.build_norm(size),
        )

    def handed_on(self, hidden: PartialSum, residual: Tensor | None) -> Tensor:
        assert residual is not None
        return self._exit_norm().onto(whole(hidden), residual)

    def _exit_norm(self) -> RMSNorm:
        """The last norm of the last layer built so far."""
        last = self.blocks[-1]
        assert isinstance(last, SandwichBlock)
        return last.after_feed_forward_norm
