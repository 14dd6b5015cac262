"""Phi-3 and Phi-4 (Microsoft, 2024): Llama whose checkpoints store q, k and v as one matrix, and gate and up."""

from __future__ import annotations

from radixrt.models.decoder import Attention, Decoder, FeedForward


class Phi3(Decoder):
    """Llama whose packed matrices fill the stacked parameters in place."""

    def build_attention(self, layer_id: int) -> Attention:
        rotary = self.rotary(layer_id)
        return Attention(self.config, layer_id, rotary, packed_as="qkv_proj", placement=self.placement)

    def build_feed_forward(self, layer_id: int) -> FeedForward:
        return FeedForward(self.config, packed_as="gate_up_proj", placement=self.placement)
