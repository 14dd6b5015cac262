"""Relu2MLP: a feed-forward layer without gates (So et al., Primer, 2021)."""

# Tests: tests/models/test_parity.py

from __future__ import annotations

from collections.abc import Iterator

from layers.checkpoint_slot import CheckpointSlot
from layers.input_metadata import InputMetadata
from layers.linear import Linear, SummedLinear
from layers.norm import Hidden
from layers.placement import Placement
from layers.ranks import PartialSum
from layers.sublayer import Sublayer
from layers.weight import Weight
from triton_ops.activations.squared_relu import squared_relu


class Relu2MLP(Sublayer):
    """`down(relu(up(x))^2)`. `bias`: both have biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.up = Linear(hidden_size, intermediate_size, bias=bias, placement=placement)
        self.down = SummedLinear(intermediate_size, hidden_size, bias=bias, placement=placement)
        self.impl = placement.impl

    @property
    def ends(self) -> tuple[Weight, SummedLinear]:
        return self.up.weight, self.down

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        """`x [T, hidden_size]` to the same shape, or to parts: see `Linear`."""
        out: PartialSum = self.down(squared_relu(self.up(x, metadata), impl=self.impl), metadata)
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self.up.checkpoint_tensors(f"{name}.up_proj")
        yield from self.down.checkpoint_tensors(f"{name}.down_proj")
