"""Mamba2: a layer that keeps the state of a state space of each sequence, in the place of attention."""

# Tests: tests/models/test_parity.py, tests/models/test_hybrid.py

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from layers.checkpoint_slot import CheckpointSlot, Packed
from layers.input_metadata import InputMetadata
from layers.linear import StackedLinear, SummedLinear
from layers.norm import GatedRMSNorm, Hidden
from layers.placement import Placement
from layers.ranks import PartialSum
from layers.recurrent import RecurrentLayer
from layers.weight import Weight
from triton_ops.recurrent.causal_conv import causal_conv
from triton_ops.recurrent.state_space import state_space


@dataclass(frozen=True)
class Mamba2Sizes:
    """The heads of a Mamba-2 layer, of a state `[state_size, head_dim]` each, the groups of heads that share
    what writes and reads these, and the inputs of its convolution.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int

    @property
    def values(self) -> int:
        """Elements of all heads of a token, and of their gates."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of all groups of a token: of b, and of c."""
        return self.num_groups * self.state_size

    @property
    def parts(self) -> list[int]:
        """Elements of x, b and c of a token: the channels of the convolution."""
        return [self.values, self.keys, self.keys]

    @property
    def channels(self) -> int:
        return sum(self.parts)


class Mamba2(RecurrentLayer):
    """Projection, convolution, state space, gated norm and output of one layer: Dao and Gu, Transformers are SSMs
    (2024), arXiv 2405.21060, as in Granite 4 and Nemotron-H.

    Args:
        layer_id: counts the layers that keep states.
        sizes: of a rank's own heads, and of the groups that these are of.
        dt_limits: see `state_space`.
        norm_groups: of the heads of all ranks, each normed by itself.
        conv_bias, bias: whether the convolution and the projections have biases.
    """

    def __init__(
        self,
        layer_id: int,
        hidden_size: int,
        sizes: Mamba2Sizes,
        eps: float,
        *,
        dt_limits: tuple[float, float],
        norm_groups: int,
        conv_bias: bool,
        bias: bool,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.layer_id, self.sizes = layer_id, sizes
        self.impl, self.deterministic = placement.impl, placement.deterministic
        self.dt_limits = dt_limits
        parts = {"in_proj": [sizes.values, *sizes.parts, sizes.num_heads]}
        self.input = StackedLinear(hidden_size, parts, packed_as=None, bias=bias, placement=placement)
        self.conv = placement.parameter(sizes.channels, sizes.conv_width)
        self.conv_bias = placement.parameter(sizes.channels) if conv_bias else None
        # In float32: decays over long contexts depend on every bit.
        self.a_log = placement.parameter(sizes.num_heads, dtype=torch.float32)
        self.d = placement.parameter(sizes.num_heads, dtype=torch.float32)
        self.dt_bias = placement.parameter(sizes.num_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(sizes.values, norm_groups, eps, placement=placement)
        self.output = SummedLinear(sizes.values, hidden_size, bias=bias, placement=placement)

    @property
    def ends(self) -> tuple[Weight, SummedLinear]:
        return self.input.weight, self.output

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        sizes, (rows, states) = self.sizes, metadata.states_of(self.layer_id)
        parts = [sizes.values, sizes.channels, sizes.num_heads]
        z, xbc, dt = torch.split(self.input(x, metadata), parts, dim=1)
        mixed = causal_conv(xbc, self.conv, self.conv_bias, states.conv, rows, impl=self.impl)
        inner, b, c = torch.split(mixed, sizes.parts, dim=1)
        y = state_space(
            inner.view(len(inner), sizes.num_heads, sizes.head_dim),
            dt,
            b.view(len(b), sizes.num_groups, sizes.state_size),
            c.view(len(c), sizes.num_groups, sizes.state_size),
            self.a_log,
            self.d,
            self.dt_bias,
            states.recurrent,
            rows,
            dt_limits=self.dt_limits,
            deterministic=self.deterministic,
            impl=self.impl,
        )
        out: PartialSum = self.output(self.norm.gated(y.flatten(1), z), metadata)
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self.input.checkpoint_tensors(name)
        channels = tuple(self.sizes.parts)
        yield f"{name}.conv1d.weight", Packed(self.conv.unsqueeze(1), channels)
        if self.conv_bias is not None:
            yield f"{name}.conv1d.bias", Packed(self.conv_bias, channels)
        yield f"{name}.A_log", self.a_log
        yield f"{name}.D", self.d
        yield f"{name}.dt_bias", self.dt_bias
        yield from self.norm.checkpoint_tensors(f"{name}.norm")
        yield from self.output.checkpoint_tensors(f"{name}.out_proj")
