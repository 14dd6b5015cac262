"""The kernels of activations and soft caps against torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from tests.support.elementwise_cases import KERNEL_DTYPES, assert_same
from tests.support.random_tensors import random
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.gelu_fast import gelu_fast
from triton_ops.activations.gelu_new import gelu_new
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.activations.squared_relu import squared_relu
from triton_ops.attention.soft_cap import soft_cap

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, on purpose

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "clamped_swiglu": clamped_swiglu,
    "gelu_and_mul": partial(gelu_and_mul, approximate="none"),
    "gelu_and_mul, tanh": partial(gelu_and_mul, approximate="tanh"),
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "soft_cap": partial(soft_cap, cap=2.5),
}
UNBOUNDED = {**ACTIVATIONS, "squared_relu": squared_relu}  # squares of half precision overflow


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("shape", [(3, 4096), (4, 2600), (1, 100), (0, 64), (2, 3, 24), (7, 2)])
@pytest.mark.parametrize("name", UNBOUNDED)
def test_activations(name: str, shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device) -> None:
    x = random(*shape, dtype=dtype, device=kernel_device) * 4
    before = x.clone()
    out, expected = (UNBOUNDED[name](x, impl=impl) for impl in ("triton", "torch"))
    assert (out.dtype, out.shape) == (dtype, expected.shape)
    assert_same(out, expected)
    assert torch.equal(x, before)


@pytest.mark.each_once
@pytest.mark.parametrize("name", UNBOUNDED)
def test_activations_read_strided_rows(name: str, kernel_device: torch.device) -> None:
    packed = random(5, 6, 32, dtype=torch.float32, device=kernel_device)
    for x in (packed[:, 1:4].flatten(1), packed[:, 1:4], packed.transpose(1, 2), packed[::2, 0]):
        assert_same(UNBOUNDED[name](x, impl="triton"), UNBOUNDED[name](x, impl="torch"))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_at_the_extremes(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Where exp overflows, and where x^3 does in half precision."""
    x = torch.tensor(
        [[0.0, 90.0, -90.0, 1e3, -1e3, 6e4, -6e4, 1.0] + [1.0] * 8], dtype=dtype, device=kernel_device
    )
    out = ACTIVATIONS[name](x, impl="triton")
    assert out.isfinite().all()
    torch.testing.assert_close(out, ACTIVATIONS[name](x, impl="torch"))


@pytest.mark.parametrize(("name", "kernel"), [("gelu_new", gelu_new), ("gelu_fast", gelu_fast)])
def test_activations_are_those_of_transformers(
    name: str, kernel: Callable[..., Tensor], kernel_device: torch.device
) -> None:
    x = torch.linspace(-12, 12, 3001, device=kernel_device)
    for impl in ("torch", "triton"):
        torch.testing.assert_close(kernel(x, impl=impl), ACT2FN[name](x), atol=1e-6, rtol=1e-6)


def test_gated_activations_are_those_of_transformers(kernel_device: torch.device) -> None:
    x = torch.linspace(-12, 12, 3000, device=kernel_device).view(2, -1)
    gate, up = x.chunk(2, dim=-1)
    for theirs, ours in (
        ("silu", "silu_and_mul"),
        ("gelu", "gelu_and_mul"),
        ("gelu_pytorch_tanh", "gelu_and_mul, tanh"),
    ):
        expected = ACT2FN[theirs](gate) * up
        torch.testing.assert_close(ACTIVATIONS[ours](x, impl="triton"), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_clamp_shows_nan(impl: Any, kernel_device: torch.device) -> None:
    x = torch.tensor([[torch.nan, 1.0, 9.0, 1.0, torch.nan, 9.0]], device=kernel_device)
    assert clamped_swiglu(x, impl=impl).isnan().tolist() == [[True, True, False]]


def test_gates_are_of_even_size(kernel_device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"gate \| up must be of even size, but is of 5"):
        silu_and_mul(torch.ones(2, 5, device=kernel_device), impl="triton")
