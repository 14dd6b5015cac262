"""Gated activations and soft caps against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.elementwise_cases import DTYPES, assert_matches
from tests.support.random_tensors import random
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.attention.soft_cap import soft_cap

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (1, 2), (0, 8)])
def test_silu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    assert_matches(silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype)


def test_silu_and_mul_at_the_extremes() -> None:
    x = torch.tensor([[100.0, -100.0, 0.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(silu_and_mul(x), torch.tensor([[200.0, 0.0, 0.0]]))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (1, 2), (0, 8)])
def test_clamped_swiglu(dtype: torch.dtype, shape: tuple[int, int], deterministic: bool) -> None:
    """Many elements are beyond the limit of 7, on both sides."""
    x = random(*shape, dtype=dtype) * 9
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    exact = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    assert_matches(clamped_swiglu(x, deterministic=deterministic), exact, dtype)


def test_clamped_swiglu_at_the_extremes() -> None:
    x = torch.tensor([[1e4, -1e4, 0.0, 7.0, 7.0, 7.0, 9.0, 9.0, -9.0, 9.0, -9.0, 7.0]])
    for deterministic in (False, True):
        out = clamped_swiglu(x, deterministic=deterministic)
        assert out[0, 1] == out[0, 2] == 0
        assert out[0, 0] == out[0, 3] > 0 > out[0, 4]
        assert out[0, 3] == out[0, 5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (1, 2), (0, 8)])
def test_gelu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
    assert_matches(gelu_and_mul(x, approximate="none"), exact * up, dtype)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    assert_matches(gelu_and_mul(x, approximate="tanh"), gate / 2 * (1 + torch.tanh(inner)) * up, dtype)


def test_the_two_kinds_of_gelu_differ() -> None:
    x = random(50, 2) * 2
    difference = gelu_and_mul(x, approximate="none") - gelu_and_mul(x, approximate="tanh")
    assert 1e-5 < difference.abs().max() < 1e-2


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul_at_the_extremes(approximate: Any) -> None:
    x = torch.tensor([[100.0, -100.0, 0.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(gelu_and_mul(x, approximate=approximate), torch.tensor([[200.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(dtype: torch.dtype) -> None:
    x = random(50, dtype=dtype) * 40
    assert_matches(soft_cap(x, 30.0, impl="torch"), 30 * torch.tanh(x.double() / 30), dtype)
    extreme = torch.tensor([1e4, -1e4, 6e4, 0.0], dtype=dtype)
    assert torch.equal(soft_cap(extreme, 30.0), torch.tensor([30.0, -30.0, 30.0, 0.0], dtype=dtype))
