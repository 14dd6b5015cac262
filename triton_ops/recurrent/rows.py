"""Which tokens and which states the rows of a batch have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.implementation import cdiv, tl, triton

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


def go_through(states: Tensor, rows: StateRows, step: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Go through the tokens of all rows, one after the other, rows side by side, and leave their states.

    `step` is called with the states of n rows `[n, ...]` and the next token of each, int64 `[n]`; it returns the
    states that these tokens leave.
    """
    start_loc, lens, read_from, write_to = (
        ints.long() for ints in (rows.start_loc, rows.lens, rows.read_from, rows.write_to)
    )
    at = begun_states(states, read_from)
    for nth in range(int(lens.max()) if len(lens) else 0):
        live = (lens > nth).nonzero().squeeze(1)
        at[live] = step(at[live], start_loc[live] + nth)
    leave_states(states, write_to[lens > 0], at[lens > 0])


def in_chunks(x: Tensor, size: int) -> Tensor:
    """`[L, heads, ...]` of a sequence as `[heads, chunks, size, ...]`; tokens beyond the end are zeros."""
    num_chunks = cdiv(len(x), size)
    padded = x.new_zeros(num_chunks * size, *x.shape[1:])
    padded[: len(x)] = x
    return padded.view(num_chunks, size, *x.shape[1:]).movedim(2, 0)


def check_heads(**named: Tensor) -> None:
    """Raise ValueError unless each is `[T, heads, size]`, elements of a head side by side."""
    for name, heads in named.items():
        if heads.dim() != 3 or (heads.numel() and heads.stride(2) != 1):
            raise ValueError(
                f"{name} must be [T, heads, size], elements of a head side by side, but is {[*heads.shape]} with "
                f"strides {[*heads.stride()]}"
            )


def check_shapes(dtype: torch.dtype, **named: tuple[Tensor, list[int]]) -> None:
    """Raise ValueError unless each is of its shape, in `dtype`."""
    for name, (tensor, shape) in named.items():
        if [*tensor.shape] != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {shape} in {dtype}, but is {[*tensor.shape]} in {tensor.dtype}")


def check_states(states: Tensor, shape: list[int], **vectors: Tensor) -> None:
    """Raise ValueError unless a state has this shape, `[num_heads, ...]`, and vectors a number for each head."""
    for name, vector in vectors.items():
        if [*vector.shape] != shape[:1] or not vector.is_contiguous():
            raise ValueError(f"{name} must be contiguous {shape[:1]}, but is {[*vector.shape]}")
    if [*states.shape[1:]] != shape or len(states) == 0 or not states[0].is_contiguous():
        raise ValueError(
            f"states must be [num_states, {', '.join(map(str, shape))}], each contiguous, but are "
            f"{[*states.shape]} with strides {[*states.stride()]}"
        )


def check_exact(states: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if states are rounded where rows of tokens in `dtype` end: bits would show the ends."""
    if states.dtype != (computed := torch.promote_types(dtype, torch.float32)):
        raise ValueError(f"states of deterministic layers must be {computed}, but are {states.dtype}")


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
