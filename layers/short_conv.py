"""ShortConv: a short causal convolution between two gates, in the place of attention."""

# Tests: tests/models/test_parity.py, tests/models/test_hybrid.py

from __future__ import annotations

from collections.abc import Iterator

from layers.checkpoint_slot import CheckpointSlot
from layers.input_metadata import InputMetadata
from layers.linear import StackedLinear, SummedLinear
from layers.norm import Hidden
from layers.placement import Placement
from layers.ranks import PartialSum
from layers.recurrent import RecurrentLayer
from layers.weight import Weight
from triton_ops.recurrent.causal_conv import causal_conv


class ShortConv(RecurrentLayer):
    """`output(c * conv(b * x))`, where b, c and x `[T, channels]` are projections of the layer's input: LFM2
    (Liquid AI, 2025). What it keeps of a sequence are the last inputs of the convolution, `b * x`.

    `layer_id` counts the layers that keep states. `channels`, a rank's own, and `width` are the convolution's.
    `bias`: it has one, and so have the projections.
    """

    def __init__(
        self, layer_id: int, hidden_size: int, channels: int, width: int, *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.layer_id, self.impl = layer_id, placement.impl
        parts = {"in_proj": [channels] * 3}
        self.bcx = StackedLinear(hidden_size, parts, packed_as=None, bias=bias, placement=placement)
        self.conv = placement.parameter(channels, width)
        self.conv_bias = placement.parameter(channels) if bias else None
        self.output = SummedLinear(channels, hidden_size, bias=bias, placement=placement)

    @property
    def ends(self) -> tuple[Weight, SummedLinear]:
        return self.bcx.weight, self.output

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        rows, states = metadata.states_of(self.layer_id)
        b, c, inner = self.bcx(x, metadata).chunk(3, dim=1)
        mixed = causal_conv(inner, self.conv, self.conv_bias, states.conv, rows, gates=(b, c), impl=self.impl)
        out: PartialSum = self.output(mixed, metadata)
        return out

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from self.bcx.checkpoint_tensors(name)
        yield f"{name}.conv.weight", self.conv.unsqueeze(1)
        if self.conv_bias is not None:
            yield f"{name}.conv.bias", self.conv_bias
        yield from self.output.checkpoint_tensors(f"{name}.out_proj")
