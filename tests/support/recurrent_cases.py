"""Ragged batches for recurrent operations, and what they mean in float64, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from triton_ops.recurrent.gated_delta import gated_delta_reference
from triton_ops.recurrent.rows import StateRows
from triton_ops.recurrent.state_space import UNLIMITED, state_space_reference

if TYPE_CHECKING:
    from typing_extensions import Self


def state_rows(
    lens: Sequence[int],
    device: torch.device | None = None,
    *,
    read_from: Sequence[int] | None = None,
    write_to: Sequence[int] | None = None,
    num_extends: int | None = None,
) -> StateRows:
    """Rows side by side. Row b begins with state 2b + 1 and leaves state 2b + 2, unless it is said otherwise; all
    rows up to the last one with several tokens are extends.
    """

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    if num_extends is None:
        num_extends = max((b + 1 for b, length in enumerate(lens) if length > 1), default=0)
    return StateRows(
        ints([sum(lens[:b]) for b in range(len(lens))]),
        ints(lens),
        ints(range(1, 2 * len(lens), 2) if read_from is None else read_from),
        ints(range(2, 2 * len(lens) + 1, 2) if write_to is None else write_to),
        num_extends,
    )


class _Inputs:
    """The tensors of a recurrent operation, by the names of its arguments.

    Attributes:
        reference: what the operation means for the tokens of one sequence, in float64.
        of_tokens: names of those that have a row for each token; the first is shaped as the outputs.
    """

    reference: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    of_tokens: ClassVar[tuple[str, ...]]

    states: Tensor

    def arguments(self) -> dict[str, Any]:
        return dict(vars(self))

    def fresh(self) -> Self:
        """The same with states of its own: the operation writes them."""
        return replace(self, states=self.states.clone())  # type: ignore[type-var]

    def rows(self, tokens: slice) -> Self:
        """The same with some of the tokens."""
        return replace(self, **{name: getattr(self, name)[tokens] for name in self.of_tokens})  # type: ignore[type-var]

    def expected(self, rows: StateRows) -> tuple[Tensor, Tensor]:
        """The outputs and all states afterwards, in float64."""
        out, states = getattr(self, self.of_tokens[0]).double().clone(), self.states.double().clone()
        states[0] = 0.0
        for start, length, begins, ends in rows.tolist():
            if length:
                of = slice(start, start + length)
                args = vars(self.rows(of)) | {"state": self.states[begins] if begins else states[0]}
                del args["states"]
                out[of], left = type(self).reference(**args)
                if ends:
                    states[ends] = left
        return out, states

    def check_states(self, before: Self, expected: Tensor, rows: StateRows, tolerance: float) -> None:
        """Those that rows leave are as expected, and nobody has touched any other one."""
        left = torch.zeros(len(expected), dtype=torch.bool, device=expected.device)
        left[rows.write_to[rows.lens > 0].long()] = True
        left[0] = False
        assert_close(self.states[left], expected[left], tolerance)
        assert torch.equal(self.states[~left].nan_to_num(), before.states[~left].nan_to_num())


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """To `tolerance` times the greatest element of each head."""
    if expected.numel():
        greatest = expected.abs().amax((0, 2) if expected.dim() == 3 else (2, 3), keepdim=True)
        assert ((actual.double() - expected).abs() / greatest).max() < tolerance


@dataclass(frozen=True)
class DeltaInputs(_Inputs):
    """The tensors of `gated_delta`."""

    reference = staticmethod(gated_delta_reference)
    of_tokens = ("v", "q", "k", "a", "b")

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    states: Tensor

    @staticmethod
    def random(
        num_tokens: int,
        heads: tuple[int, int] = (2, 4),
        dims: tuple[int, int] = (16, 16),
        *,
        num_states: int = 12,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        alike: float = 0.5,
        seed: int = 0,
    ) -> DeltaInputs:
        """Of key and value heads with k_dim and v_dim: columns of one projection. Keys are `alike`, so that tokens
        correct one another; heads decay at rates from slow to at once. State 0 is NaN.
        """
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        (num_k_heads, num_v_heads), (k_dim, v_dim) = heads, dims
        sizes = [num_k_heads * k_dim, num_k_heads * k_dim, num_v_heads * v_dim]
        packed = randn(num_tokens, sum(sizes) + 3)
        packed[:, sizes[0] : 2 * sizes[0]] += alike * randn(sizes[1])
        q, k, v, _ = torch.split(packed.to(dtype), [*sizes, 3], 1)
        gates = randn(num_tokens, 2, num_v_heads).to(dtype)
        states = randn(num_states, num_v_heads, k_dim, v_dim) / 4
        states[0] = torch.nan
        if state_dtype is None:
            state_dtype = torch.promote_types(dtype, torch.float32)
        return DeltaInputs(
            q.unflatten(1, (num_k_heads, k_dim)),
            k.unflatten(1, (num_k_heads, k_dim)),
            v.unflatten(1, (num_v_heads, v_dim)),
            gates[:, 0],
            gates[:, 1] * 2,
            torch.linspace(-6.0, 2.5, num_v_heads, device=device).to(dtype),
            randn(num_v_heads).to(dtype),
            states.to(state_dtype),
        )


@dataclass(frozen=True)
class StateSpaceInputs(_Inputs):
    """The tensors of `state_space`, and its limits."""

    reference = staticmethod(state_space_reference)
    of_tokens = ("x", "dt", "b", "c")

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a_log: Tensor
    d: Tensor
    dt_bias: Tensor
    states: Tensor
    dt_limits: tuple[float, float] = UNLIMITED

    @staticmethod
    def random(
        num_tokens: int,
        heads: tuple[int, int] = (2, 4),
        dims: tuple[int, int] = (16, 16),
        *,
        num_states: int = 12,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> StateSpaceInputs:
        """Of groups and heads with state_size and head_dim: columns of one projection. Heads decay at rates from
        slow to at once. State 0 is NaN.
        """
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        (num_groups, num_heads), (state_size, head_dim) = heads, dims
        sizes = [num_heads * head_dim, num_groups * state_size, num_groups * state_size, num_heads]
        x, b, c, dt, _ = torch.split(randn(num_tokens, sum(sizes) + 3).to(dtype), [*sizes, 3], 1)
        states = randn(num_states, num_heads, state_size, head_dim) / 4
        states[0] = torch.nan
        if state_dtype is None:
            state_dtype = torch.promote_types(dtype, torch.float32)
        return StateSpaceInputs(
            x.unflatten(1, (num_heads, head_dim)),
            dt,
            b.unflatten(1, (num_groups, state_size)),
            c.unflatten(1, (num_groups, state_size)),
            torch.linspace(-6.0, 2.5, num_heads, device=device).to(dtype),
            randn(num_heads).to(dtype),
            randn(num_heads).to(dtype),
            states.to(state_dtype),
        )


def expected_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    rows: StateRows,
    gates: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs of `causal_conv` and all states afterwards, in float64 but for gated inputs."""
    if gates is not None:
        x = gates[0] * x
    out, left = x.double().clone(), states.double().clone()
    left[0] = 0.0
    for start, length, begins, ends in rows.tolist():
        if length:
            begun = states[begins].double() if begins else torch.zeros_like(left[0])
            of = slice(start, start + length)
            inputs = torch.cat([begun, x[of].T.double()], 1)
            wide = None if bias is None else bias.double()
            convolved = conv1d(inputs[None], weight.double()[:, None], wide, groups=len(weight))
            out[of] = silu(convolved)[0].T if gates is None else convolved[0].T * gates[1][of]
            if ends:
                left[ends] = inputs[:, length:]
    return out, left
