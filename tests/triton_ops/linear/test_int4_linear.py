"""Products with weights of 4 bits: the kernel against its reference, and that against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.linear import int4_linear as int4_linear_module
from triton_ops.linear.int4_linear import GROUP, dequantized_int4, int4_linear, pack_int4, unpack_int4

# The interpreter does not know bfloat16.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def weight(
    num_columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed values, scales and zeros, all of them at random."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randint(0, 16, (num_columns, depth), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_columns, depth // GROUP, generator=generator).add(0.5) / depth**0.5 / 4
    zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8)
    return pack_int4(values).to(device), scales.to(device, dtype), zeros.to(device)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)


def test_packing_is_undone() -> None:
    values = torch.randint(0, 16, (3, 3 * GROUP), dtype=torch.uint8)
    packed = pack_int4(values)
    assert packed.shape == (3, 3 * GROUP // 2)
    assert torch.equal(unpack_int4(packed), values)
    assert packed[1, 64] == values[1, GROUP] | values[1, GROUP + 64] << 4


def test_a_weight_is_the_distance_from_zero_times_the_scale() -> None:
    values = torch.arange(2 * GROUP, dtype=torch.uint8).remainder(16).view(1, -1)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[8, 0]], dtype=torch.uint8)
    found = dequantized_int4(pack_int4(values), scales, zeros)
    first, second = values[0].float().split(GROUP)
    assert torch.equal(found[0], torch.cat([(first - 8) * 0.5, second * 2.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_columns", "depth"), [(1, 128), (32, 256), (77, 384)])
def test_the_kernel_dequantizes_to_the_same_bits(
    num_columns: int, depth: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    held = weight(num_columns, depth, dtype, kernel_device)
    found, expected = (dequantized_int4(*held, impl=impl) for impl in ("triton", "torch"))
    assert torch.equal(found, expected)


def test_many_rows_are_multiplied_by_the_dequantized_weight(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    held = weight(70, 128, torch.float16, kernel_device)
    x = random(9, 128, dtype=torch.float16, device=kernel_device)
    expected = linear(x, dequantized_int4(*held, impl="torch"))
    monkeypatch.setattr(int4_linear_module, "MAX_INT4_ROWS", 8)
    assert torch.equal(int4_linear(x, *held, impl="triton"), expected)
    assert int4_linear(x[:8], *held, impl="triton").shape == (8, 70)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"),
    [(1, 64, 128), (16, 100, 256), (17, 64, 128), (40, 72, 384), (70, 130, 128), (0, 64, 128)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_int4_linear(
    num_rows: int, num_columns: int, depth: int, has_bias: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x = random(num_rows, depth, dtype=dtype, device=kernel_device)
    held = weight(num_columns, depth, dtype, kernel_device)
    bias = random(num_columns, dtype=dtype, device=kernel_device) if has_bias else None
    out = int4_linear(x, *held, bias, impl="triton")
    exact = x.double() @ dequantized_int4(*held).double().T
    if bias is not None:
        exact += bias.double()
    assert (out.dtype, out.shape) == (dtype, exact.shape)
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(out.double(), exact, atol=2e-4, rtol=step)
    torch.testing.assert_close(int4_linear(x, *held, bias, impl="torch").double(), exact, atol=2e-3, rtol=4 * step)


def test_rows_may_have_strides_and_any_number_of_dimensions(kernel_device: torch.device) -> None:
    packed = random(5, 2, 3 * 128, dtype=torch.float16, device=kernel_device)
    held = weight(64, 128, torch.float16, kernel_device)
    x = packed[..., 128:256]
    found, expected = (int4_linear(x, *held, impl=impl) for impl in ("triton", "torch"))
    assert found.shape == (5, 2, 64)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_what_does_not_fit_is_refused() -> None:
    x, (packed, scales, zeros) = torch.zeros(2, 256), weight(8, 256, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"x is \[2, 100\]"):
        int4_linear(x[:, :100], packed, scales, zeros)
    with pytest.raises(ValueError, match=r"scales \[8, 1\]"):
        int4_linear(x, packed, scales[:, :1], zeros)
    with pytest.raises(ValueError, match=r"bias is \[9\]; it must be \[8\]"):
        int4_linear(x, packed, scales, zeros, torch.zeros(9))
    with pytest.raises(ValueError, match="must have one dtype"):
        int4_linear(x, packed, scales.half(), zeros)
    with pytest.raises(ValueError, match="must be contiguous"):
        int4_linear(x, packed, scales, zeros.T.contiguous().T)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_columns", "depth"), [(6144, 4096), (4096, 14_336), (3072, 1024)])
@pytest.mark.parametrize("num_rows", [1, 20, 64, 300, 600])
def test_as_models_have_them(num_rows: int, num_columns: int, depth: int) -> None:
    device = torch.device("cuda")
    x = random(num_rows, depth, dtype=torch.bfloat16, device=device)
    held = weight(num_columns, depth, torch.bfloat16, device)
    exact = x.double() @ dequantized_int4(*held).double().T
    out = int4_linear(x, *held, impl="triton")
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=2.0**-8)
