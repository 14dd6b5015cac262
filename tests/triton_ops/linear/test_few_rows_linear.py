"""The kernel of projections of a few rows against float64, beside a product that rounds at the same places."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.support.random_tensors import random
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import GPU
from triton_ops.linear.few_rows_linear import few_rows_linear
from triton_ops.tuning import FewRowsConfig, few_rows_config

# The interpreter does not know bfloat16.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SMALL = FewRowsConfig(rows=16, columns=16, depth=32, stages=2)
H100 = GPU(capability=90, num_sms=132)


def assert_good(x: Tensor, weight: Tensor, config: FewRowsConfig, *, gated: bool) -> None:
    """About as far from float64 as torch's product, and its activation."""
    before = x.clone()
    out = few_rows_linear(x, weight, config, gated=gated, impl="triton")
    exact, usual = x.double() @ weight.double().T, linear(x, weight)
    if gated:
        gate, up = exact.chunk(2, -1)
        exact, usual = silu(gate) * up, silu_and_mul(usual, impl="torch")
    assert (out.dtype, out.shape) == (usual.dtype, usual.shape)
    assert torch.equal(x, before)
    if len(x):
        error, limit = ((result.double() - exact) for result in (out, usual))
        assert error.norm() <= 1.1 * limit.norm() + 1e-9
        assert error.abs().max() <= 2.0 * limit.abs().max() + 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("config", [SMALL, FewRowsConfig(32, 32, 64, 3)])
@pytest.mark.parametrize(("num_rows", "depth"), [(1, 192), (16, 64), (37, 128), (0, 64)])
def test_few_rows_linear(
    num_rows: int, depth: int, config: FewRowsConfig, gated: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """One row, whole tiles, more rows than a tile has, and none."""
    make = partial(random, dtype=dtype, device=kernel_device)
    x, weight = make(num_rows, depth), make(96 * (2 if gated else 1), depth, seed=1) / depth**0.5
    assert_good(x, weight, config, gated=gated)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 17, 64])
def test_tiles_that_models_use(num_rows: int, gated: bool, device: torch.device) -> None:
    make = partial(random, dtype=torch.bfloat16, device=device)
    num_columns = 3072 if gated else 4096
    config = few_rows_config(H100, num_rows, num_columns, 1024, torch.bfloat16, gated=gated)
    assert config is not None
    x, weight = make(num_rows, 1024), make(num_columns * (2 if gated else 1), 1024, seed=1) / 32
    assert_good(x, weight, config, gated=gated)


def test_strided_rows(kernel_device: torch.device) -> None:
    """Columns of a packed projection, rows apart, and columns that are not side by side."""
    packed = random(20, 3 * 64, dtype=torch.float16, device=kernel_device)
    weight = random(32, 64, dtype=torch.float16, device=kernel_device, seed=1) / 8
    for x in (packed[:, 64:128], packed.repeat(2, 1)[::2, :64], packed[:, ::3]):
        assert_good(x, weight, SMALL, gated=False)
        assert_good(x, weight, SMALL, gated=True)


def test_rows_are_apart(kernel_device: torch.device) -> None:
    x = random(20, 64, dtype=torch.float16, device=kernel_device)
    weight = random(32, 64, dtype=torch.float16, device=kernel_device, seed=1) / 8
    clean = few_rows_linear(x, weight, SMALL, gated=True, impl="triton")
    x[3] = torch.nan
    out = few_rows_linear(x, weight, SMALL, gated=True, impl="triton")
    assert out[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(out[others], clean[others])


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(3, 64).half(), torch.zeros(32, 64).half()
    for given, message in (
        ((x.float(), weight), "must be float16 or bfloat16 both, but are torch.float32"),
        ((x.bfloat16(), weight), "but are torch.bfloat16 and torch.float16"),
        ((x[:, :32], weight), r"x must be \[M, K\] .* but they are \[3, 32\] and \[32, 64\]"),
        ((x.view(1, 3, 64), weight), r"they are \[1, 3, 64\]"),
        ((x[:, :32], weight[:, :32]), r"with strides \[64, 1\]"),
        ((x, weight[:24]), "a multiple of 16 columns"),
        ((x[:, :48], weight[:, :48].contiguous()), "of 32 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            few_rows_linear(*given, SMALL)


def test_where_it_is_used() -> None:
    """Up to 64 rows of what was measured: weights that fit into L2 beside others."""
    config = partial(few_rows_config, dtype=torch.bfloat16)
    assert config(H100, 8, 3072, 1024, gated=True) == FewRowsConfig(16, 32, 128, 6)
    assert config(H100, 20, 3072, 1024, gated=True) == FewRowsConfig(32, 32, 128, 4)
    assert config(H100, 8, 4096, 1024, gated=False) == FewRowsConfig(16, 64, 128, 6)
    assert config(H100, 64, 4096, 1024, gated=False) == FewRowsConfig(64, 64, 128, 4)
    for num_rows, num_columns, depth in ((65, 3072, 1024), (8, 14_336, 4096), (8, 1024, 1024), (8, 3072, 576)):
        assert config(H100, num_rows, num_columns, depth, gated=True) is None
    assert config(GPU(80, 108), 8, 3072, 1024, gated=True) is None
    assert few_rows_config(H100, 8, 3072, 1024, torch.float32, gated=True) is None
