"""Projections of weights in e4m3: kernels against their references, and these against what the numbers mean."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from triton_ops.activations.quantised_rows import SMALLEST_MAX, quantise_rows
from triton_ops.e4m3 import E4M3, E4M3_MAX, FIRST_CAPABILITY
from triton_ops.implementation import gpu_of
from triton_ops.linear.e4m3_linear import (
    dequantised_weight,
    e4m3_linear,
    quantised_weight,
    scaled_product,
    torch_scaled_product,
)

# The interpreter does not know bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(1, 64, 128), (3, 48, 80), (17, 200, 384), (130, 128, 256), (0, 64, 128)]  # M, N, K


@pytest.fixture(autouse=True)
def _has_e4m3(request: pytest.FixtureRequest) -> None:
    if "kernel_device" in request.fixturenames:
        device = request.getfixturevalue("kernel_device")
        if gpu_of(device).capability < FIRST_CAPABILITY:
            pytest.skip("this GPU has no products of e4m3")


def random(
    *shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> Tensor:
    """Rows and columns of many sizes."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cpu")
    values *= torch.randint(-3, 4, (*shape[:-1], 1), generator=generator, device="cpu").float().exp2()
    return values.to(device, dtype)


def error(result: Tensor, expected: Tensor) -> float:
    """Of the worst row."""
    return float(((result - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


# --- what the numbers mean ---


@pytest.mark.parametrize("blocks", [False, True])
def test_a_weight_is_rounded_to_four_bits(blocks: bool) -> None:
    """Half of a unit in the last of three bits of mantissa, or of what the smallest numbers have."""
    weight = random(300, 200)
    codes, scale = quantised_weight(weight, blocks=blocks)
    assert (codes.dtype, scale.dtype) == (E4M3, torch.float32)
    assert scale.shape == ((3, 2) if blocks else (300,))
    assert codes.float().abs().max() == E4M3_MAX
    back = dequantised_weight(codes, scale)
    largest = (
        scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200] if blocks else scale[:, None]
    )
    assert ((back - weight).abs() <= weight.abs() / 16 + largest * 2.0**-10).all()
    for row, column in ((0, 0), (299, 199), (127, 128)):
        factor = scale[row // 128, column // 128] if blocks else scale[row]
        assert back[row, column] == codes[row, column].float() * factor


def test_a_scale_is_the_largest_number_over_448() -> None:
    x = torch.tensor([[1.0, -896.0, 3.0], [0.0, 0.0, 0.0], [torch.inf, 4.48, torch.nan]])
    codes, scale = quantise_rows(x, groups=False)
    torch.testing.assert_close(scale, torch.tensor([[2.0], [SMALLEST_MAX / 448], [0.01]]), atol=0.0, rtol=1e-6)
    assert codes[0].float().tolist() == [0.5, -448.0, 1.5]
    assert codes[1].float().tolist() == [0.0, 0.0, 0.0]
    assert codes[2].float().isnan().tolist() == [True, False, True], "what is not finite is still found"


@pytest.mark.parametrize("blocks", [False, True])
def test_the_product_is_that_of_rounded_numbers(blocks: bool) -> None:
    """In float64; and it is near that of the numbers themselves."""
    x, weight, bias = random(5, 200), random(96, 200, seed=1), random(96, seed=2)
    codes, scale = quantised_weight(weight, blocks=blocks)
    x_codes, x_scale = quantise_rows(x, groups=blocks)
    rounded = x_codes.double() * (x_scale.repeat_interleave(128, 1)[:, :200] if blocks else x_scale)
    exact = rounded @ dequantised_weight(codes, scale).double().T + bias
    result = e4m3_linear(x, codes, scale, bias)
    torch.testing.assert_close(result.double(), exact, atol=1e-4, rtol=1e-5)
    assert 0.001 < error(result, x @ weight.T + bias) < 0.08


# --- the kernels ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), SHAPES)
def test_e4m3_linear(
    num_rows: int,
    num_columns: int,
    depth: int,
    blocks: bool,
    has_bias: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    x, bias = make(num_rows, depth) / depth**0.5, make(num_columns, seed=2) if has_bias else None
    weight, scale = quantised_weight(make(num_columns, depth, seed=1), blocks=blocks)
    result, expected = (e4m3_linear(x, weight, scale, bias, impl=impl) for impl in ("triton", "torch"))
    assert (result.shape, result.dtype) == ((num_rows, num_columns), dtype)
    if num_rows:
        # A tensor core keeps fewer bits of a sum than float32 has.
        limit = {torch.float32: 1e-3 if result.is_cuda else 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
        assert error(result.float(), expected.float()) < limit


def test_rows_are_apart(kernel_device: torch.device) -> None:
    """What is not finite in one row changes no other, in torch's product on a GPU neither."""
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    x = random(20, 256, dtype=dtype, device=kernel_device)
    for blocks in (False, True):
        weight, scale = quantised_weight(random(64, 256, device=kernel_device, seed=1), blocks=blocks)
        clean = e4m3_linear(x, weight, scale, impl="triton")
        spoilt = x.clone()
        spoilt[3, 100], spoilt[5, 7] = torch.nan, torch.inf
        result = e4m3_linear(spoilt, weight, scale, impl="triton")
        assert result[[3, 5]].isnan().all()
        others = [row for row in range(20) if row not in (3, 5)]
        assert torch.equal(result[others], clean[others])


def test_leading_dimensions_stay() -> None:
    weight, scale = quantised_weight(random(48, 64), blocks=False)
    x = random(2, 3, 64, seed=1)
    assert torch.equal(e4m3_linear(x, weight, scale), e4m3_linear(x.view(6, 64), weight, scale).view(2, 3, 48))


def test_what_disagrees_is_refused() -> None:
    x, (weight, scale) = random(3, 256), quantised_weight(random(200, 256), blocks=False)
    for given, message in (
        ((random(3, 128), weight, scale), r"weight must be contiguous \[N, 128\] in torch.float8_e4m3fn"),
        ((x, weight.float(), scale), r"but is \[200, 256\] in torch.float32"),
        ((x, weight, scale[:199]), r"scale must be contiguous float32 \[200\] or \[2, 2\], but is \[199\]"),
        ((x, weight, scale.double()), r"but is \[200\] in torch.float64"),
        ((x, weight, scale, random(199)), r"bias must be contiguous \[200\] in torch.float32, but is \[199\]"),
    ):
        with pytest.raises(ValueError, match=message):
            e4m3_linear(*given)


def test_torch_scaled_product_on_a_cpu() -> None:
    """How torch is called, where there is no GPU."""
    x, bias = random(5, 64), random(32, seed=2).bfloat16()
    weight, scale = quantised_weight(random(32, 64, seed=1), blocks=False)
    codes, x_scale = quantise_rows(x, groups=False)
    for given in (None, bias):
        try:
            result = torch_scaled_product(codes, x_scale, weight, scale, given, torch.bfloat16)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            pytest.skip(f"this torch has no scaled product on a CPU: {error}")
        expected = e4m3_linear(x, weight, scale, None if given is None else given.float())
        torch.testing.assert_close(result.float(), expected, atol=0.1, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 17, 64, 512, 2048])
@pytest.mark.parametrize(
    ("depth", "num_columns"), [(4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096), (1024, 1024)]
)
def test_shapes_of_models(depth: int, num_columns: int, num_rows: int) -> None:
    """Our product and torch's against float32 of the same numbers."""
    device = torch.device("cuda")
    if gpu_of(device).capability < FIRST_CAPABILITY:
        pytest.skip("this GPU has no products of e4m3")
    x = random(num_rows, depth, dtype=torch.bfloat16, device=device)
    wide = random(num_columns, depth, device=device, seed=1) / depth**0.5
    for blocks in (False, True):
        weight, scale = quantised_weight(wide, blocks=blocks)
        codes, x_scale = quantise_rows(x, groups=blocks, impl="triton")
        spread = x_scale.repeat_interleave(128, 1) if blocks else x_scale
        exact = (codes.float() * spread) @ dequantised_weight(weight, scale).T
        products = [scaled_product, torch_scaled_product] if gpu_of(device).has_wgmma else [scaled_product]
        for product in products:
            result = product(codes, x_scale, weight, scale, None, torch.bfloat16)
            assert error(result.float(), exact) < 0.01, product
