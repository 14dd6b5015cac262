"""The kernels of norms against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.elementwise_cases import KERNEL_DTYPES, KERNEL_TOLERANCE, assert_same
from tests.support.random_tensors import random
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.gelu_fast import gelu_fast
from triton_ops.activations.gelu_new import gelu_new
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.norms.layer_norm import add_layer_norm, layer_norm
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm, rms_norm_add

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, on purpose

NORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]] = {
    "rms": (rms_norm, add_rms_norm),
    "wide rms": (partial(rms_norm, offset=0.0), partial(add_rms_norm, offset=0.0)),
    "wide rms, 1 + w": (partial(rms_norm, offset=1.0), partial(add_rms_norm, offset=1.0)),
    "layer": (
        lambda x, w, eps, impl: layer_norm(x, w, None, eps, impl=impl),
        lambda x, r, w, eps, impl: add_layer_norm(x, r, w, None, eps, impl=impl),
    ),
    "layer, bias": (
        lambda x, w, eps, impl: layer_norm(x, w, w.flip(0), eps, impl=impl),
        lambda x, r, w, eps, impl: add_layer_norm(x, r, w, w.flip(0), eps, impl=impl),
    ),
}


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(
    "shape", [(3, 4096), (5, 896), (1, 100), (0, 64), (2, 3, 128), (130, 16), (2, 1), (2, 5376)]
)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device) -> None:
    norm, add_norm = NORMS[name]
    make = partial(random, dtype=dtype, device=kernel_device)
    x, residual, weight = make(*shape) * 3 + 0.5, make(*shape, seed=1), make(shape[-1], seed=2)
    before = x.clone()
    normed = norm(x, weight, 1e-5, impl="triton")
    assert (normed.dtype, normed.shape) == (dtype, x.shape)
    assert_same(normed, norm(x, weight, 1e-5, impl="torch"))
    normed, total = add_norm(x, residual, weight, 1e-5, impl="triton")
    expected, expected_total = add_norm(x, residual, weight, 1e-5, impl="torch")
    assert torch.equal(total, expected_total)
    assert_same(normed, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 4096), (5, 896), (1, 100), (0, 64), (130, 16)])
def test_norms_before_an_addition(
    shape: tuple[int, ...], offset: float, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    x, residual, before, weight = (
        make(*shape) * 3,
        make(*shape, seed=1),
        make(shape[1], seed=2),
        make(shape[1], seed=3),
    )
    arguments: dict[str, Any] = {"eps": 1e-5, "offset": offset}
    total = rms_norm_add(x, residual, before, **arguments, impl="triton")
    assert_same(total, rms_norm_add(x, residual, before, **arguments, impl="torch"))
    normed, same = add_rms_norm(x, residual, weight, before=before, **arguments, impl="triton")
    assert torch.equal(same, total)
    assert_same(normed, rms_norm(total, weight, **arguments, impl="torch"))
    expected, expected_total = add_rms_norm(x, residual, weight, before=before, **arguments, impl="torch")
    assert_same(total, expected_total)
    torch.testing.assert_close(
        normed, expected, atol=2 * KERNEL_TOLERANCE[dtype], rtol=2 * KERNEL_TOLERANCE[dtype]
    )


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("shape", [(3, 4096), (5, 896), (1, 100), (0, 64), (2, 3, 128), (1, 16), (2, 5376)])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_parts_are_added_as_their_rounded_sum(
    num_parts: int, shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    make = partial(random, device=kernel_device)
    parts = make(num_parts, *shape, dtype=torch.float32) * 3
    residual, weight = make(*shape, dtype=dtype, seed=1), make(shape[-1], dtype=dtype, seed=2)
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    for x in (parts, parts.transpose(0, 1).contiguous().transpose(0, 1)):
        for impl in ("triton", "torch"):
            normed, total = add_rms_norm(x, residual, weight, 1e-5, impl=impl)
            expected, expected_total = add_rms_norm(whole.to(dtype), residual, weight, 1e-5, impl=impl)
            assert (normed.dtype, normed.shape) == (dtype, shape)
            assert torch.equal(total, expected_total)
            assert_same(normed, expected)


def test_parts_are_float32_and_of_the_residuals_shape(kernel_device: torch.device) -> None:
    residual = random(4, 8, dtype=torch.float16, device=kernel_device)
    weight = torch.ones(8, dtype=torch.float16, device=kernel_device)
    parts = torch.ones(2, 4, 8, device=kernel_device)
    for wrong in (parts.half(), parts[:, :3], parts[:0], parts[None]):
        with pytest.raises(ValueError, match=r"parts must be \[P, 4, 8\] in torch.float32, but are \["):
            add_rms_norm(wrong, residual, weight, 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"weight must be contiguous \[8\] in torch.float16"):
        add_rms_norm(parts, residual, weight.float(), 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"residual must be \[2, 4, 8\]"):
        add_rms_norm(parts, residual.float(), weight.float(), 1e-5, offset=1.0, impl="triton")


@pytest.mark.parametrize("name", NORMS)
def test_norms_read_strided_rows(name: str, kernel_device: torch.device) -> None:
    """Columns of a packed projection, heads of one, and columns that are not side by side."""
    norm, add_norm = NORMS[name]
    packed = random(5, 6, 32, dtype=torch.float32, device=kernel_device)
    for x in (packed[:, 1:4].flatten(1), packed[:, 1:4], packed.transpose(1, 2), packed[::2, 0]):
        weight = random(x.shape[-1], dtype=torch.float32, device=kernel_device, seed=2)
        assert_same(norm(x, weight, 1e-5, impl="triton"), norm(x, weight, 1e-5, impl="torch"))
        normed, total = add_norm(x, x, weight, 1e-5, impl="triton")
        assert torch.equal(total, x + x)
        assert_same(normed, norm(x + x, weight, 1e-5, impl="torch"))


def test_rows_of_norms_are_apart(kernel_device: torch.device) -> None:
    x = random(40, 48, dtype=torch.float16, device=kernel_device)
    x[3], x[17, 5] = torch.nan, 60000.0
    weight = torch.ones(48, dtype=torch.float16, device=kernel_device)
    normed = rms_norm(x, weight, 1e-6, impl="triton")
    assert normed[3].isnan().all()
    assert normed.isfinite().all(1).sum() == 39
    assert_same(normed, rms_norm(x, weight, 1e-6, impl="torch"))


def test_norms_refuse_what_they_cannot_read(kernel_device: torch.device) -> None:
    x = random(4, 8, dtype=torch.float32, device=kernel_device)
    weight = torch.ones(8, device=kernel_device)
    for wrong in (weight[:7], weight.half(), weight.repeat(2)[::2]):
        with pytest.raises(ValueError, match=r"weight must be contiguous \[8\] in torch.float32"):
            rms_norm(x, wrong, 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"bias must be contiguous \[8\]"):
        layer_norm(x, weight, weight[:4], 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"residual must be \[4, 8\] in torch.float32, but is \[3, 8\]"):
        add_rms_norm(x, x[:3], weight, 1e-5, offset=1.0, impl="triton")
    with pytest.raises(
        ValueError, match=r"rows of 16385 elements of torch.float32 exceed .* limit of 65536 bytes"
    ):
        rms_norm(
            torch.ones(1, 16385, device=kernel_device), torch.ones(16385, device=kernel_device), 0.1, impl="triton"
        )
    with pytest.raises(ValueError, match='impl must be "auto", "torch" or "triton", but is \'cuda\''):
        rms_norm(x, weight, 1e-5, impl="cuda")  # type: ignore[arg-type]


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": partial(gelu_and_mul, approximate="none"),
    "gelu_and_mul, tanh": partial(gelu_and_mul, approximate="tanh"),
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "soft_cap": partial(soft_cap, cap=2.5),
}


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_rows_beyond_two_to_the_31_elements() -> None:
    device = torch.device("cuda")
    size = 8192
    x = torch.zeros(2**31 // size + 3, size, dtype=torch.bfloat16, device=device)
    x[-3:] = random(3, size, dtype=torch.bfloat16, device=device)
    weight = random(size, dtype=torch.bfloat16, device=device, seed=1)
    assert_same(rms_norm(x, weight, 1e-5, impl="triton")[-3:], rms_norm(x[-3:], weight, 1e-5, impl="torch"))
    for activation in ACTIVATIONS.values():
        out = activation(x, impl="triton")[-3:].clone()
        assert_same(out, activation(x[-3:], impl="torch"))
