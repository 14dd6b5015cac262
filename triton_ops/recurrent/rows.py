"""Which tokens and which states the rows of a batch have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.implementation import tl, triton

ZERO_STATE = 0  # rows that begin with it begin with zeros; what they leave in it nobody reads


@dataclass(frozen=True)
class StateRows:
    """The rows of a pass: int32 `[B]` each, on its device.

    Row b has the new tokens `start_loc[b] : start_loc[b] + lens[b]`, in the order of its sequence. It begins with
    state `read_from[b]` and leaves state `write_to[b]`, which may be the same one; state 0 stands for zeros where
    a row begins, and for no state where it ends. A row without tokens is padding: it leaves nothing. Each token
    belongs to at most one row, and the state that a row leaves is no other row's.

    Attributes:
        num_extends: the first rows may have any number of tokens, all others have one or none. It counts on the
            host: launches depend on it and on the shapes alone, so that a captured graph serves other lengths.
    """

    start_loc: Tensor
    lens: Tensor
    read_from: Tensor
    write_to: Tensor
    num_extends: int

    def __post_init__(self) -> None:
        for name, field in self.numbers().items():
            if field.dim() != 1 or field.dtype != torch.int32 or not field.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous [B] in torch.int32, but is {[*field.shape]} in {field.dtype}"
                )
            if len(field) != len(self.lens):
                raise ValueError(f"{name} has {len(field)} rows, but lens has {len(self.lens)}")
        if not 0 <= self.num_extends <= len(self.lens):
            raise ValueError(f"num_extends must be from 0 to the {len(self.lens)} rows, but is {self.num_extends}")

    def numbers(self, first: int = 0) -> dict[str, Tensor]:
        """Those of the rows from `first` on, by their names."""
        numbers = {
            "start_loc": self.start_loc,
            "lens": self.lens,
            "read_from": self.read_from,
            "write_to": self.write_to,
        }
        return {name: field[first:] for name, field in numbers.items()} if first else numbers

    def tolist(self) -> list[list[int]]:
        """First token, number of tokens and both states of each row. On a GPU this waits for the device."""
        rows: list[list[int]] = torch.stack([self.start_loc, self.lens, self.read_from, self.write_to], 1).tolist()
        return rows

    def single(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the rows with one token: that token and both states, int64 `[n]`. Waits as `tolist` does."""
        rows = (self.lens == 1).nonzero().squeeze(1)
        return self.start_loc[rows].long(), self.read_from[rows].long(), self.write_to[rows].long()

    def long(self) -> list[list[int]]:
        """`tolist` of the rows with more tokens. Raises ValueError where one is not among the extends."""
        rows = self.tolist()
        for b, (_, length, _, _) in enumerate(rows[self.num_extends :], self.num_extends):
            if length > 1:
                raise ValueError(f"row {b} has {length} tokens, but only the first {self.num_extends} are extends")
        return [row for row in rows if row[1] > 1]


def begun_states(states: Tensor, read_from: Tensor) -> Tensor:
    """`states[read_from]`, zeros for state 0, whatever it holds. `read_from` is int64 `[n]`."""
    begun = states[read_from]
    begun[read_from == ZERO_STATE] = 0.0
    return begun


def leave_states(states: Tensor, write_to: Tensor, left: Tensor) -> None:
    """`states[write_to] = left`, except for state 0. `write_to` is int64 `[n]`."""
    kept = write_to != ZERO_STATE
    states[write_to[kept]] = left[kept].to(states.dtype)


# --- for kernels ---


@triton.jit
def find_chunk(lens, num_rows, nth, SIZE: tl.constexpr):
    """Of all rows' chunks of SIZE tokens one after the other, the `nth`: its row, which is `num_rows` or more
    beyond the last chunk, and its number in that row.
    """
    row = 0
    before = 0
    total = 0
    for first in range(0, num_rows, 128):
        index = first + tl.arange(0, 128)
        chunks = (tl.load(lens + index, mask=index < num_rows, other=0) + SIZE - 1) // SIZE
        passed = total + tl.cumsum(chunks, 0) <= nth
        row += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, chunks, 0), 0)
        total += tl.sum(chunks, 0)
    return row, nth - before


@triton.jit
def chunks_before(lens, row, SIZE: tl.constexpr):
    """The number of chunks of all rows before `row`."""
    before = 0
    for first in range(0, row, 128):
        index = first + tl.arange(0, 128)
        before += tl.sum((tl.load(lens + index, mask=index < row, other=0) + SIZE - 1) // SIZE, 0)
    return before
