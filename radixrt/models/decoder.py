"""The decoder of Llama and its kin: pre-norm blocks of grouped-query attention and SwiGLU, rotary positions.

Llama 2 and 3 (Touvron et al. 2023, Llama team 2024), Qwen3 (Qwen team 2025: a norm on each query and key
head).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from layers.activation import SiluAndMul
from layers.embedding import Embedding
from layers.input_metadata import InputMetadata
from layers.linear import GateUpLinear, Linear, QKVLinear
from layers.logits import LogitsHead
from layers.norm import RMSNorm
from layers.radix_attention import KVCache, RadixAttention
from layers.rotary import RotaryEmbedding
from radixrt.models.config import ModelConfig


class Attention(nn.Module):
    """Projections, head norms, rotation and attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        bias = config.attention_bias
        self.qkv = QKVLinear(config.hidden_size, heads, kv_heads, head_dim, bias=bias, dtype=dtype, device=device)
        self.output = Linear(heads * head_dim, config.hidden_size, bias=bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = rotary
        self.attention = RadixAttention(layer_id, heads, kv_heads, head_dim, scale=head_dim**-0.5)

    def forward(self, hidden: Tensor, metadata: InputMetadata, kv_pool: KVCache) -> Tensor:
        q, k, v = self.qkv.split_heads(self.qkv(hidden))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, k, metadata.positions)
        attended: Tensor = self.output(self.attention(q, k, v, metadata, kv_pool).flatten(1))
        return attended

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.checkpoint_tensors(name)
        yield from self.output.checkpoint_tensors(f"{name}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.checkpoint_tensors(f"{name}.q_norm")
            yield from self.k_norm.checkpoint_tensors(f"{name}.k_norm")


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = GateUpLinear(hidden, inner, bias=bias, dtype=dtype, device=device)
        self.activation = SiluAndMul()
        self.down = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.gate_up(hidden)))
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up.checkpoint_tensors(name)
        yield from self.down.checkpoint_tensors(f"{name}.down_proj")


class Block(nn.Module):
    """One layer. The residual travels beside the hidden states, so that each addition is fused with the next
    norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer_id, rotary, dtype=dtype, device=device)
        self.feed_forward_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.feed_forward = FeedForward(config, dtype=dtype, device=device)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, metadata: InputMetadata, kv_pool: KVCache
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.attention_norm(hidden), hidden
        else:
            hidden, residual = self.attention_norm.add(hidden, residual)
        hidden = self.attention(hidden, metadata, kv_pool)
        hidden, residual = self.feed_forward_norm.add(hidden, residual)
        return self.feed_forward(hidden), residual

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.attention_norm.checkpoint_tensors(f"{name}.input_layernorm")
        yield from self.attention.checkpoint_tensors(f"{name}.self_attn")
        yield from self.feed_forward_norm.checkpoint_tensors(f"{name}.post_attention_layernorm")
        yield from self.feed_forward.checkpoint_tensors(f"{name}.mlp")


class Decoder(nn.Module):
    """The whole model; its weights are uninitialised until someone fills what `checkpoint_tensors` yields."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = Embedding(vocab, hidden, dtype=dtype, device=device)
        rotary = RotaryEmbedding(config.head_dim, config.context_length, config.rope, device=device)
        self.blocks = nn.ModuleList(
            Block(config, layer_id, rotary, dtype=dtype, device=device) for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = LogitsHead(vocab, hidden, tied_to=tied_to, dtype=dtype, device=device)

    def forward(self, input_ids: Tensor, metadata: InputMetadata, kv_pool: KVCache) -> Tensor:
        """Run a pass over `input_ids` int32 or int64 `[T]`, writing the tokens' KV into `kv_pool`.

        Returns the hidden states after the last norm, `[T, hidden_size]` in the model's dtype.
        """
        hidden: Tensor = self.embedding(input_ids)
        residual: Tensor | None = None
        for block in self.blocks:
            hidden, residual = block(hidden, residual, metadata, kv_pool)
        assert residual is not None, "a decoder has at least one layer"
        hidden, _ = self.norm.add(hidden, residual)
        return hidden

    def compute_logits(self, hidden: Tensor, logits_indices: Tensor) -> Tensor:
        """Logits `[S, vocab_size]`, in the model's dtype, of rows `logits_indices` int32 `[S]` of
        `hidden`.
        """
        logits: Tensor = self.head(hidden, logits_indices)
        return logits

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor that a checkpoint of this model stores: its name and the (view of a) parameter it
        fills.
        """
        yield from self.embedding.checkpoint_tensors("model.embed_tokens")
        for layer_id, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield from block.checkpoint_tensors(f"model.layers.{layer_id}")
        yield from self.norm.checkpoint_tensors("model.norm")
        yield from self.head.checkpoint_tensors("lm_head")
