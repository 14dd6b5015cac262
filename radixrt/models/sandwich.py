"""Layers with norms before and after attention and feed-forward (sandwich norm): Gemma, GLM."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from layers.input_metadata import InputMetadata
from layers.norm import RMSNorm
from layers.radix_attention import KVCache
from layers.ranks import Addend, whole
from radixrt.models.decoder import Block, Decoder


class SandwichBlock(Block):
    """Norms before and after attention and feed-forward: `x + norm(attention(norm(x)))`.

    A norm after a part is fused with the addition and the norm that follow. The one after the feed-forward layer
    is therefore left to the next layer, as its `entry_norm`, or to the decoder.
    """

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
        self.entry_norm = entry_norm
        self.after_attention_norm = after_attention_norm
        self.after_feed_forward_norm = after_feed_forward_norm

    def forward(
        self, hidden: Addend, residual: Tensor | None, metadata: InputMetadata, kv_pool: KVCache
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = whole(hidden)
            hidden = self.attention_norm(residual)
        else:
            hidden, residual = self.attention_norm.add(hidden, residual, before=self.entry_norm)
        hidden = self.attention(hidden, metadata, kv_pool)
        hidden, residual = self.feed_forward_norm.add(hidden, residual, before=self.after_attention_norm)
        return self.feed_forward(hidden), residual


class SandwichDecoder(Decoder):
    """A decoder of such layers, by the names of `sandwich_class`."""

    sandwich_class: ClassVar[type[SandwichBlock]] = SandwichBlock

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

    def handed_on(self, hidden: Addend, residual: Tensor | None) -> Tensor:
        assert residual is not None
        return self._exit_norm().onto(whole(hidden), residual)

    def final_norm(self, hidden: Addend, residual: Tensor | None) -> Tensor:
        assert residual is not None
        return self.norm.add(hidden, residual, before=self._exit_norm())[0]

    def _exit_norm(self) -> RMSNorm:
        """The last norm of the last layer built so far."""
        last = self.blocks[-1]
        assert isinstance(last, SandwichBlock)
        return last.after_feed_forward_norm
