"""Rows in e4m3, made from rows, by norms and by activations."""

from __future__ import annotations

import pytest
import torch

from tests.support.random_tensors import random
from triton_ops.activations.quantised_rows import QuantisedRows, quantise_rows
from triton_ops.activations.silu_and_mul import quantised_silu_and_mul, silu_and_mul
from triton_ops.e4m3 import E4M3, FIRST_CAPABILITY
from triton_ops.implementation import gpu_of
from triton_ops.linear.e4m3_linear import e4m3_linear, quantised_weight
from triton_ops.norms.rms_norm import add_rms_norm, quantised_rms_norm, rms_norm

# The interpreter does not know bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _has_e4m3(kernel_device: torch.device) -> None:
    if gpu_of(kernel_device).capability < FIRST_CAPABILITY:
        pytest.skip("this GPU has no e4m3")


def assert_same(rows: QuantisedRows, expected: QuantisedRows) -> None:
    """In the interpreter to the last bit. A GPU's kernels add up rows in an order of their own: numbers may
    fall to the other side, here and there.
    """
    assert (rows.dtype, rows.in_groups) == (expected.dtype, expected.in_groups)
    if rows.codes.device.type == "cpu":
        assert torch.equal(rows.scale, expected.scale)
        # NaN has two spellings.
        torch.testing.assert_close(rows.codes.float(), expected.codes.float(), atol=0.0, rtol=0.0, equal_nan=True)
        return
    torch.testing.assert_close(rows.scale, expected.scale, atol=0.0, rtol=2 * torch.finfo(rows.dtype).eps)
    ours, theirs = rows.codes.float(), expected.codes.float()
    torch.testing.assert_close(ours, theirs, atol=2.0**-9, rtol=0.126, equal_nan=True)  # of a neighbour at most
    differ = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    assert differ.sum() <= max(2, 0.02 * differ.numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(("num_rows", "depth"), [(1, 128), (5, 80), (3, 1000), (2, 17_000), (0, 128)])
def test_quantise_rows(
    num_rows: int, depth: int, groups: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """All bits are the reference's, of rows beyond a block, too."""
    x = random(num_rows, depth, dtype=dtype, device=kernel_device)
    x[:, depth - 2] = 1000.0  # the largest one, beyond the first block
    if num_rows > 1:
        x[1, 3], x[1, depth - 1] = torch.inf, torch.nan
        x[0] = 0.0
    (codes, scale), (expected, expected_scale) = (
        quantise_rows(x, groups=groups, impl=impl) for impl in ("triton", "torch")
    )
    assert torch.equal(scale, expected_scale)
    assert codes.dtype == expected.dtype == E4M3
    # NaN has two spellings.
    torch.testing.assert_close(codes.float(), expected.float(), atol=0.0, rtol=0.0, equal_nan=True)


@pytest.mark.parametrize("groups", [False, True])
def test_quantise_rows_that_lie_apart(groups: bool, kernel_device: torch.device) -> None:
    packed = random(6, 600, device=kernel_device)
    for x in (packed[:, 100:300], packed[::2], packed[:, ::3]):
        codes, scale = quantise_rows(x, groups=groups, impl="triton")
        expected, expected_scale = quantise_rows(x.clone(), groups=groups, impl="torch")
        assert torch.equal(codes.float(), expected.float())
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 128), (5, 80), (3, 1000), (9, 2048), (0, 128)])
def test_a_norm_that_quantises(
    num_rows: int, size: int, offset: float | None, groups: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """As the norm and its quantisation apart, with a residual, its parts, and without; NaN stays in its row."""
    x, residual = (random(num_rows, size, dtype=dtype, device=kernel_device, seed=seed) for seed in (1, 2))
    weight = random(size, dtype=dtype, device=kernel_device, seed=3)
    if num_rows > 1:
        x[1, 3] = torch.nan
        x[0], residual[0] = 0.0, 0.0
    same = {"offset": offset, "impl": "triton"}
    rows, total = quantised_rms_norm(x, None, weight, 1e-5, groups=groups, **same)  # type: ignore[arg-type]
    assert total is x
    apart = rms_norm(x, weight, 1e-5, **same)  # type: ignore[arg-type]
    assert_same(rows, QuantisedRows.of(apart, groups=groups, impl="triton"))
    given = [x] if offset is not None else [x, torch.stack([x.float(), x.float()])]
    for added in given:
        rows, total = quantised_rms_norm(added, residual, weight, 1e-5, groups=groups, **same)  # type: ignore[arg-type]
        apart, sums = add_rms_norm(added, residual, weight, 1e-5, **same)  # type: ignore[arg-type]
        torch.testing.assert_close(total, sums, atol=0.0, rtol=0.0, equal_nan=True)
        assert_same(rows, QuantisedRows.of(apart, groups=groups, impl="triton"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 128), (5, 80), (3, 1000), (2, 17_000), (0, 128)])
def test_an_activation_that_quantises(
    num_rows: int, size: int, groups: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x = random(num_rows, 2 * size, dtype=dtype, device=kernel_device)
    x[:, size - 2] = 100.0  # the largest one, beyond the first block
    if num_rows > 1:
        x[1, size + 3], x[0] = torch.nan, 0.0
    rows = quantised_silu_and_mul(x, groups=groups, impl="triton")
    assert_same(rows, QuantisedRows.of(silu_and_mul(x, impl="triton"), groups=groups, impl="triton"))


@pytest.mark.parametrize("groups", [False, True])
def test_products_of_what_is_quantised_already(groups: bool, kernel_device: torch.device) -> None:
    x, weight = random(5, 256, device=kernel_device), random(48, 256, device=kernel_device, seed=1)
    codes, scale = quantised_weight(weight, blocks=groups)
    rows = QuantisedRows.of(x, groups=groups, impl="triton")
    expected = e4m3_linear(x, codes, scale, impl="triton")
    assert torch.equal(e4m3_linear(rows, codes, scale, impl="triton"), expected)
    other = QuantisedRows.of(x, groups=not groups, impl="triton")
    with pytest.raises(ValueError, match="but the weight's scales are"):
        e4m3_linear(other, codes, scale)
