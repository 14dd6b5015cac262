"""GatedDeltaNet: a layer that keeps a state of fixed size of each sequence, in the place of attention."""

# Tests: tests/models/test_parity.py, tests/models/test_hybrid.py

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from layers.checkpoint_slot import CheckpointSlot, Packed
from layers.input_metadata import InputMetadata
from layers.linear import StackedLinear, SummedLinear
from layers.norm import Hidden, RMSNorm
from layers.placement import Placement
from layers.ranks import PartialSum
from layers.recurrent import RecurrentLayer
from triton_ops.recurrent.causal_conv import causal_conv
from triton_ops.recurrent.gated_delta import gated_delta
from triton_ops.recurrent.gated_rms_norm import gated_rms_norm


@dataclass(frozen=True)
class DeltaSizes:
    """The heads of a gated delta net, each of so many elements, and the inputs of its convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys(self) -> int:
        """Elements of all keys of a token, and of all its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all values of a token, and of their gates."""
        return self.num_value_heads * self.value_dim

    @property
    def parts(self) -> list[int]:
        """Elements of all queries, keys and values of a token: the channels of the convolution."""
        return [self.keys, self.keys, self.values]

    @property
    def channels(self) -> int:
        return sum(self.parts)


class GatedDeltaNet(RecurrentLayer):
    """Projections, convolution, delta rule, gated norm and output of one layer: Yang, Kautz and Hatamizadeh, Gated
    Delta Networks (2024), arXiv 2412.06464, as in Qwen3-Next.

    `layer_id` counts the layers that keep states. `sizes` are of a rank's own heads, as in `Attention`.
    """

    def __init__(
        self, layer_id: int, hidden_size: int, sizes: DeltaSizes, eps: float, *, placement: Placement
    ) -> None:
        super().__init__()
        self.layer_id, self.sizes = layer_id, sizes
        self.impl, self.deterministic = placement.impl, placement.deterministic
        # Two products: a checkpoint may quantise one, and leave the other as it is.
        parts = {"in_proj_qkv": sizes.parts, "in_proj_z": [sizes.values]}
        self.qkvz = StackedLinear(hidden_size, parts, packed_as=None, bias=False, placement=placement)
        of_heads = dict.fromkeys(("in_proj_b", "in_proj_a"), sizes.num_value_heads)
        # One number a head, in which a rounding would last: only a checkpoint may have quantised them.
        is_stored = placement.quantization.is_stored
        own = placement if is_stored else placement.unquantised()
        self.ba = StackedLinear(hidden_size, of_heads, packed_as=None, bias=False, placement=own)
        self.conv = placement.parameter(sizes.channels, sizes.conv_width)
        # In float32, as some checkpoints store them: decays over long contexts depend on every bit.
        self.a_log = placement.parameter(sizes.num_value_heads, dtype=torch.float32)
        self.dt_bias = placement.parameter(sizes.num_value_heads, dtype=torch.float32)
        self.norm = RMSNorm(sizes.value_dim, eps, placement=placement)
        self.output = SummedLinear(sizes.values, hidden_size, bias=False, placement=placement)

    @property
    def ends(self) -> tuple[None, SummedLinear]:
        return None, self.output  # two weights read the input, and need not take the same numbers

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        sizes, (rows, states) = self.sizes, metadata.states_of(self.layer_id)
        qkv, z = torch.split(self.qkvz(x, metadata), [sizes.channels, sizes.values], dim=1)
        b, a = self.ba(x, metadata).chunk(2, dim=1)
        mixed = causal_conv(qkv, self.conv, None, states.conv, rows, impl=self.impl)
        q, k, v = torch.split(mixed, sizes.parts, dim=1)
        q, k = (each.view(len(each), sizes.num_key_heads, sizes.key_dim) for each in (q, k))
        v, z = (each.view(len(each), sizes.num_value_heads, sizes.value_dim) for each in (v, z))
        read = gated_delta(
            q,
            k,
            v,
            a,
            b,
            self.a_log,
            self.dt_bias,
            states.recurrent,
            rows,
            deterministic=self.deterministic,
            impl=self.impl,
        )
        normed = gated_rms_norm(read, z, self.norm.weight, self.norm.eps, impl=self.impl)
        out: PartialSum = self.output(normed.flatten(1), metadata)
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self.qkvz.checkpoint_tensors(name)
        yield from self.ba.checkpoint_tensors(name)
        yield f"{name}.conv1d.weight", Packed(self.conv.unsqueeze(1), tuple(self.sizes.parts))
        yield f"{name}.A_log", self.a_log
        yield f"{name}.dt_bias", self.dt_bias
        yield from self.norm.checkpoint_tensors(f"{name}.norm")
        yield from self.output.checkpoint_tensors(f"{name}.out_proj")
