"""The state space of Mamba-2: torch and the kernels against float64, torch against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from tests.support.elementwise_cases import DTYPES, KERNEL_DTYPES
from tests.support.recurrent_cases import StateSpaceInputs, assert_close, state_rows
from tests.support.row_bits import ROWS, differing_counts, threads
from triton_ops.implementation import Impl
from triton_ops.recurrent.rows import StateRows
from triton_ops.recurrent.state_space import state_space, state_space_reference

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # of the interpreter, on purpose

# Of the greatest element. Steps round what they read out alone; in chunks, products round what they multiply.
STEP = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# In float32 sums of log decays reach hundreds in a chunk, and are rounded.
CHUNKS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(
    inputs: StateSpaceInputs, rows: StateRows, tolerance: float, state_tolerance: float, impl: Impl = "triton"
) -> Tensor:
    """Outputs of tokens that are somebody's, and states: those that are left, and all others, which nobody
    touched. Returns the outputs.
    """
    expected, states = inputs.expected(rows)
    actual = inputs.fresh()
    out = state_space(**actual.arguments(), rows=rows, impl=impl)
    assert (out.dtype, out.shape) == (inputs.x.dtype, inputs.x.shape)
    for start, length, _, _ in rows.tolist():
        assert_close(out[start : start + length], expected[start : start + length], tolerance)
    actual.check_states(inputs, states, rows, state_tolerance)
    return out


# --- torch ---


@pytest.mark.parametrize(
    "lens", [(1, 1, 1), (5, 0, 1), (2, 1), (64, 1, 0, 1), (130, 3, 200), (63, 65), (0,), ()], ids=str
)
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 5)])
def test_torch(lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    """Rows of one token, and of several in chunks, are what the rule says token by token."""
    for dtype in (torch.float64, torch.float32):
        inputs = StateSpaceInputs.random(sum(lens), heads, (16, 24), dtype=dtype)
        check(inputs, state_rows(lens), CHUNKS[dtype], CHUNKS[dtype], "torch")


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_in_half_precision(dtype: torch.dtype) -> None:
    """Everything but inputs and outputs is float32; states may be rounded."""
    inputs = StateSpaceInputs.random(71, dtype=dtype)
    check(inputs, state_rows((70, 1)), STEP[dtype], 1e-5, "torch")
    rough = StateSpaceInputs.random(71, dtype=dtype, state_dtype=torch.bfloat16)
    check(rough, state_rows((70, 1)), STEP[dtype], 8e-3, "torch")


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)], ids=str)
@pytest.mark.parametrize("length", [1, 7, 150])
def test_torch_is_that_of_transformers(length: int, limits: tuple[float, float]) -> None:
    inputs = replace(StateSpaceInputs.random(length), dt_limits=limits)
    x, dt, b, c = (t[None] for t in (inputs.x, inputs.dt, inputs.b, inputs.c))
    a, begun = -inputs.a_log.exp(), inputs.states[1].mT[None]
    constants = {"D": inputs.d, "dt_bias": inputs.dt_bias, "dt_softplus": True}
    expected, left = mamba2_chunk_scan(
        x, dt, a, b, c, 64, **constants, initial_states=begun, return_final_states=True, dt_limit=limits
    )
    out = state_space(**inputs.arguments(), rows=state_rows([length]))
    torch.testing.assert_close(out, expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(inputs.states[2], left[0].mT, atol=2e-5, rtol=2e-5)
    if length == 1 and limits[0] == 0.0:  # its step knows no limits
        step = {name: value[:, None].expand(-1, 16) for name, value in constants.items() if name != "dt_softplus"}
        wide = a[:, None, None].expand(-1, 16, 16)
        args = (begun.clone(), x[:, 0], dt.mT.expand(-1, -1, 16), wide, b[:, 0], c[:, 0])
        expected = mamba2_selective_state_update(*args, **step, dt_softplus=True)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row(dtype: torch.dtype) -> None:
    """They do not depend on the rows beside it."""
    inputs = StateSpaceInputs.random(ROWS, (1, 2), (8, 24), num_states=ROWS, dtype=dtype)

    def op(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        pool = torch.cat([torch.zeros_like(states[:1]), states])
        numbers = range(1, len(x) + 1)
        rows = state_rows([1] * len(x), read_from=numbers, write_to=numbers)
        return state_space(x, dt, b, c, inputs.a_log, inputs.d, inputs.dt_bias, pool, rows), pool[1:]

    for count in (1, 2):
        with threads(count):
            assert not differing_counts(op, inputs.x, inputs.dt, inputs.b, inputs.c, inputs.states.nan_to_num())


def test_a_step_of_the_reference() -> None:
    """By hand: a state that halves in a step of log 2, to which that much of a value is added."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    out, left = state_space_reference(3.0 * one, zero, one, 2.0 * one, zero[0], one[0, 0], zero[0], 4.0 * one)
    log2 = torch.tensor(2.0, dtype=torch.float64).log()
    torch.testing.assert_close(left, (2.0 + 3.0 * log2) * one)
    torch.testing.assert_close(out, 2.0 * left + 3.0)


# --- the kernels ---


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("heads", "dims"), [((1, 4), (128, 64)), ((2, 2), (16, 16)), ((2, 4), (40, 72)), ((1, 1), (256, 32))]
)
def test_steps(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Rows of one token or none, none of them an extend."""
    rows = state_rows([1, 1, 0, 1, 0], kernel_device)
    inputs = StateSpaceInputs.random(3, heads, dims, dtype=dtype, device=kernel_device)
    check(inputs, rows, STEP[dtype], 5e-6)
    check(replace(inputs, states=inputs.states.half()), rows, STEP[dtype], 6e-4)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("lens", "heads", "dims"),
    [
        ([130], (1, 2), (128, 64)),
        ([64, 1, 65], (1, 1), (64, 64)),
        ([0, 63, 0, 2, 1], (2, 2), (16, 16)),
        ([100, 5, 1, 0, 1], (2, 6), (40, 72)),
        ([70], (1, 1), (256, 32)),
    ],
)
def test_chunks(
    lens: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    """Extends, and after the last of them rows of one token or none."""
    inputs = StateSpaceInputs.random(sum(lens), heads, dims, dtype=dtype, device=kernel_device)
    for num_extends in {max(b for b in range(len(lens)) if lens[b] > 1) + 1, len(lens)}:
        rows = state_rows(lens, kernel_device, num_extends=num_extends)
        check(inputs, rows, CHUNKS[dtype], CHUNKS[dtype])


IMPLS = ["torch", "triton"]


@pytest.mark.parametrize("impl", IMPLS)
def test_more_extends_than_are_looked_up_at_a_time(impl: Impl, kernel_device: torch.device) -> None:
    """Each program looks for its chunk among all rows, 128 at a time."""
    lens = [0] * 126 + [2, 70, 0, 3, 2, 1]
    numbers = [b - 125 if length else 0 for b, length in enumerate(lens)]
    rows = state_rows(lens, kernel_device, read_from=numbers, write_to=numbers)
    check(StateSpaceInputs.random(sum(lens), (1, 1), device=kernel_device), rows, 5e-6, 5e-6, impl)


@pytest.mark.each_once
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("start_loc", "lens", "read_from", "write_to", "num_extends"),
    [
        # Rows in another order than their tokens, tokens between that are nobody's, states in any order.
        ([66, 3, 72, 0], [5, 63, 1, 0], [3, 0, 7, 2], [3, 6, 0, 5], 2),
        # State 0, NaN in the pool, is zeros and is not kept.
        ([0, 3, 5, 6], [3, 2, 1, 1], [0, 3, 0, 4], [2, 0, 1, 0], 2),
        # States are left where they were read.
        ([0, 70, 72], [70, 2, 1], [3, 1, 4], [3, 1, 4], 2),
    ],
)
def test_rows(
    start_loc: list[int],
    lens: list[int],
    read_from: list[int],
    write_to: list[int],
    num_extends: int,
    dtype: torch.dtype,
    impl: Impl,
    kernel_device: torch.device,
) -> None:
    ints = (
        torch.tensor(x, dtype=torch.int32, device=kernel_device) for x in (start_loc, lens, read_from, write_to)
    )
    inputs = StateSpaceInputs.random(73, (1, 2), dtype=dtype, device=kernel_device)
    check(inputs, StateRows(*ints, num_extends=num_extends), CHUNKS[dtype], CHUNKS[dtype], impl)


@pytest.mark.each_once
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("cut", [1, 37, 64, 99])
def test_a_row_cut_in_two_goes_on(cut: int, dtype: torch.dtype, impl: Impl, kernel_device: torch.device) -> None:
    length = 100
    inputs = StateSpaceInputs.random(length, (1, 2), (32, 32), dtype=dtype, device=kernel_device)
    expected, states = inputs.expected(state_rows([length], kernel_device))
    halves, parts = inputs.fresh(), []
    for of, begins, ends in ((slice(cut), 1, 5), (slice(cut, length), 5, 2)):
        tokens = of.stop - (of.start or 0)
        rows = state_rows([tokens], kernel_device, read_from=[begins], write_to=[ends])
        parts.append(state_space(**halves.rows(of).arguments(), rows=rows, impl=impl))
    assert_close(torch.cat(parts), expected, CHUNKS[dtype])
    assert_close(halves.states[[2]], states[[2]], CHUNKS[dtype])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_bits_of_rows_that_run_together(dtype: torch.dtype, impl: Impl, kernel_device: torch.device) -> None:
    """They are those of each row alone: extends, and rows of one token."""
    if impl == "torch" and kernel_device.type == "cuda":
        pytest.skip("on a GPU, torch may add up in another order for each number of rows")
    inputs = StateSpaceInputs.random(73, (1, 2), dtype=dtype, device=kernel_device)
    lens = (50, 20, 1, 1, 1)
    together, alone = inputs.fresh(), inputs.fresh()
    out = state_space(**together.arguments(), rows=state_rows(lens, kernel_device), impl=impl)
    for b, length in enumerate(lens):
        of = slice(sum(lens[:b]), sum(lens[: b + 1]))
        rows = state_rows([length], kernel_device, read_from=[2 * b + 1], write_to=[2 * b + 2])
        assert torch.equal(state_space(**alone.rows(of).arguments(), rows=rows, impl=impl), out[of])
    assert torch.equal(together.states[1:], alone.states[1:])


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("lens", [[80], [79, 1], [1] * 3], ids=str)
def test_extreme_steps(lens: Sequence[int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Tokens that forget everything, and tokens that do nothing."""
    inputs = StateSpaceInputs.random(sum(lens), (1, 4), dtype=dtype, device=kernel_device)
    dt = inputs.dt.clone()
    dt[::7], dt[1::5] = 90.0, -90.0
    # Sums of log decays reach thousands, and are rounded: so are the small ones between large ones.
    tolerance = max(2e-4, CHUNKS[dtype])
    check(
        replace(inputs, dt=dt, d=torch.zeros_like(inputs.d)), state_rows(lens, kernel_device), tolerance, tolerance
    )


@pytest.mark.parametrize("lens", [[70], [1] * 5], ids=str)
def test_limits_of_steps(lens: Sequence[int], kernel_device: torch.device) -> None:
    """Beyond the end of a row there is no step, though it would be above the least."""
    inputs = StateSpaceInputs.random(sum(lens), (1, 4), device=kernel_device)
    rows = state_rows(lens, kernel_device)
    limited = check(replace(inputs, dt_limits=(0.3, 0.9)), rows, 1e-5, 1e-5)
    assert not torch.allclose(limited, check(inputs, rows, 1e-5, 1e-5), atol=0.1)


def test_slow_decays_add_up(kernel_device: torch.device) -> None:
    """What a softplus rounds away shows after many tokens: here each decays by 3e-8 to 1e-3."""
    inputs = StateSpaceInputs.random(64, (1, 4), device=kernel_device)
    dt = torch.tensor([-18.0, -12.0, -6.0, -4.0], device=kernel_device)
    inputs = replace(inputs, dt=dt.expand(64, 4), a_log=dt * 0 + 1, dt_bias=dt * 0, x=torch.zeros_like(inputs.x))
    check(inputs, state_rows([64], kernel_device), 5e-6, 5e-6)


def test_values_of_other_tokens_are_not_read(kernel_device: torch.device) -> None:
    """A chunk ends with its row: tokens beyond it may hold anything, so may the states of others."""
    inputs = StateSpaceInputs.random(80, (1, 2), device=kernel_device)
    rows = state_rows([66, 1], kernel_device)
    expected, _ = inputs.expected(rows)
    spoilt = inputs.fresh()
    for tensor in (spoilt.x, spoilt.dt, spoilt.b, spoilt.c):
        tensor[67:] = torch.nan
    spoilt.states[5:] = torch.nan
    out = state_space(**spoilt.arguments(), rows=rows, impl="triton")
    assert_close(out[:67], expected[:67], 5e-6)


@pytest.mark.parametrize("lens", [[40], [1]], ids=str)
def test_what_is_no_number_shows(lens: Sequence[int], kernel_device: torch.device) -> None:
    """Limits hide no NaN."""
    for impl in ("torch", "triton"):
        inputs = StateSpaceInputs.random(sum(lens), device=kernel_device)
        inputs.dt[-1, 1] = torch.nan
        out = state_space(**inputs.arguments(), rows=state_rows(lens, kernel_device), impl=impl)
        assert out[-1].isnan().any(-1).tolist() == [False, True, False, False]


# --- what is refused ---


def test_what_kernels_have_no_room_for_is_named(kernel_device: torch.device) -> None:
    rows = state_rows([1], kernel_device)
    inputs = StateSpaceInputs.random(1, (1, 1), (257, 16), device=kernel_device)
    with pytest.raises(ValueError, match="state_size is 257, but the kernels have room for 256"):
        state_space(**inputs.arguments(), rows=rows, impl="triton")
    inputs = StateSpaceInputs.random(1, (1, 1), dtype=torch.float64, device=kernel_device)
    with pytest.raises(ValueError, match=r"x must be in one of .*float32\], but is in torch.float64"):
        state_space(**inputs.arguments(), rows=rows, impl="triton")


def test_without_tokens_or_rows(kernel_device: torch.device) -> None:
    inputs = StateSpaceInputs.random(0, device=kernel_device)
    for lens in ((), (0, 0)):
        rows = state_rows(lens, kernel_device, num_extends=len(lens) // 2)
        before = inputs.fresh()
        assert state_space(**before.arguments(), rows=rows, impl="triton").shape == inputs.x.shape
        assert torch.equal(before.states[1:], inputs.states[1:])


def test_wrong_arguments_are_named() -> None:
    rows, inputs = state_rows([2, 1]), StateSpaceInputs.random(3)
    for changed, match in (
        ({"b": inputs.b[:2]}, r"b must be \[3, 2, 16\] in torch.float32, but is \[2, 2, 16\]"),
        ({"dt": inputs.dt.double()}, r"dt must be \[3, 4\] in torch.float32, but is \[3, 4\] in torch.float64"),
        ({"x": inputs.x[:, :3]}, r"3 heads are no multiple of 2 groups"),
        ({"c": inputs.c.transpose(1, 2)}, r"c must be \[T, heads, size\], elements of a head side by side"),
        ({"d": inputs.d[:2]}, r"d must be contiguous \[4\], but is \[2\]"),
        ({"states": inputs.states[:, :2]}, r"states must be \[num_states, 4, 16, 16\], each contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            state_space(**(inputs.arguments() | changed), rows=rows)
