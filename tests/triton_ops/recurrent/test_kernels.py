"""The kernels of recurrent layers against float64, and against torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.elementwise_cases import KERNEL_DTYPES, assert_same
from tests.support.random_tensors import random
from tests.support.recurrent_cases import DeltaInputs, assert_close, expected_conv, state_rows
from triton_ops.recurrent.causal_conv import causal_conv
from triton_ops.recurrent.gated_delta import gated_delta
from triton_ops.recurrent.gated_rms_norm import gated_rms_norm, gated_squares
from triton_ops.recurrent.rows import StateRows

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, on purpose

# Of the greatest element. Steps round what they read out alone; in chunks, products round what they multiply.
DELTA_STEP = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DELTA_CHUNKS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check_delta(inputs: DeltaInputs, rows: StateRows, tolerance: float, state_tolerance: float) -> Tensor:
    """Outputs, and states: those that are left, and all others, which nobody touched. Returns the outputs."""
    expected, states = inputs.expected(rows)
    actual = inputs.fresh()
    out = gated_delta(**actual.arguments(), rows=rows, impl="triton")
    assert (out.dtype, out.shape) == (inputs.q.dtype, inputs.v.shape)
    assert_close(out, expected, tolerance)
    actual.check_states(inputs, states, rows, state_tolerance)
    return out


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("heads", "dims"), [((2, 4), (128, 128)), ((1, 3), (64, 64)), ((2, 2), (16, 16)), ((1, 2), (40, 72))]
)
def test_steps(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Rows of one token or none, none of them an extend."""
    rows = state_rows([1, 1, 0, 1, 0], kernel_device)
    inputs = DeltaInputs.random(3, heads, dims, dtype=dtype, device=kernel_device)
    check_delta(inputs, rows, DELTA_STEP[dtype], 5e-6)
    rounded = replace(inputs, states=inputs.states.half())
    check_delta(rounded, rows, DELTA_STEP[dtype], 6e-4)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("lens", "heads", "dims"),
    [
        ([130], (1, 2), (128, 128)),
        ([64, 1, 65], (1, 1), (64, 64)),
        ([0, 63, 0, 2, 1], (2, 2), (16, 16)),
        ([100, 5, 1, 0, 1], (2, 6), (40, 72)),
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
    inputs = DeltaInputs.random(sum(lens), heads, dims, dtype=dtype, device=kernel_device)
    for num_extends in {max(b for b in range(len(lens)) if lens[b] > 1) + 1, len(lens)}:
        rows = state_rows(lens, kernel_device, num_extends=num_extends)
        check_delta(inputs, rows, DELTA_CHUNKS[dtype], DELTA_CHUNKS[dtype])


def test_more_extends_than_are_looked_up_at_a_time(kernel_device: torch.device) -> None:
    """Each program looks for its chunk among all rows, 128 at a time."""
    lens = [0] * 126 + [2, 70, 0, 3, 2, 1]
    numbers = [b - 125 if length else 0 for b, length in enumerate(lens)]
    rows = state_rows(lens, kernel_device, read_from=numbers, write_to=numbers)
    inputs = DeltaInputs.random(sum(lens), (1, 1), (16, 16), device=kernel_device)
    check_delta(inputs, rows, 5e-6, 5e-6)
    x, weight, states = random(78, 24), random(24, 4, seed=1), random(12, 24, 3, seed=2)
    check_conv(x.to(kernel_device), weight.to(kernel_device), None, states.to(kernel_device), rows)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_tokens_that_lie_apart(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Rows in another order than their tokens, with tokens between that are nobody's; states in any order."""
    ints = [[66, 3, 70, 0], [5, 63, 1, 0], [3, 0, 7, 2], [3, 6, 0, 5]]
    rows = StateRows(*(torch.tensor(x, dtype=torch.int32, device=kernel_device) for x in ints), num_extends=2)
    inputs = DeltaInputs.random(73, (1, 2), dtype=dtype, device=kernel_device)
    rows = replace(rows, start_loc=rows.start_loc + torch.tensor([0, 0, 2, 0], device=kernel_device).int())
    expected, states = inputs.expected(rows)
    actual = inputs.fresh()
    out = gated_delta(**actual.arguments(), rows=rows, impl="triton")
    for start, length, _, ends in rows.tolist():
        of = slice(start, start + length)
        assert_close(out[of], expected[of], DELTA_CHUNKS[dtype])
        if ends and length:
            assert_close(actual.states[[ends]], states[[ends]], DELTA_CHUNKS[dtype])
    for untouched in (1, 2, 4, 5, 7):
        assert torch.equal(actual.states[untouched], inputs.states[untouched])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_state_0_is_zeros_and_is_not_kept(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """It is NaN in the pool."""
    rows = state_rows([3, 2, 1, 1], kernel_device, read_from=[0, 3, 0, 4], write_to=[2, 0, 1, 0])
    inputs = DeltaInputs.random(7, (1, 2), dtype=dtype, device=kernel_device)
    check_delta(inputs, rows, DELTA_CHUNKS[dtype], DELTA_CHUNKS[dtype])
    x, weight, states = random(7, 24), random(24, 4, seed=1), random(5, 24, 3, seed=2)
    states[0] = torch.nan
    check_conv(*(t.to(kernel_device, dtype) for t in (x, weight)), None, states.to(kernel_device, dtype), rows)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_states_are_left_where_they_were_read(dtype: torch.dtype, kernel_device: torch.device) -> None:
    lens = [70, 2, 1]
    rows = state_rows(lens, kernel_device, read_from=[3, 1, 4], write_to=[3, 1, 4])
    inputs = DeltaInputs.random(73, (1, 2), dtype=dtype, device=kernel_device)
    check_delta(inputs, rows, DELTA_CHUNKS[dtype], DELTA_CHUNKS[dtype])
    x, weight, states = random(73, 24), random(24, 4, seed=1), random(5, 24, 3, seed=2)
    check_conv(*(t.to(kernel_device, dtype) for t in (x, weight)), None, states.to(kernel_device, dtype), rows)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("cut", [1, 37, 64, 99])
def test_a_row_cut_in_two_goes_on(cut: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    length = 100
    # A head forgets nearly all at each token: sums of its log decays reach hundreds in a chunk, and are rounded.
    tolerance = max(5e-5, DELTA_CHUNKS[dtype])
    inputs = DeltaInputs.random(length, (1, 2), (32, 32), dtype=dtype, device=kernel_device)
    expected, states = inputs.expected(state_rows([length], kernel_device))
    x, weight = (t.to(kernel_device, dtype) for t in (random(length, 40), random(40, 4, seed=1)))
    kept = random(6, 40, 3, seed=2).to(kernel_device, dtype)
    whole = kept.clone()
    convolved = causal_conv(x, weight, None, whole, state_rows([length], kernel_device), impl="triton")
    halves = inputs.fresh()
    for of, begins, ends in ((slice(cut), 1, 5), (slice(cut, length), 5, 2)):
        tokens = of.stop - (of.start or 0)
        rows = state_rows([tokens], kernel_device, read_from=[begins], write_to=[ends])
        out = gated_delta(**halves.rows(of).arguments(), rows=rows, impl="triton")
        assert_close(out, expected[of], tolerance)
        assert torch.equal(causal_conv(x[of], weight, None, kept, rows, impl="triton"), convolved[of])
    assert_close(halves.states[[2]], states[[2]], tolerance)
    assert torch.equal(kept[2], whole[2])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_alike_keys_do_not_blow_up(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """All keys the same, everything learnt, no decay: the worst of the triangular systems."""
    inputs = DeltaInputs.random(128, (1, 2), dtype=dtype, device=kernel_device)
    same = inputs.k[:1].expand_as(inputs.k)
    inputs = replace(inputs, k=same, b=torch.full_like(inputs.b, 30.0), a=torch.full_like(inputs.a, -30.0))
    tolerance = 2 * DELTA_CHUNKS[dtype]
    check_delta(inputs, state_rows([128], kernel_device), tolerance, tolerance)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_extreme_gates_and_keys(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Tokens that forget everything, keys of zeros and large ones; the last value is learnt by no key at all."""
    inputs = DeltaInputs.random(80, (1, 4), dtype=dtype, device=kernel_device)
    a, b, k, v = inputs.a.clone(), inputs.b.clone(), inputs.k.clone(), inputs.v.clone()
    a[::7] = 90.0
    k[3], k[40], k[78] = 0.0, 100.0, 0.0
    v[78], b[78] = 200.0, 10.0
    inputs = replace(inputs, a=a, b=b, k=k, v=v)
    # Sums of log decays reach thousands, and are rounded: so are the small ones between large ones.
    tolerance = max(2e-4, DELTA_CHUNKS[dtype])
    for lens in ([80], [79, 1]):
        check_delta(inputs, state_rows(lens, kernel_device), tolerance, tolerance)


def test_slow_decays_add_up(kernel_device: torch.device) -> None:
    """What a softplus rounds away shows after many tokens: here each decays by 3e-8 to 1e-3."""
    inputs = DeltaInputs.random(64, (1, 4), device=kernel_device)
    a = torch.tensor([-18.0, -12.0, -6.0, -4.0], device=kernel_device)
    inputs = replace(inputs, a=a.expand(64, 4), a_log=a * 0 + 1, dt_bias=a * 0, b=torch.full_like(inputs.b, -60.0))
    expected, _ = inputs.expected(state_rows([64], kernel_device))
    check_delta(inputs, state_rows([64], kernel_device), 5e-6, 5e-6)
    assert expected.isfinite().all()


def test_values_of_other_tokens_are_not_read(kernel_device: torch.device) -> None:
    """A chunk ends with its row: tokens beyond it may hold anything, so may the states of others."""
    inputs = DeltaInputs.random(80, (1, 2), device=kernel_device)
    rows = state_rows([66, 1], kernel_device)
    expected, _ = inputs.expected(rows)
    spoilt = inputs.fresh()
    for tensor in (spoilt.q, spoilt.k, spoilt.v, spoilt.a, spoilt.b):
        tensor[67:] = torch.nan
    spoilt.states[5:] = torch.nan
    out = gated_delta(**spoilt.arguments(), rows=rows, impl="triton")
    assert_close(out[:67], expected[:67], 5e-6)
    x = random(80, 24).to(kernel_device)
    weight, states = random(24, 4, seed=1).to(kernel_device), random(5, 24, 3).to(kernel_device)
    expected, _ = expected_conv(x, weight, None, states, rows)
    x[67:] = torch.nan
    out = causal_conv(x, weight, None, states, rows, impl="triton")
    torch.testing.assert_close(out[:67].double(), expected[:67], atol=2e-6, rtol=2e-6)


def check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    rows: StateRows,
    gates: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Outputs but for a rounding, and states exactly."""
    before, others = states.clone(), states.clone()
    out = causal_conv(x, weight, bias, states, rows, gates=gates, impl="triton")
    assert_same(out, causal_conv(x, weight, bias, others, rows, gates=gates, impl="torch"))
    assert torch.equal(states.nan_to_num(), others.nan_to_num())
    _, left = expected_conv(x, weight, bias, before, rows, gates)
    assert torch.equal(states[1:].double(), left[1:])


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("width", "has_bias"), [(4, False), (4, True), (2, False), (3, True), (7, False)])
@pytest.mark.parametrize("lens", [(1, 0, 1), (40, 2, 1, 0, 3), (16, 17, 15), (0,), ()])
def test_causal_conv(
    lens: Sequence[int], width: int, has_bias: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Of columns of a projection, more than a program has."""
    rows = state_rows(lens, kernel_device)
    x = random(sum(lens), 300, dtype=dtype, device=kernel_device)[:, 3:290]
    weight = random(287, width, dtype=dtype, device=kernel_device, seed=1)
    bias = random(287, dtype=dtype, device=kernel_device, seed=2) if has_bias else None
    states = random(12, 287, width - 1, dtype=dtype, device=kernel_device, seed=3)
    check_conv(x, weight, bias, states, rows)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("width", "has_bias"), [(3, False), (4, True), (2, False)])
@pytest.mark.parametrize("lens", [(1, 0, 1), (40, 2, 1, 0, 3), (16, 17, 15), (0,)])
def test_gated_causal_conv(
    lens: Sequence[int], width: int, has_bias: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Gates and inputs are columns of one projection, or not."""
    rows = state_rows(lens, kernel_device)
    before, after, x, _ = random(sum(lens), 870, dtype=dtype, device=kernel_device).split([287, 287, 287, 9], 1)
    weight = random(287, width, dtype=dtype, device=kernel_device, seed=1)
    bias = random(287, dtype=dtype, device=kernel_device, seed=2) if has_bias else None
    states = random(12, 287, width - 1, dtype=dtype, device=kernel_device, seed=3)
    check_conv(x, weight, bias, states.clone(), rows, (before, after))
    check_conv(x.contiguous(), weight, bias, states, rows, (before, torch.cat([after, x], 1)[:, :287]))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 128), (40, 3, 64), (2, 1, 3100), (0, 4, 128)])
def test_gated_rms_norm(shape: tuple[int, int, int], dtype: torch.dtype, kernel_device: torch.device) -> None:
    """The gate is columns of a projection, x a part of each head."""
    num_tokens, num_heads, size = shape
    x = (random(num_tokens, num_heads, size + 8, dtype=dtype, device=kernel_device) * 3)[..., :size]
    weight = random(size, dtype=dtype, seed=2)
    packed = random(num_tokens, num_heads * size + 24, dtype=dtype, device=kernel_device, seed=1)
    gate, weight = packed[:, 8:-16].unflatten(1, (num_heads, size)), weight.to(kernel_device)
    own_weights = random(num_heads * size, dtype=dtype, device=kernel_device, seed=3)
    for given in (weight, own_weights):
        for gate_first in (False, True):
            norm = partial(gated_rms_norm, weight=given, eps=1e-6, gate_first=gate_first)
            out = norm(x, gate, impl="triton")
            assert out.is_contiguous()
            assert_same(out, norm(x, gate, impl="torch"))
            assert_same(norm(gate, x, impl="triton"), norm(gate, x, impl="torch"))
    squares = gated_squares(x, gate, 2 * size, impl="triton")
    torch.testing.assert_close(squares, gated_squares(x, gate, 2 * size, impl="torch"), atol=1e-6, rtol=1e-5)
    mean = torch.stack([squares, -squares], 2)[..., 0]  # other strides than the kernel's own
    norm = partial(gated_rms_norm, x, gate, weight, 1e-6, gate_first=True, mean=mean)
    assert_same(norm(impl="triton"), norm(impl="torch"))


def test_what_kernels_have_no_room_for_is_named(kernel_device: torch.device) -> None:
    rows = state_rows([1], kernel_device)
    inputs = DeltaInputs.random(1, (1, 1), (144, 16), device=kernel_device)
    with pytest.raises(ValueError, match="k_dim is 144, but the kernels have room for 128"):
        gated_delta(**inputs.arguments(), rows=rows, impl="triton")
    inputs = DeltaInputs.random(1, (1, 1), dtype=torch.float64, device=kernel_device)
    with pytest.raises(ValueError, match=r"q must be in one of .*float32\], but is in torch.float64"):
        gated_delta(**inputs.arguments(), rows=rows, impl="triton")


def test_without_tokens_or_rows(kernel_device: torch.device) -> None:
    inputs = DeltaInputs.random(0, device=kernel_device)
    for lens in ((), (0, 0)):
        rows = state_rows(lens, kernel_device, num_extends=len(lens) // 2)
        before = inputs.fresh()
        assert gated_delta(**before.arguments(), rows=rows, impl="triton").shape == inputs.v.shape
        assert torch.equal(before.states[1:], inputs.states[1:])
