"""Formats of weights, as values: what a checkpoint stores, what is held in memory, how it is multiplied.

A new one is a class that derives from `WeightFormat`, in a file beside this one, and a reader in
`radixrt/models/quantization.py`: docs/models.md has an example.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from layers.checkpoint_slot import CheckpointSlot, Filled
from layers.products import Product
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.implementation import Impl, gpu_of, has_gluon, runs_triton
from triton_ops.linear.few_rows_linear import few_rows_linear
from triton_ops.linear.gated_linear import gated_linear
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.moe.moe import Matrices
from triton_ops.tuning import FewRowsConfig, few_rows_config, gated_linear_config, split_k_config

UNNEEDED = (
    *(".input_scale", ".activation_scale"),  # x is quantised by its own numbers
    ".weight_shape",  # says what config.json does
    ".g_idx",  # the order of groups, which has to be that of columns
)
Tensors = Mapping[str, Tensor]  # that hold a weight, by the names of its parameters
Shape = tuple[Sequence[int], torch.dtype | None]  # of a tensor, and its dtype; None: the model's
Slots = Iterator[tuple[str, CheckpointSlot]]  # the last part of a tensor's name, and where it goes


@dataclass(frozen=True)
class WeightFormat:
    """The format of weights `[N, K]`, or of those of experts `[E, N, K]`. By itself it is PLAIN, the model's
    dtype; others say in what they differ. One that is held in other tensors than `values` has its own `product`,
    and `matrices` if it is `of_experts`.

    Attributes:
        numbers: what weights are in, for messages.
        needs: what a model needs besides kernels to hold them, for messages.
        of_experts: whether experts can be held so, and not only in the model's dtype.
        unneeded: ends of the names of stored tensors that no model needs.
        checked: ends of the names of those among them that are tried for a `problem`.
        ignored: layers that the checkpoint leaves as they are: names, beginnings or ends of names, or "re:" and a
            regular expression for the beginning.
    """

    numbers: ClassVar[str] = "the model's dtype"
    needs: ClassVar[str] = ""
    of_experts: ClassVar[bool] = False
    unneeded: ClassVar[tuple[str, ...]] = ()
    checked: ClassVar[tuple[str, ...]] = ()

    ignored: tuple[str, ...] = field(default=(), kw_only=True)

    def __repr__(self) -> str:
        return "plain"

    # --- in a checkpoint ---

    @property
    def units(self) -> tuple[int, int]:
        """Outputs, and inputs, that have a scale or a word together."""
        return 1, 1

    def ignores(self, layer: str) -> bool:
        """Whether the checkpoint leaves the layer of that name as it is."""
        return any(
            re.match(entry.removeprefix("re:"), layer) is not None
            if entry.startswith("re:")
            else f".{entry}." in f".{layer}." and (layer.startswith(entry) or layer.endswith(entry))
            for entry in self.ignored
        )

    def leaving(self, layers: frozenset[str]) -> WeightFormat:
        """The same, where these layers are known to be stored under the names of plain ones."""
        return self

    def name_of_scalar(self, name: str) -> str:
        """The name that a stored tensor without dimensions has in `slots`."""
        return name

    def problem(self, stored: Tensor) -> str | None:
        """What is wrong with a `checked` tensor, and what to do; None: nothing."""
        return None

    def as_loaded(self) -> WeightFormat:
        """That of weights that are stored plainly, or made by chance, and quantised as they are loaded, if it can
        be held; otherwise they stay plain.
        """
        return PLAIN

    @property
    def is_stored(self) -> bool:
        """Whether a checkpoint stores weights so, and they are not `as_loaded`."""
        return self != self.as_loaded()

    def plain_slots(self, values: Tensor) -> Slots:
        """What fills `values` `[N, K]`, a weight that is held in the model's dtype."""
        yield "weight", values

    def slots(self, tensors: Tensors) -> Slots:
        """What fills `tensors`, which hold a weight `[N, K]`."""
        return self.plain_slots(tensors["values"])

    def dummy(self, kind: str, std: float) -> int | None:
        """What fills a slot of that name if weights are made by chance, with the deviation `std`; None: random
        numbers, of any bits where the slot takes bytes.
        """
        return None

    # --- in memory ---

    def is_multiplied(self, impl: Impl, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether kernels run on the device, and multiply weights that are held so, in a model of `dtype`."""
        return False

    def fits(self, depth: int, starts: Sequence[int]) -> bool:
        """Whether a weight `[N, depth]`, whose stored parts begin at the rows `starts`, can be held so."""
        return True

    def tensors(self, *shape: int) -> dict[str, Shape]:
        """What holds a weight of that shape."""
        return {"values": (shape, None)}

    def rows(self, tensors: Tensors, start: int, stop: int) -> Tensors:
        """Views of what holds the rows from `start` to `stop` of a weight `[N, K]`."""
        return {name: tensor[start:stop] for name, tensor in tensors.items()}

    def reordered(self, tensors: Tensors) -> dict[str, tuple[Sequence[int], Iterator[Tensor]]]:
        """Those of `tensors` of experts whose order is not the checkpoint's: the shape there, and the tensors of
        each expert in that order.
        """
        return {}

    # --- in products ---

    @property
    def input_groups(self) -> bool | None:
        """Whether products quantise x in groups of 128, or row by row (False); None: they take it as it is."""
        return None

    def product(
        self,
        tensors: Tensors,
        x: Tensor | QuantisedRows,
        bias: Tensor | None,
        impl: Impl,
        *,
        ordered: Product | None = None,
        split_k_ok: bool = False,
    ) -> Tensor:
        """See `Weight.product`."""
        values = tensors["values"]
        assert isinstance(x, Tensor)
        if ordered is not None:
            return ordered(x, values, bias)
        if split_k_ok and bias is None and runs_triton(impl, x.device):
            config = split_k_config(gpu_of(x.device), len(x), *values.shape, values.dtype)
            if config is not None:
                return split_k_linear(x, values, config, impl=impl)
        if bias is None and (few := _few_rows(x, values, impl, gated=False)) is not None:
            return few_rows_linear(x, values, few, impl=impl)
        return nn.functional.linear(x, values, bias)

    def silu_gated(self, tensors: Tensors, x: Tensor | QuantisedRows, impl: Impl) -> Tensor | None:
        """See `Weight.silu_gated`."""
        if self != PLAIN or isinstance(x, QuantisedRows) or not runs_triton(impl, x.device):
            return None
        values = tensors["values"]
        if (few := _few_rows(x, values, impl, gated=True)) is not None:
            return few_rows_linear(x, values, few, gated=True, impl=impl)
        (num_outputs, depth), dtype = values.shape, values.dtype
        config = gated_linear_config(gpu_of(x.device), len(x), num_outputs // 2, depth, dtype, gluon=has_gluon())
        return None if config is None else gated_linear(x, values, config, impl=impl)

    def matrices(self, tensors: Tensors) -> Matrices:
        """Those of experts, as `moe` takes them."""
        return tensors["values"]


PLAIN = WeightFormat()


def _few_rows(x: Tensor, values: Tensor, impl: Impl, *, gated: bool) -> FewRowsConfig | None:
    if x.dim() != 2 or not runs_triton(impl, x.device):
        return None
    num_columns, depth = values.shape[0] // (2 if gated else 1), values.shape[1]
    return few_rows_config(gpu_of(x.device), len(x), num_columns, depth, values.dtype, gated=gated)


def gathered(fill: Callable[..., object], **kinds: tuple[Sequence[int], torch.dtype]) -> Slots:
    """Slots of these shapes and dtypes, filled in any order: in the end `fill` takes all tensors by name."""
    come: dict[str, Tensor] = {}

    def take(kind: str, stored: Tensor) -> None:
        come[kind] = stored
        if len(come) == len(kinds):
            fill(**come)
            come.clear()

    for kind, (shape, dtype) in kinds.items():
        yield kind, Filled(torch.Size(shape), dtype, partial(take, kind))
