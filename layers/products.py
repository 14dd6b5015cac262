"""Products whose rows have the same bits whatever else is in the pass, and the comparison that they rest on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from triton_ops.implementation import Impl
from triton_ops.linear.ordered_linear import BLOCK_ROWS, ordered_linear, plain_linear

Plain = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
Ordered = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class ProductTable:
    """At which numbers of rows torch's product has the bits of `ordered_linear`, for weights of one shape.

    Attributes:
        columns, depth: `weight` is `[columns, depth]`.
        has_bias: whether there is one.
        compared: numbers of rows at which both were compared, ascending; more rows are cut into pieces.
        equal: those of them at which all bits agreed.
    """

    columns: int
    depth: int
    has_bias: bool
    compared: tuple[int, ...]
    equal: tuple[int, ...]

    @property
    def ordered(self) -> tuple[int, ...]:
        """The numbers of rows that torch's product does not serve, nor with zeros added."""
        return tuple(count for count in self.compared if not self.rows_for(count))

    def rows_for(self, num_rows: int) -> int:
        """How many rows torch's product is to have in place of `num_rows`, at most the last one compared: as many,
        or more, the rest of which are zeros; 0: `ordered_linear` computes them.
        """
        return self._padded[bisect_left(self.compared, num_rows)]

    @cached_property
    def _padded(self) -> tuple[int, ...]:
        """For each number compared the next that is equal, if it is no more than `ordered_linear` would take."""
        return tuple(
            next((more for more in self.equal if count <= more <= max(count, BLOCK_ROWS)), 0)
            for count in self.compared
        )

    def to_json(self) -> dict[str, Any]:
        """Its attributes, and `ordered`, as JSON values."""
        lists = {"compared": [*self.compared], "equal": [*self.equal], "ordered": [*self.ordered]}
        return {"columns": self.columns, "depth": self.depth, "has_bias": self.has_bias, **lists}


class Product:
    """How a layer computes `x W^T + b` so that the bits of a row depend on the row, W and b alone.

    `ordered_linear` does; torch's product, which is faster, may add up in another order at each number of rows. It
    is used where `table` says that its bits are the same: without a table nowhere.
    """

    def __init__(self, impl: Impl) -> None:
        self.impl = impl
        self.table: ProductTable | None = None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """`x [..., K]`, `weight [N, K]` and `bias [N]` to `[..., N]`: `out`, if it is given."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if rows.device.type == "cpu" and rows.data_ptr() % 64:
            rows = rows.clone()  # a CPU's path depends on alignment, too
        if out is None:
            out = x.new_empty(*x.shape[:-1], weight.shape[0])
        results = out.view(len(rows), len(weight))
        most = max(1, len(rows)) if self.table is None else self.table.compared[-1]
        for piece, to in zip(torch.split(rows, most), torch.split(results, most), strict=True):
            self._compute(piece, weight, bias, to)
        return out

    def _compute(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        count = 0 if self.table is None else self.table.rows_for(len(rows))
        if not count:
            ordered_linear(rows, weight, bias, out=out, impl=self.impl)
        elif count == len(rows):
            plain_linear(rows, weight, bias, out)
        else:
            padded = pad(rows, (0, 0, 0, count - len(rows)))
            out.copy_(plain_linear(padded, weight, bias, out.new_empty(count, len(weight)))[: len(rows)])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.itemsize])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same to the last bit, NaN and the signs of 0 included."""
    return torch.equal(_bits(left), _bits(right))


def compare_products(
    columns: int,
    depth: int,
    *,
    has_bias: bool,
    counts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    impl: Impl = "auto",
    plain: Plain = plain_linear,
    ordered: Ordered | None = None,
) -> ProductTable:
    """Compare the bits of torch's product with those of `ordered_linear` at each of `counts` rows, ascending.

    Inputs are `revealing_inputs`, not the model's, since libraries choose by shape.

    Raises ValueError where the bits of a row depend on its place in `ordered_linear`, or on the number of rows at
    those numbers that it is left to serve.
    """
    if ordered is None:

        def ordered(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return ordered_linear(x, weight, bias, impl=impl)

    x, weight, bias = revealing_inputs(counts[-1], columns, depth, dtype, device)
    given = weight, bias if has_bias else None
    expected = ordered(x, *given)
    # Results of all numbers of rows are in the same memory, and the device is waited for once.
    found, differs = torch.empty_like(expected), torch.empty(expected.shape, dtype=torch.bool, device=device)

    def any_differs(count: int) -> Tensor:
        # One product of a few rows tells little: several take a block's.
        flags = []
        for first in range(0, max(1, min(BLOCK_ROWS, len(x)) - count + 1), count):
            rows = slice(first, first + count)
            result = plain(x[rows].clone() if first else x[rows], *given, found[:count])
            flags.append(torch.ne(_bits(result), _bits(expected[rows]), out=differs[:count]).any())
        return torch.stack(flags).any()

    wrong = torch.stack([any_differs(count) for count in counts]).tolist()
    equal = tuple(count for count, differ in zip(counts, wrong, strict=True) if not differ)
    table = ProductTable(columns, depth, has_bias, tuple(counts), equal)
    if not same_bits(ordered(x.roll(1, 0), *given), expected.roll(1, 0)) or not all(
        same_bits(ordered(x[:count], *given), expected[:count])
        for count in takewhile(lambda count: count <= 8 * BLOCK_ROWS, table.ordered)
    ):
        raise ValueError(
            f"in products of {dtype} with weights {[columns, depth]} on {device}, the bits of a row depend on "
            "the rows beside it"
        )
    return table


def revealing_inputs(
    num_rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random x, weight and bias that show in which order a product adds, in every row.

    In every other column the second half of a sum is the negative of the first one, in another order. So results
    are rounding errors alone, and another order gives other numbers, not another last bit here and there. Columns
    between show whether the bias is added before a result is rounded. Elements are of many sizes: short sums of
    products in 16 bits would be exact otherwise.
    """
    generator, half = torch.Generator(device).manual_seed(0), depth // 2
    x, weight, bias = (
        torch.randn(size, generator=generator, device=device).to(dtype)
        for size in ((num_rows, depth), (columns, depth), (columns,))
    )
    x *= torch.randint(-8, 9, (depth,), generator=generator, device=device).exp2().to(dtype)
    x[:, half : 2 * half] = -x[:, :half].roll(1, 1)
    x[:, 2 * half :] = 0.0
    weight[::2, half : 2 * half] = weight[::2, :half].roll(1, 1)
    bias[::2] *= 2.0**-14  # about as small as the errors
    return x, weight, bias
