"""Recurrent operations in torch, against float64 and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tests.support.elementwise_cases import DTYPES, assert_matches
from tests.support.random_tensors import random
from tests.support.recurrent_cases import DeltaInputs, expected_conv, state_rows
from tests.support.row_bits import ROWS, differing_counts, threads
from triton_ops.recurrent.causal_conv import causal_conv
from triton_ops.recurrent.gated_delta import gated_delta, gated_delta_reference
from triton_ops.recurrent.gated_rms_norm import gated_rms_norm, gated_squares

LENS = [(1, 1, 1), (5, 0, 1), (2, 1), (64, 1, 0, 1), (130, 3, 200), (63, 65), (0,), ()]


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 5)])
def test_gated_delta(lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    """Rows of one token, and of several in chunks, are what the rule says token by token."""
    rows = state_rows(lens)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        inputs = DeltaInputs.random(sum(lens), heads, (16, 24), dtype=dtype)
        out, states = inputs.expected(rows)
        actual = inputs.fresh()
        result = gated_delta(**actual.arguments(), rows=rows)
        assert (result.dtype, result.shape) == (dtype, inputs.v.shape)
        torch.testing.assert_close(result.double(), out, atol=tolerance, rtol=tolerance)
        assert_states(actual.states, states, inputs.states, rows.write_to[rows.lens > 0], tolerance)


def assert_states(actual: Tensor, expected: Tensor, before: Tensor, written: Tensor, tolerance: float) -> None:
    """Those that are left are as expected; all others are as they were."""
    left = torch.zeros(len(actual), dtype=torch.bool)
    left[written.long()] = True
    left[0] = False
    torch.testing.assert_close(actual[left].double(), expected[left].double(), atol=tolerance, rtol=tolerance)
    assert torch.equal(actual[~left].nan_to_num(), before[~left].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_delta_in_half_precision(dtype: torch.dtype) -> None:
    """Everything but inputs and outputs is float32."""
    rows = state_rows((70, 1))
    inputs = DeltaInputs.random(71, dtype=dtype)
    out, states = inputs.expected(rows)
    actual = inputs.fresh()
    assert_matches(gated_delta(**actual.arguments(), rows=rows), out, dtype)
    assert_states(actual.states, states, inputs.states, rows.write_to, 1e-5)
    rough = DeltaInputs.random(71, dtype=dtype, state_dtype=torch.bfloat16)
    out, states = rough.expected(rows)
    assert_matches(gated_delta(**rough.arguments(), rows=rows), out, dtype)
    assert_states(rough.states, states, rough.states, rows.write_to, 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 150])
def test_gated_delta_is_that_of_transformers(dtype: torch.dtype, length: int) -> None:
    """Also of keys and queries so small that they are not of length 1."""
    inputs = DeltaInputs.random(length, dtype=dtype)
    inputs.k[::5] *= 1e-3
    inputs.q[::3] *= 1e-3
    beta = inputs.b.sigmoid()
    g = -inputs.a_log.float().exp() * softplus(inputs.a.float() + inputs.dt_bias)
    q, k = (x.repeat_interleave(2, dim=1)[None] for x in (inputs.q, inputs.k))
    for rule in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        expected, left = rule(
            q,
            k,
            inputs.v[None],
            g=g[None],
            beta=beta[None],
            initial_state=inputs.states[3:4],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        actual = inputs.fresh()
        rows = state_rows([length], read_from=[3], write_to=[3])
        out = gated_delta(**actual.arguments(), rows=rows)
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(out, expected[0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(actual.states[3:4], left, atol=1e-5, rtol=1e-5)


def test_tokens_that_forget_everything() -> None:
    """Sums of log decays reach thousands, and are rounded: so are the small ones between large ones."""
    inputs = DeltaInputs.random(80)
    inputs.a[3::7] = 90.0
    rows = state_rows([79, 1])
    out, states = inputs.expected(rows)
    actual = inputs.fresh()
    torch.testing.assert_close(gated_delta(**actual.arguments(), rows=rows).double(), out, atol=2e-4, rtol=2e-4)
    assert_states(actual.states, states, inputs.states, rows.write_to, 2e-4)


def test_alike_keys_do_not_blow_up() -> None:
    """All keys the same, everything learnt, no decay: the worst of the triangular systems."""
    inputs = DeltaInputs.random(256)
    same = inputs.k[:1].expand_as(inputs.k)
    inputs = replace(inputs, k=same, b=torch.full_like(inputs.b, 30.0), a=torch.full_like(inputs.a, -30.0))
    rows = state_rows([256])
    out, states = inputs.expected(rows)
    actual = inputs.fresh()
    torch.testing.assert_close(gated_delta(**actual.arguments(), rows=rows).double(), out, atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(actual.states[2].double(), states[2], atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("cut", [1, 37, 64, 99])
def test_a_row_cut_in_two_goes_on(cut: int) -> None:
    length, weight = 100, random(40, 4, seed=1)
    inputs = DeltaInputs.random(length)
    whole = inputs.fresh()
    out = gated_delta(**whole.arguments(), rows=state_rows([length]))
    halves = inputs.fresh()
    first = gated_delta(**halves.rows(slice(cut)).arguments(), rows=state_rows([cut], read_from=[1], write_to=[5]))
    second = gated_delta(
        **halves.rows(slice(cut, None)).arguments(), rows=state_rows([length - cut], read_from=[5], write_to=[2])
    )
    torch.testing.assert_close(torch.cat([first, second]), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(halves.states[2], whole.states[2], atol=1e-5, rtol=1e-5)

    x, states = random(length, 40), random(6, 40, 3, seed=2)
    others = states.clone()
    out = causal_conv(x, weight, None, states, state_rows([length]))
    first = causal_conv(x[:cut], weight, None, others, state_rows([cut], read_from=[1], write_to=[5]))
    second = causal_conv(x[cut:], weight, None, others, state_rows([length - cut], read_from=[5], write_to=[2]))
    assert torch.equal(torch.cat([first, second]), out)
    assert torch.equal(others[2], states[2])


def test_state_0_is_zeros_and_is_not_kept() -> None:
    rows = state_rows([3, 1, 1], read_from=[0, 0, 4], write_to=[2, 0, 0])
    inputs = DeltaInputs.random(5)
    out, states = inputs.expected(rows)
    actual = inputs.fresh()
    torch.testing.assert_close(gated_delta(**actual.arguments(), rows=rows).double(), out, atol=1e-5, rtol=1e-5)
    assert_states(actual.states, states, inputs.states, rows.write_to[:1], 1e-5)
    states = random(5, 8, 3, seed=2)
    states[0] = torch.nan
    before = states.clone()
    given = random(5, 8), random(8, 4, seed=1), None
    out, left = expected_conv(*given, states, rows)
    torch.testing.assert_close(causal_conv(*given, states, rows).double(), out, atol=1e-5, rtol=1e-5)
    assert_states(states, left, before, rows.write_to[:1], 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("width", "has_bias"), [(4, False), (4, True), (2, False), (7, True)])
def test_causal_conv(lens: tuple[int, ...], width: int, has_bias: bool, gated: bool, dtype: torch.dtype) -> None:
    rows = state_rows(lens)
    x, *gates = random(sum(lens), 103, dtype=dtype)[:, 4:].split(33, 1)
    given = (gates[0], gates[1]) if gated else None
    weight, bias = random(33, width, dtype=dtype, seed=1), random(33, dtype=dtype, seed=2) if has_bias else None
    states = random(12, 33, width - 1, dtype=dtype, seed=3)
    before = states.clone()
    out, left = expected_conv(x, weight, bias, states, rows, given)
    assert_matches(causal_conv(x, weight, bias, states, rows, gates=given), out, dtype)
    assert_states(states, left, before, rows.write_to[rows.lens > 0], 0.0)


def test_causal_conv_is_that_of_transformers() -> None:
    x, weight, bias = random(50, 24), random(24, 4, seed=1), random(24, seed=2)
    expected = causal_conv1d_fn(x.T[None], weight, bias, "silu")[0].T
    rows = state_rows([50], read_from=[0], write_to=[1])
    out = causal_conv(x, weight, bias, torch.zeros(2, 24, 3), rows)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    gates = random(50, 24, seed=3), random(50, 24, seed=4)
    expected = gates[1] * causal_conv1d_fn((gates[0] * x).T[None], weight, bias)[0].T
    out = causal_conv(x, weight, bias, torch.zeros(2, 24, 3), rows, gates=gates)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    """From columns of a packed projection; bit by bit that of transformers, but for silu's last places."""
    reference = Qwen3NextRMSNormGated(16, eps=1e-6).to(dtype)
    reference.weight.data.copy_(random(16, seed=2))
    weight = reference.weight.data
    x, gate = random(9, 4, 16, dtype=dtype), random(9, 100, dtype=dtype, seed=1)[:, 20:84].unflatten(1, (4, 16))
    out = gated_rms_norm(x, gate, weight, 1e-6)
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = reference(x, gate)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 8e-3)
    assert (out == expected).float().mean() > (0.5 if dtype == torch.float32 else 0.99)
    assert gated_rms_norm(x[:0], gate[:0], weight, 1e-6).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 4])
def test_gated_rms_norm_whose_gate_is_first(groups: int, dtype: torch.dtype) -> None:
    """Of groups with weights of their own."""
    reference = Zamba2RMSNormGated(64, 64 // groups, eps=1e-6).to(dtype)
    reference.weight.data.copy_(random(64, seed=2))
    x, gate = random(9, 64, dtype=dtype), random(9, 100, dtype=dtype, seed=1)[:, 20:84]
    parts = (each.unflatten(1, (groups, -1)) for each in (x, gate))
    out = gated_rms_norm(*parts, reference.weight.data, 1e-6, gate_first=True)
    assert out.dtype == dtype
    expected = reference(x, gate)
    torch.testing.assert_close(out.flatten(1), expected, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_heads_in_parts(dtype: torch.dtype) -> None:
    """By the means of squares of all parts together."""
    x, gate = random(9, 2, 64, dtype=dtype) * 3, random(9, 2, 64, dtype=dtype, seed=1)
    weight = random(128, dtype=dtype, seed=2)
    halves = [slice(0, 32), slice(32, 64)]
    mean = sum(gated_squares(x[..., half], gate[..., half], 64) for half in halves)
    assert isinstance(mean, Tensor)
    assert (mean.dtype, mean.shape) == (torch.float32, (9, 2))
    norm = partial(gated_rms_norm, eps=0.1, gate_first=True, mean=mean)
    factors = weight.view(2, 64)
    found = [norm(x[..., h], gate[..., h], factors[:, h].reshape(-1)) for h in halves]
    expected = gated_rms_norm(x, gate, weight, 0.1, gate_first=True)
    torch.testing.assert_close(
        torch.cat(found, 2), expected, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6
    )


def delta_bits(dtype: torch.dtype) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Rows of one token each, with their states."""
    inputs = DeltaInputs.random(ROWS, (1, 2), (8, 24), num_states=ROWS, dtype=dtype)
    states = inputs.states.nan_to_num()

    def op(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        pool = torch.cat([torch.zeros_like(states[:1]), states])
        numbers = range(1, len(q) + 1)
        rows = state_rows([1] * len(q), read_from=numbers, write_to=numbers)
        return gated_delta(q, k, v, a, b, inputs.a_log, inputs.dt_bias, pool, rows), pool[1:]

    return op, (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, states)


def conv_bits(dtype: torch.dtype) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    make = partial(random, dtype=dtype)
    weight, bias = make(33, 4, seed=1), make(33, seed=2)

    def op(x: Tensor, before: Tensor, after: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        pool = torch.cat([torch.zeros_like(states[:1]), states])
        numbers, other = range(1, len(x) + 1), pool.clone()
        rows = state_rows([1] * len(x), read_from=numbers, write_to=numbers)
        gated = causal_conv(x, weight, bias, other, rows, gates=(before, after))
        return causal_conv(x, weight, bias, pool, rows), pool[1:], gated, other[1:]

    return op, (*(make(ROWS, 33, seed=seed) for seed in (3, 5, 6)), make(ROWS, 33, 3, seed=4))


def norm_bits(dtype: torch.dtype, *, gate_first: bool = False) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    make = partial(random, dtype=dtype)
    norm = partial(gated_rms_norm, weight=make(24), eps=1e-6, gate_first=gate_first)
    return norm, (make(ROWS, 3, 24, seed=1), make(ROWS, 3, 24, seed=2))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [delta_bits, conv_bits, norm_bits, partial(norm_bits, gate_first=True)])
def test_bits_of_a_row(
    case: Callable[..., tuple[Callable[..., Tensor], tuple[Tensor, ...]]], dtype: torch.dtype
) -> None:
    """They do not depend on the rows beside it."""
    op, inputs = case(dtype)
    for count in (1, 2):
        with threads(count):
            assert not differing_counts(op, *inputs)


def test_bits_of_a_long_row() -> None:
    inputs = DeltaInputs.random(120)
    lens = (50, 1, 69)
    together, alone = inputs.fresh(), inputs.fresh()
    out = gated_delta(**together.arguments(), rows=state_rows(lens))
    for b, (start, length) in enumerate([(0, 50), (50, 1), (51, 69)]):
        of = slice(start, start + length)
        rows = state_rows([length], read_from=[2 * b + 1], write_to=[2 * b + 2])
        assert torch.equal(gated_delta(**alone.rows(of).arguments(), rows=rows), out[of])
    assert torch.equal(together.states[1:], alone.states[1:])


def test_a_step_of_the_reference() -> None:
    """By hand: an empty state that decays by half learns half of a value, and reads it back."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    a_log = torch.tensor([0.0], dtype=torch.float64)  # softplus(0) = log 2
    state = torch.full((1, 1, 1), 4.0, dtype=torch.float64)
    out, left = gated_delta_reference(one, one, 3.0 * one, zero, zero, a_log, zero[0], state)
    torch.testing.assert_close(left, torch.full_like(left, 2.0 + 0.5 * (3.0 - 2.0)), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(out, left, atol=1e-5, rtol=0.0)


def test_wrong_arguments_are_named() -> None:
    rows = state_rows([2, 1])
    inputs = DeltaInputs.random(3)
    for changed, match in (
        ({"k": inputs.k[:2]}, r"k must be \[3, 2, 16\] in torch.float32, but is \[2, 2, 16\]"),
        ({"a": inputs.a.double()}, r"a must be \[3, 4\] in torch.float32, but is \[3, 4\] in torch.float64"),
        ({"v": inputs.v[:, :3]}, r"3 value heads are no multiple of 2 key heads"),
        ({"q": inputs.q.transpose(1, 2)}, r"q must be \[T, heads, size\], elements of a head side by side"),
        ({"a_log": inputs.a_log[:2]}, r"a_log must be contiguous \[4\], but is \[2\]"),
        ({"states": inputs.states[:, :2]}, r"states must be \[num_states, 4, 16, 16\], each contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            gated_delta(**(inputs.arguments() | changed), rows=rows)
    x, weight, states = random(3, 8), random(8, 4), torch.zeros(7, 8, 3)
    for given, match in (
        ((x.T, weight, None, states), r"x must be \[T, C\], rows contiguous"),
        ((x, weight[:7], None, states), r"weight must be contiguous \[8, W\]"),
        ((x, weight, weight[0], states), r"bias must be \[8\] in torch.float32, but is \[4\]"),
        ((x, weight, None, states.half()), r"states must be \[7, 8, 3\] in torch.float32, but is .*float16"),
    ):
        with pytest.raises(ValueError, match=match):
            causal_conv(*given, rows)
    for gates, match in (
        ((x, x[:2]), r"after must be \[3, 8\] in torch.float32, but is \[2, 8\]"),
        ((x.repeat(1, 2)[:, ::2], x), r"before must be \[T, C\], rows contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            causal_conv(x, weight, None, states, rows, gates=gates)
    heads = random(3, 2, 8)
    with pytest.raises(ValueError, match=r"gate must be \[3, 2, 8\] in torch.float32"):
        gated_rms_norm(heads, heads[:2], weight[:, 0].contiguous(), 1e-6)
    with pytest.raises(ValueError, match=r"gate must be \[3, 2, 8\] in torch.float32"):
        gated_squares(heads, heads[:2], 8)
    with pytest.raises(ValueError, match=r"weight must be contiguous \[8\]"):
        gated_rms_norm(heads, heads, weight[0], 1e-6)
    for mean, gate_first in ((heads[0], True), (heads[..., 0].half(), True), (heads[..., 0], False)):
        with pytest.raises(ValueError, match=r"mean must be \[3, 2\] in torch.float32, with gate_first, but is "):
            gated_rms_norm(heads, heads, weight[:, 0].contiguous(), 1e-6, mean=mean, gate_first=gate_first)
    with pytest.raises(ValueError, match=r"read_from must be contiguous \[B\] in torch.int32"):
        replace(rows, read_from=rows.read_from.long())
    with pytest.raises(ValueError, match=r"write_to has 1 rows, but lens has 2"):
        replace(rows, write_to=rows.write_to[:1])
    with pytest.raises(ValueError, match=r"num_extends must be from 0 to the 2 rows, but is 3"):
        replace(rows, num_extends=3)
    with pytest.raises(ValueError, match=r"row 0 has 2 tokens, but only the first 0 are extends"):
        gated_delta(**inputs.arguments(), rows=replace(rows, num_extends=0))
