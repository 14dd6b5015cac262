"""The Triton kernel of projections in parts against its torch reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.random_tensors import random
from triton_ops.implementation import GPU
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.norms.rms_norm import add_rms_norm
from triton_ops.tuning import SplitKConfig, split_k_config

# The interpreter does not know bfloat16.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def assert_same(x: Tensor, weight: Tensor, config: SplitKConfig) -> None:
    before = x.clone()
    parts, expected = (split_k_linear(x, weight, config, impl=impl) for impl in ("triton", "torch"))
    assert (parts.dtype, parts.shape) == (torch.float32, expected.shape)
    torch.testing.assert_close(parts, expected, atol=2e-4, rtol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "depth", "part_depth"), [(16, 16, 32), (32, 32, 96), (64, 64, 64), (16, 32, 256)]
)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "total_depth"),
    [(1, 64, 192), (16, 64, 192), (37, 192, 64), (130, 128, 320), (0, 64, 64)],
)
def test_split_k_linear(
    num_rows: int,
    num_columns: int,
    total_depth: int,
    rows: int,
    depth: int,
    part_depth: int,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    """Batches beyond a tile, parts that are shorter than the others, one part alone."""
    make = partial(random, dtype=dtype, device=kernel_device)
    x, weight = make(num_rows, total_depth), make(num_columns, total_depth, seed=1)
    assert_same(x, weight, SplitKConfig(rows, depth, 3, part_depth))


def test_strided_rows(kernel_device: torch.device) -> None:
    """Columns of a packed projection, rows apart, and columns that are not side by side."""
    packed = random(20, 3 * 64, dtype=torch.float16, device=kernel_device)
    weight = random(64, 64, dtype=torch.float16, device=kernel_device, seed=1)
    for x in (
        packed[:, 64:128],
        packed[:, 3:67],
        packed[::2, :64],
        packed[:, ::3],
        packed[:1].expand(5, -1)[:, :64],
    ):
        assert_same(x, weight, SplitKConfig(16, 16, 2, 32))


def test_rows_are_apart(kernel_device: torch.device) -> None:
    x = random(20, 64, dtype=torch.float16, device=kernel_device)
    weight = random(64, 64, dtype=torch.float16, device=kernel_device, seed=1)
    config = SplitKConfig(16, 16, 2, 32)
    clean = split_k_linear(x, weight, config, impl="triton")
    x[3] = torch.nan
    parts = split_k_linear(x, weight, config, impl="triton")
    assert parts[:, 3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(parts[:, others], clean[:, others])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_columns", "depth"), [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 14_336), (896, 4864)]
)
@pytest.mark.parametrize("num_rows", [1, 16, 24, 64, 128, 200])
def test_configurations(num_rows: int, num_columns: int, depth: int, dtype: torch.dtype) -> None:
    """As models have them, with the norm behind: about as far from float64 as what is not cut."""
    config = split_k_config(GPU(90, 132), num_rows, num_columns, depth, dtype)
    if config is None:
        pytest.skip("there is none for this shape")
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the configurations are for GPUs with more shared memory")
    make = partial(random, dtype=dtype, device=torch.device("cuda"))
    x, weight = make(num_rows, depth), make(num_columns, depth, seed=1) / depth**0.5
    residual, norm_weight = make(num_rows, num_columns, seed=2), make(num_columns, seed=3)
    parts = split_k_linear(x, weight, config, impl="triton")
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(parts.double().sum(0), exact, atol=1e-4, rtol=1e-4)
    whole = torch.nn.functional.linear(x, weight)
    ours = add_rms_norm(parts, residual, norm_weight, 1e-5, impl="triton")[1]
    theirs = add_rms_norm(whole, residual, norm_weight, 1e-5, impl="triton")[1]
    error, usual = ((total.double() - exact - residual.double()).norm() for total in (ours, theirs))
    assert error < 1.1 * usual


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_weights_beyond_two_to_the_31_elements() -> None:
    depth = 2**31 // 64 // 64 * 64
    make = partial(torch.zeros, dtype=torch.bfloat16, device="cuda")
    x, weight = make(2, depth), make(128, depth)
    x[1, -3], weight[127, -3] = 2.0, 3.0
    parts = split_k_linear(x, weight, SplitKConfig(16, 64, 3, depth // 2 // 64 * 64), impl="triton")
    assert parts.sum(0)[1, 127] == 6.0
    assert parts.count_nonzero() == 1
