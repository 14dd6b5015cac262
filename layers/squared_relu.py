"""SquaredReLU: a feed-forward layer without gates (So et al., Primer, 2021)."""

# Tests: tests/models/test_parity.py

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from layers.linear import Linear, SummedLinear
from layers.place import Place
from layers.placement import Layer, Placement
from layers.ranks import Addend
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.activations.squared_relu import squared_relu


class SquaredReLU(Layer):
    """`down(relu(up(x))^2)`. `bias`: both have biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.up = Linear(hidden_size, intermediate_size, bias=bias, placement=placement)
        self.down = SummedLinear(intermediate_size, hidden_size, bias=bias, placement=placement)
        self.impl = placement.impl

    @property
    def input_groups(self) -> bool | None:
        """As `Linear.input_groups`."""
        return self.up.input_groups

    def forward(self, hidden: Tensor | QuantisedRows, *, split_k_ok: bool = False) -> Addend:
        """`hidden [T, hidden_size]` to the same shape, or to parts if they are allowed: see `Linear.forward`."""
        out: Addend = self.down(squared_relu(self.up(hidden), impl=self.impl), split_k_ok=split_k_ok)
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Place]]:
        yield from self.up.checkpoint_tensors(f"{name}.up_proj")
        yield from self.down.checkpoint_tensors(f"{name}.down_proj")
