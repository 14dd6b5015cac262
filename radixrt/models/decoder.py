"""The decoder that all families share: pre-norm blocks of grouped-query attention and a gated feed-forward layer.

Llama (Touvron et al. 2023, Llama team 2024), Mistral (Jiang et al. 2023: windowed attention) and SmolLM3 (Hugging
Face, 2025: layers without positions) differ by their configs alone. Any other family derives a class from
`Decoder` and overrides the `build_...` methods of the parts that differ: see docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from layers.checkpoint_slot import CheckpointSlot
from layers.input_metadata import InputMetadata
from layers.linear import StackedLinear, SummedLinear
from layers.moe import EXPERT_NAMES, SparseMoE
from layers.norm import Hidden, JointRMSNorm, RMSNorm
from layers.placement import Placement
from layers.radix_attention import RadixAttention
from layers.ranks import PartialSum, whole
from layers.recurrent import RecurrentLayer
from layers.sublayer import Sublayer
from layers.vocabulary import Embedding, LogitsHead
from layers.weight import Weight
from memory_pool.layout import Layout
from radixrt.models.config import ModelConfig
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.sigmoid import sigmoid
from triton_ops.activations.silu_and_mul import quantised_silu_and_mul, silu_and_mul
from triton_ops.attention.arguments import Scoring
from triton_ops.kv.qk_norm_rope_store import HeadNorm

# Of the stacked projection gate | up, by the name of the gate's activation.
ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "silu": silu_and_mul,
        "gelu": partial(gelu_and_mul, approximate="none"),
        "gelu_pytorch_tanh": partial(gelu_and_mul, approximate="tanh"),
    }
)


class Attention(Sublayer):
    """Projections, norms of q and k, rotation and attention of one layer.

    Args:
        config: the decoder's; `config.attention[layer_id]` has this layer's window.
        layer_id: counts from 0.
        cos_sin_cache: None where the layer has no positions.
        q_factors: on rotated queries, by position: see `apply_rotary`. None: there are none.
        q_norm, k_norm: over a head, or over all heads: a `JointRMSNorm`.
        norm_after_rotation: of norms over a head; others come before it.
        qkv_bias, output_bias: whether the projections have biases; None: `config.attention_bias`.
        packed_as: the name of the q, k and v projections where a checkpoint stores them as one.
        scale: factor on the scores; None: `head_dim ** -0.5`.
        softcap: of the scores; None: they are not capped.
        sinks: whether each head has a learned logit without a value: see `Scoring`.
        output_gate: the name of a projection to as many heads as queries have, whose sigmoid gates what heads put
            out; None: there is none.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        cos_sin_cache: Tensor | None,
        *,
        q_factors: Tensor | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        norm_after_rotation: bool = False,
        qkv_bias: bool | None = None,
        output_bias: bool | None = None,
        packed_as: str | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        output_gate: str | None = None,
        placement: Placement,
    ) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.deterministic = placement.deterministic
        # Of q, k and v, and of gates, if there are some.
        parts = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
        parts |= {} if output_gate is None else {output_gate: config.num_heads}
        self.num_heads = tuple(parts.values())
        self.qkv = StackedLinear(
            hidden,
            {name: heads * self.head_dim for name, heads in parts.items()},
            packed_as=packed_as,
            bias=config.attention_bias if qkv_bias is None else qkv_bias,
            placement=placement,
        )
        output_bias = config.attention_bias if output_bias is None else output_bias
        self.output = SummedLinear(config.num_heads * self.head_dim, hidden, bias=output_bias, placement=placement)
        self.q_norm = q_norm
        self.k_norm = k_norm
        # Norms of each head are fused with what follows; those over all heads are launches of their own.
        self.norms_each_head = q_norm is not None and not isinstance(q_norm, JointRMSNorm)
        norm = None
        if q_norm is not None and k_norm is not None and self.norms_each_head:
            norm = HeadNorm(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset, norm_after_rotation)
        own_id = config.place_of(layer_id, placement.stage.layers(config.num_layers))
        scale = self.head_dim**-0.5 if scale is None else scale
        self.sinks = placement.parameter(config.num_heads, dtype=torch.float32) if sinks else None
        scoring = Scoring(scale, softcap, config.attention[layer_id].window, self.sinks)
        self.attention = RadixAttention(
            own_id,
            scoring,
            cos_sin_cache=cos_sin_cache,
            q_factors=q_factors,
            norm=norm,
            impl=placement.impl,
            deterministic=placement.deterministic,
        )

    @property
    def ends(self) -> tuple[Weight, SummedLinear]:
        return self.qkv.weight, self.output

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        """`x [T, hidden_size]` to the same shape, or to parts: see `Linear`. Writes the tokens' KV."""
        q, k, v, *gates = self.qkv(x, metadata).unflatten(1, (-1, self.head_dim)).split(self.num_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_each_head:
            q = self.q_norm(q.flatten(1)).view(q.shape)
            k = self.k_norm(k.flatten(1)).view(k.shape)
        attended = self.attention(q, k, v, metadata)
        for gate in gates:
            attended.mul_(sigmoid(gate, deterministic=self.deterministic))
        out: PartialSum = self.output(attended.flatten(1), metadata)
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self.qkv.checkpoint_tensors(name)
        yield from self.output.checkpoint_tensors(f"{name}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.checkpoint_tensors(f"{name}.q_norm")
            yield from self.k_norm.checkpoint_tensors(f"{name}.k_norm")
        if self.sinks is not None:
            yield f"{name}.sinks", self.sinks


Mixer = Attention | RecurrentLayer
"""What mixes the tokens of a sequence."""


class FeedForward(Sublayer):
    """`down(activation(gate(x)) * up(x))`: SwiGLU or GeGLU, as `config.activation` says.

    `names` are those of the gate, up and down projections in a checkpoint, which may store the first two as one,
    `packed_as`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        packed_as: str | None = None,
        names: Sequence[str] = EXPERT_NAMES,
        placement: Placement,
    ) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        gate, up, self.down_name = names
        parts = {gate: inner, up: inner}
        self.gate_up = StackedLinear(hidden, parts, packed_as=packed_as, bias=bias, placement=placement)
        self.activation = partial(
            ACTIVATIONS[config.activation], impl=placement.impl, deterministic=placement.deterministic
        )
        self.is_silu, self.impl = config.activation == "silu", placement.impl
        # Whether one kernel may compute the product and its activation; then nothing comes between.
        self.fuses = config.activation == "silu" and not bias and not placement.deterministic
        self.down = SummedLinear(inner, hidden, bias=bias, placement=placement)

    @property
    def ends(self) -> tuple[Weight, SummedLinear]:
        return self.gate_up.weight, self.down

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        """`x [T, hidden_size]` to the same shape, or to parts: see `Linear`."""
        gated: Hidden | None = self.gate_up.weight.silu_gated(x) if self.fuses else None
        if gated is None:
            groups, product = self.down.weight.input_groups, self.gate_up(x, metadata)
            if groups is not None and self.is_silu:
                gated = quantised_silu_and_mul(product, groups=groups, impl=self.impl)
            else:
                gated = self.activation(product)
        out: PartialSum = self.down(gated, metadata)
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self.gate_up.checkpoint_tensors(name)
        yield from self.down.checkpoint_tensors(f"{name}.{self.down_name}")


class MixerBlock(nn.Module):
    """A layer without a feed-forward part: norm and attention, or what is in its place.

    The residual travels beside the hidden states, so that each addition is fused with the next norm. If a block
    `joins` its norms and sublayers, it settles as it is built what they hand on (`Sublayer.join`); otherwise they
    hand on whole sums in the model's dtype. `checkpoint_names` maps parts to stored names.
    """

    joins: ClassVar[bool] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"attention_norm": "input_layernorm", "attention": "self_attn"}
    )

    def __init__(self, *, attention_norm: RMSNorm, attention: Mixer) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        if self.joins:
            # The norm that comes next, of this or the next layer or the decoder, is of the same kind.
            attention.join(before=attention_norm, after=attention_norm)

    def forward(
        self, hidden: PartialSum, residual: Tensor | None, metadata: InputMetadata
    ) -> tuple[PartialSum, Tensor | None]:
        """The layer's input is `hidden + residual`, or `hidden` alone before the first; so is its output. Beside a
        residual, `hidden` may be parts: only the `add` of a norm reads it.
        """
        normed, residual = self.attention_norm.add(hidden, residual)
        return self.attention(normed, metadata), residual

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        for part, stored in self.checkpoint_names.items():
            yield from getattr(self, part).checkpoint_tensors(f"{name}.{stored}")


class Block(MixerBlock):
    """One layer, built of the parts given: norm, attention, norm, feed-forward.

    A family with norms in other places derives a class with its own `forward`, and sets `joins` to False.
    """

    checkpoint_names = MappingProxyType(
        {
            **MixerBlock.checkpoint_names,
            "feed_forward_norm": "post_attention_layernorm",
            "feed_forward": "mlp",
        }
    )

    def __init__(
        self,
        *,
        attention_norm: RMSNorm,
        attention: Mixer,
        feed_forward_norm: RMSNorm,
        feed_forward: Sublayer,
    ) -> None:
        super().__init__(attention_norm=attention_norm, attention=attention)
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        if self.joins:
            feed_forward.join(before=feed_forward_norm, after=feed_forward_norm)

    def forward(
        self, hidden: PartialSum, residual: Tensor | None, metadata: InputMetadata
    ) -> tuple[PartialSum, Tensor | None]:
        attended, residual = super().forward(hidden, residual, metadata)
        normed, residual = self.feed_forward_norm.add(attended, residual)
        return self.feed_forward(normed, metadata), residual


def _are_quantised(block: nn.Module) -> tuple[bool, ...]:
    """Of each weight of linear layers: a checkpoint may leave some layers as they are."""
    return tuple(weight.scale is not None for weight in block.modules() if isinstance(weight, Weight))


class Decoder(nn.Module):
    """The whole model. Its weights are uninitialised: the loader fills the tensors of `checkpoint_tensors`.

    A family overrides `build_...` methods, each called once, or once a layer. `config_class` reads the family's
    config, `block_class` runs a layer, `recurrent_class` one that keeps states. Where ranks hold the model
    together, `config` and weights are of this rank's part (see `ModelConfig.for_ranks`); hidden states and logits
    are whole on each rank. A stage has blocks for `layers`, counted in the whole model, the first one the
    embedding, the last one norm and head.
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    block_class: ClassVar[type[Block]] = Block
    recurrent_class: ClassVar[type[Block]] = Block

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.placement = placement
        self.stage, self.layers = placement.stage, placement.stage.layers(config.num_layers)
        if self.stage.is_first or (self.stage.is_last and config.tie_word_embeddings):
            self.embedding = self.build_embedding()
        ropes = {kind.rope for kind in config.attention if kind.rope is not None}
        self._rotaries = {
            rope: rope.cos_sin_cache(config.head_dim, config.context_length, placement.device) for rope in ropes
        }
        self.blocks = nn.ModuleList()
        for layer_id in self.layers:
            self.blocks.append(self.build_block(layer_id))
        if self.stage.is_last:
            self.norm = self.build_norm(config.hidden_size)
            self.head = self.build_head()

    def build_embedding(self) -> Embedding:
        return Embedding(self.config.vocab_size, self.config.hidden_size, placement=self.placement)

    def build_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, placement=self.placement)

    def build_mixer(self, layer_id: int) -> Mixer:
        is_recurrent = self.config.attention[layer_id].is_recurrent
        return self.build_recurrent(layer_id) if is_recurrent else self.build_attention(layer_id)

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.config, layer_id, self.rotary(layer_id), placement=self.placement)

    def build_recurrent(self, layer_id: int) -> RecurrentLayer:
        """What is in the place of attention. A family that has such layers overrides this."""
        raise NotImplementedError

    def build_feed_forward(self, layer_id: int) -> FeedForward | SparseMoE:
        return FeedForward(self.config, placement=self.placement)

    def build_block(self, layer_id: int) -> MixerBlock:
        is_recurrent = self.config.attention[layer_id].is_recurrent
        block_class = self.recurrent_class if is_recurrent else self.block_class
        return block_class(
            attention_norm=self.build_norm(self.config.hidden_size),
            attention=self.build_mixer(layer_id),
            feed_forward_norm=self.build_norm(self.config.hidden_size),
            feed_forward=self.build_feed_forward(layer_id),
        )

    def build_head(self) -> LogitsHead:
        return LogitsHead(self.head_weight(), self.config.vocab_size, placement=self.placement)

    def head_weight(self) -> nn.Parameter:
        """The embedding's weight, or a new one, of this rank's rows as there."""
        if self.config.tie_word_embeddings:
            return self.embedding.weight
        vocab_size = self.config.vocab_size
        ranks = self.placement.ranks.dividing(vocab_size)
        return self.placement.parameter(vocab_size // ranks.size, self.config.hidden_size)

    def rotary(self, layer_id: int) -> Tensor | None:
        """Return the `cos_sin_cache` of a layer, shared by all layers of that rope; None if it has no rope."""
        rope = self.config.attention[layer_id].rope
        return None if rope is None else self._rotaries[rope]

    def kv_layout(self, dtype: torch.dtype) -> Layout:
        """What the blocks keep, with KV in `dtype`."""
        return self.config.kv_layout(dtype, self.layers, self.placement.dtype)

    @cached_property
    def num_unlike_blocks(self) -> int:
        """How many leading blocks launch all kernels; at least two, for the first adds no residual."""
        kinds = [
            (
                self.config.attention[layer_id],
                type(block.attention),
                type(getattr(block, "feed_forward", None)),
                _are_quantised(block),
            )
            for layer_id, block in zip(self.layers, self.blocks, strict=True)
        ]
        return min(max(2, *(kinds.index(kind) + 1 for kind in kinds)), len(kinds))

    @cached_property
    def num_weights(self) -> int:
        """About how many weights a rank has. All ranks are told the same number: they pad passes by it."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(
        self,
        input_ids: Tensor,
        metadata: InputMetadata,
        *,
        handed: Tensor | None = None,
        num_blocks: int | None = None,
    ) -> Tensor:
        """Run a pass over `input_ids` int32 or int64 `[T]`, writing the tokens' KV into `metadata`'s pool. Stages
        but the first one take what the one before has `handed` on, `[T, hidden_size]` in the model's dtype.

        Returns the hidden states after the last norm, or those to be handed on, of the same kind. With
        `num_blocks` only the first blocks run, to warm up their kernels: the result means nothing then.
        """
        hidden: PartialSum = self.embedding(input_ids, metadata) if handed is None else handed
        residual: Tensor | None = None
        for block in islice(self.blocks, num_blocks):
            hidden, residual = block(hidden, residual, metadata)
        if not self.stage.is_last:
            return self.handed_on(hidden, residual)
        normed, _ = self.norm.add(hidden, residual)
        assert isinstance(normed, Tensor)  # it has no `reader`
        return normed

    def handed_on(self, hidden: PartialSum, residual: Tensor | None) -> Tensor:
        """The output of the stage's last layer, `[T, hidden_size]`."""
        hidden = whole(hidden)
        if residual is None:
            return hidden
        return residual + (hidden.sum(0).to(residual.dtype) if hidden.dim() == 3 else hidden)  # it may be parts

    def compute_logits(
        self, hidden: Tensor, logits_indices: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return logits `[S, vocab_size]` of rows `logits_indices` int32 `[S]` of `hidden`, or of all rows, in the
        model's dtype; in `out` if it is given.
        """
        logits: Tensor = self.head(hidden, logits_indices, out=out)
        return logits

    def checkpoint_tensors(self) -> Iterator[tuple[str, CheckpointSlot]]:
        """Yield each tensor that a checkpoint stores: its name, and its place, such as a view of a parameter."""
        is_tied = self.config.tie_word_embeddings
        if self.stage.is_first or (self.stage.is_last and is_tied):
            yield from self.embedding.checkpoint_tensors("model.embed_tokens")
        for layer_id, block in zip(self.layers, self.blocks, strict=True):
            assert isinstance(block, MixerBlock)
            yield from block.checkpoint_tensors(f"model.layers.{layer_id}")
        if self.stage.is_last:
            yield from self.norm.checkpoint_tensors("model.norm")
            if not is_tied:
                yield from self.head.checkpoint_tensors("lm_head")

    def split_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a stored tensor under the names of `checkpoint_tensors`: itself, or its parts.

        A family whose checkpoints come in more than one layout overrides this.
        """
        yield name, tensor
