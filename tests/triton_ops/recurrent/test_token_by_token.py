"""Deterministic recurrent layers: a sequence has the same bits in one extend, in others, in steps, in company."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.products import same_bits
from tests.support.elementwise_cases import DTYPES, KERNEL_DTYPES
from tests.support.random_tensors import random as randn
from tests.support.recurrent_cases import DeltaInputs, StateSpaceInputs, state_rows
from tests.support.row_bits import threads
from triton_ops.implementation import Impl
from triton_ops.recurrent import gated_delta as delta_module
from triton_ops.recurrent import state_space as space_module
from triton_ops.recurrent.causal_conv import causal_conv
from triton_ops.recurrent.gated_delta import gated_delta
from triton_ops.recurrent.rows import StateRows
from triton_ops.recurrent.state_space import state_space

LENGTH, SEQUENCES = 37, 2
OPERATIONS = {"delta": (gated_delta, DeltaInputs), "state space": (state_space, StateSpaceInputs)}

Pass = list[tuple[int, int, int]]
"""Of some sequences the tokens from one to another; extends first."""


def passes(seed: int | None) -> Iterator[Pass]:
    """Of all sequences from the first token to the last: with random lengths and company, or one step after the
    other.
    """
    chance, at = random.Random(seed), [0] * SEQUENCES
    while min(at) < LENGTH:
        left = [nth for nth in range(SEQUENCES) if at[nth] < LENGTH]
        chosen = left if seed is None else chance.sample(left, chance.randint(1, len(left)))
        lens = {nth: 1 if seed is None else chance.choice([1, 1, 2, 15, 16, 17, 33]) for nth in chosen}
        spans = [(nth, at[nth], min(LENGTH, at[nth] + lens[nth])) for nth in chosen]
        yield sorted(spans, key=lambda span: span[2] - span[1] == 1)
        for nth, _, stop in spans:
            at[nth] = stop


ALONE: list[Pass] = [[(nth, 0, LENGTH)] for nth in range(SEQUENCES)]


def computed(
    op: Callable[[Tensor, Tensor, StateRows], Tensor], states: Tensor, ways: Iterable[Pass]
) -> tuple[Tensor, Tensor]:
    """The outputs of all sequences, and the states that they leave. `op` is called with the indices of tokens, a
    pool and its rows; sequence n begins with state 0, and has state n + 1.
    """
    parts: dict[tuple[int, int], Tensor] = {}
    pool = torch.full_like(states[: SEQUENCES + 1], torch.nan)
    for spans in ways:
        tokens = torch.cat([torch.arange(nth * LENGTH + a, nth * LENGTH + b) for nth, a, b in spans])
        lens = [b - a for _, a, b in spans]
        reads = [nth + 1 if a else 0 for nth, a, _ in spans]
        rows = state_rows(lens, states.device, read_from=reads, write_to=[nth + 1 for nth, _, _ in spans])
        out = op(tokens.to(states.device), pool, rows)
        for (nth, first, _), part in zip(spans, out.split(lens), strict=True):
            parts[nth, first] = part
    return torch.cat([parts[key] for key in sorted(parts)]), pool[1:]


def differing(op: Callable[[Tensor, Tensor, StateRows], Tensor], states: Tensor) -> list[str]:
    """The ways in which outputs or states have other bits than those of each sequence alone and whole."""
    expected = computed(op, states, ALONE)
    ways = {"steps": passes(None), "cuts": passes(0), "other cuts": passes(1)}
    found = {name: computed(op, states, way) for name, way in ways.items()}
    return [name for name, got in found.items() if not all(map(same_bits, got, expected))]


def recurrence(
    name: str,
    impl: Impl,
    dtype: torch.dtype,
    device: torch.device,
    dims: tuple[int, int] = (24, 12),
    **options: Any,
) -> tuple[Callable[[Tensor, Tensor, StateRows], Tensor], Tensor]:
    """Heads of a size that is no power of two, and fewer of keys than of values."""
    operation, kind = OPERATIONS[name]
    inputs: Any = kind.random(SEQUENCES * LENGTH, (1, 2), dims, dtype=dtype, device=device, **options)
    named = [field for field in vars(inputs) if len(getattr(inputs, field)) == SEQUENCES * LENGTH]

    def op(tokens: Tensor, pool: Tensor, rows: StateRows) -> Tensor:
        given = inputs.arguments() | {field: getattr(inputs, field)[tokens] for field in named}
        return operation(**given | {"states": pool}, rows=rows, deterministic=True, impl=impl)

    return op, inputs.states


@pytest.mark.each_once
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_torch(name: str, dtype: torch.dtype, num_threads: int) -> None:
    """The second size is so large that threads share out the sums of two rows, but not those of one."""
    with threads(num_threads):
        for dims in ((24, 12), (128, 80)):
            assert not differing(*recurrence(name, "torch", dtype, torch.device("cpu"), dims))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    assert not differing(*recurrence(name, "triton", dtype, kernel_device))


@pytest.mark.each_once
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_convolutions(impl: Impl, gated: bool, kernel_device: torch.device) -> None:
    """They need no other way."""
    if impl == "torch" and kernel_device.type == "cuda":
        pytest.skip("on a GPU it is the kernel that is used")
    before, after, x, _ = randn(SEQUENCES * LENGTH, 104, device=kernel_device).split([33, 33, 33, 5], 1)
    weight, states = randn(33, 4, device=kernel_device, seed=1), randn(12, 33, 3, device=kernel_device)

    def op(tokens: Tensor, pool: Tensor, rows: StateRows) -> Tensor:
        gates = (before[tokens], after[tokens]) if gated else None
        return causal_conv(x[tokens], weight, None, pool, rows, gates=gates, impl=impl)

    assert not differing(op, states)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_the_rule(name: str, impl: Impl, kernel_device: torch.device) -> None:
    """Rows in another order than their tokens, without tokens, and with state 0, which is NaN in the pool."""
    operation, kind = OPERATIONS[name]
    inputs: Any = kind.random(40, (1, 2), (16, 24), device=kernel_device)
    ints = [[20, 5, 0, 39, 0], [17, 15, 0, 1, 5], [3, 0, 6, 7, 4], [3, 5, 8, 0, 2]]
    rows = StateRows(*(torch.tensor(x, dtype=torch.int32, device=kernel_device) for x in ints), num_extends=5)
    expected, states = inputs.expected(rows)
    actual = inputs.fresh()
    out = operation(**actual.arguments(), rows=rows, deterministic=True, impl=impl)
    for start, length, _, _ in rows.tolist():
        of = slice(start, start + length)
        torch.testing.assert_close(out[of].double(), expected[of], atol=2e-5, rtol=2e-5)
    left = [2, 3, 5]
    torch.testing.assert_close(actual.states[left].double(), states[left], atol=2e-5, rtol=2e-5)
    others = [nth for nth in range(1, 12) if nth not in left]
    assert torch.equal(actual.states[others], inputs.states[others])


@pytest.mark.each_once
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_chunks_are_found(
    name: str, impl: Impl, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted from where an extend begins."""
    operation, kind = OPERATIONS[name]
    monkeypatch.setitem(
        OPERATIONS,
        name,
        (lambda deterministic, **given: operation(**given), kind),  # type: ignore[misc]
    )
    assert differing(*recurrence(name, impl, torch.float32, kernel_device))


@pytest.mark.long_unless(kept=lambda given: given["name"] == "delta")
@pytest.mark.parametrize("name", OPERATIONS)
def test_states_rounded_in_the_pool_are_found(
    name: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (delta_module, space_module):
        monkeypatch.setattr(module, "check_exact", lambda states, dtype: None)
    options = {"state_dtype": torch.float16}
    assert differing(*recurrence(name, "triton", torch.float32, kernel_device, **options))


@pytest.mark.parametrize("name", OPERATIONS)
def test_rounded_states_are_refused(name: str) -> None:
    op, states = recurrence(name, "torch", torch.float32, torch.device("cpu"), state_dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"states of deterministic layers must be torch.float32, but are .*bfloat16"
    ):
        computed(op, states, ALONE)
