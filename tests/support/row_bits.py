"""Whether the bits of a row of a result depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from layers.products import same_bits

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 23, 24, 31, 32, 33, 47, 48, 64, 65, 69)
ROWS = COUNTS[-1] + 1

Op = Callable[..., Tensor | tuple[Tensor, ...]]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with as many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def differing_counts(op: Op, *inputs: Tensor, counts: Sequence[int] = COUNTS) -> list[int]:
    """The numbers of rows at which `op` of some rows of all `inputs` gives other bits than of all rows.

    One row is taken from each of the first places and some of the others, more from the beginning, the middle and
    the end.
    """
    num_rows = len(inputs[0])
    whole = _tuple(op(*inputs))
    differing = []
    for count in counts:
        last = num_rows - count
        single = {*range(min(17, num_rows)), *range(17, num_rows, 5), last}
        for first in sorted(single if count == 1 else {0, last // 2, last}):
            rows = slice(first, first + count)
            parts = _tuple(op(*(given[rows].clone() for given in inputs)))
            if not all(same_bits(part, full[rows]) for part, full in zip(parts, whole, strict=True)):
                differing.append(count)
                break
    return differing


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result
