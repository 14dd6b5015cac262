"""What recurrent layers have in common: inputs of tokens, the rows of a batch in torch, checks of arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from triton_ops.implementation import cdiv
from triton_ops.recurrent.rows import StateRows, begun_states, leave_states
from triton_ops.tuning import RECURRENT_DTYPES

CHUNK = 64  # tokens, in torch

Self = TypeVar("Self", bound="TokenInputs")


@dataclass(frozen=True)
class TokenInputs(ABC):
    """What a layer takes of n tokens, all fields `[n, num_heads, ...]` in the dtype that it computes in."""

    def __getitem__(self: Self, tokens: int | Tensor) -> Self:
        """Of some of the tokens, or of one alone: `[num_heads, ...]`."""
        return type(self)(*(field[tokens] for field in vars(self).values()))

    @abstractmethod
    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output `[..., v_dim]` of each token, and the state it leaves of `state [..., k_dim, v_dim]`."""

    @abstractmethod
    def by_chunks(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs `[n, num_heads, v_dim]` of a sequence's tokens that begins with `state [num_heads, k_dim,
        v_dim]`, and the state that the last of them leaves.
        """

    def one_by_one(self, state: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """The same in `out`, token by token."""
        for t in range(len(out)):
            out[t], state = self[t].step(state)
        return out, state


def compute_rows(
    inputs_of: Callable[[slice | Tensor], TokenInputs],
    states: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    deterministic: bool,
) -> Tensor:
    """Fill `out [T, num_heads, v_dim]` in torch, of zeros: rows of one token together, others by chunks or, if
    `deterministic`, all token by token. Returns it.
    """
    if deterministic:
        every = inputs_of(slice(None))

        def step(begun: Tensor, tokens: Tensor) -> Tensor:
            read, left = every[tokens].step(begun)
            out[tokens] = read.to(out.dtype)
            return left

        _go_through(states, rows, step)
        return out
    computed = torch.promote_types(out.dtype, torch.float32)
    tokens, read_from, write_to = rows.single()
    if len(tokens):
        read, left = inputs_of(tokens).step(begun_states(states, read_from).to(computed))
        out[tokens] = read.to(out.dtype)
        leave_states(states, write_to, left)
    for start, length, begins, ends in rows.long():
        of = slice(start, start + length)
        begun = begun_states(states, torch.tensor([begins], device=out.device)).to(computed)
        read, left = inputs_of(of).by_chunks(begun[0])
        out[of] = read.to(out.dtype)
        leave_states(states, torch.tensor([ends], device=out.device), left[None])
    return out


def _go_through(states: Tensor, rows: StateRows, step: Callable[[Tensor, Tensor], Tensor]) -> None:
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


def by_token(per: str, **named: Tensor) -> dict[str, Tensor | int]:
    """Tensors `[T, heads or groups, ...]` with their strides, as kernels take them: `x`, `x_stride` and, `per`
    "head", `x_head_stride`.
    """
    arguments: dict[str, Tensor | int] = {}
    for name, tensor in named.items():
        arguments |= {name: tensor, f"{name}_stride": tensor.stride(0), f"{name}_{per}_stride": tensor.stride(1)}
    return arguments


# --- checks ---


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


def check_kernels(dtype: torch.dtype, k_dim: int, most: int, *, names: tuple[str, str]) -> None:
    """Raise ValueError unless kernels know the dtype and have room for `k_dim`: errors call these by `names`."""
    if dtype not in RECURRENT_DTYPES:
        raise ValueError(f"{names[0]} must be in one of {[*RECURRENT_DTYPES]}, but is in {dtype}")
    if k_dim > most:
        raise ValueError(f"{names[1]} is {k_dim}, but the kernels have room for {most}")
