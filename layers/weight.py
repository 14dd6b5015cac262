"""What holds weights in their format: of linear layers, and stacked ones of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from layers.checkpoint_slot import CheckpointSlot, LeftPlain
from layers.formats.weight_format import PLAIN, Tensors, WeightFormat
from layers.placement import Placement
from layers.products import Product
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.moe.moe import Matrices


class Stack(nn.Module):
    """Weights of `shape` `[..., N, K]`, whose tensors in the format `held` are its parameters."""

    def __init__(self, held: WeightFormat, *shape: int, placement: Placement) -> None:
        super().__init__()
        self.shape, self._placement = torch.Size(shape), placement
        self._hold(held)

    def _hold(self, held: WeightFormat) -> None:
        self.held = held
        for name, (shape, dtype) in held.tensors(*self.shape).items():
            setattr(self, name, self._placement.parameter(*shape, dtype=dtype))

    @property
    def tensors(self) -> Tensors:
        """By their names."""
        return self._parameters  # type: ignore[return-value]

    @property
    def value(self) -> Matrices:
        """As `moe` takes them."""
        return self.held.matrices(self.tensors)


class Weight(Stack):
    """`W [N, K]` of products `x W^T + b`.

    It is held in the model's dtype where the placement does not hold quantised weights, where it does not fit its
    format (see `WeightFormat.fits`), and, by `hold_plain`, where a checkpoint leaves a part of it as it is.

    Attributes:
        shape: `[N, K]`.
        stored: the format in which a checkpoint has it, or in which it is quantised as it is loaded.
        held: that in which it is held.
        values, scale, zeros: its tensors in that format; None where it has no such tensor.
    """

    values: nn.Parameter
    scale: nn.Parameter | None
    zeros: nn.Parameter | None

    def __init__(self, num_rows: int, depth: int, *, starts: Sequence[int] = (0,), placement: Placement) -> None:
        """`starts` are the first rows of the parts that a checkpoint stores."""
        stored = placement.quantization
        is_held = placement.holds_quantised and stored.fits(depth, starts)
        super().__init__(stored if is_held else PLAIN, num_rows, depth, placement=placement)
        self.impl, self.stored = placement.impl, stored

    def _hold(self, held: WeightFormat) -> None:
        self._parameters.clear()
        self.scale = self.zeros = None
        super()._hold(held)

    @property
    def input_groups(self) -> bool | None:
        """Whether products quantise x in groups of 128, or row by row (False); None: they take it as it is."""
        return self.held.input_groups

    def product(
        self,
        x: Tensor | QuantisedRows,
        bias: Tensor | None,
        *,
        ordered: Product | None = None,
        split_k_ok: bool = False,
    ) -> Tensor:
        """`x [..., K]` to `x W^T + b`, `[..., N]` in x's dtype; by `ordered`, if it is given. x may be quantised
        already, as `input_groups` says.

        With `split_k_ok` the result may be parts: see `Linear`.
        """
        return self.held.product(self.tensors, x, bias, self.impl, ordered=ordered, split_k_ok=split_k_ok)

    def silu_gated(self, x: Tensor | QuantisedRows) -> Tensor | None:
        """`silu_and_mul(x W^T)` of `x [T, K]` and W = gate | up in one kernel; None where the product and a kernel
        after it are as fast, or W is not in the model's dtype.
        """
        return self.held.silu_gated(self.tensors, x, self.impl)

    def hold_plain(self) -> None:
        """Hold the model's dtype in place of fewer bits. It is not filled any more."""
        self._hold(PLAIN)

    def places(self, name: str, start: int, stop: int) -> Iterator[tuple[str, CheckpointSlot]]:
        """Rows `start` to `stop` in a checkpoint, where their layer is called `name`: (tensor name, place)."""
        rows = self.held.rows(self.tensors, start, stop)
        return places_of(name, self.stored, self.held, rows, self.hold_plain)


def places_of(
    name: str, stored: WeightFormat, held: WeightFormat, tensors: Tensors, hold_plain: Callable[[], object]
) -> Iterator[tuple[str, CheckpointSlot]]:
    """What fills the `tensors` of a weight in a checkpoint that calls its layer `name`: (tensor name, place)."""
    if stored.ignores(name):
        stored = PLAIN
    if held == PLAIN:
        slots = stored.plain_slots(tensors["values"])
    elif stored == PLAIN:
        first = next(iter(tensors.values()))  # as good as any: nothing fills it before `hold_plain`
        slots = iter([("weight", LeftPlain(first.shape, first.dtype, first.copy_, hold_plain))])
    else:
        slots = stored.slots(tensors)
    for kind, place in slots:
        yield f"{name}.{kind}", place
