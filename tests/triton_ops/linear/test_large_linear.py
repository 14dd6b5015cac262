"""Products of many rows, Triton's and Gluon's, against float64, and where they are used.

What else the kernels have in common with `gated_linear` is tested there.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.implementation import GPU, has_gluon
from triton_ops.linear.large_linear import large_linear
from triton_ops.tuning import DEEP_LARGE, LARGE, TileConfig, large_linear_config

# The interpreter does not know bfloat16.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TILES = {"large": LARGE, "deep": DEEP_LARGE}
H100 = GPU(capability=90, num_sms=132)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def assert_good(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """About as far from float64 as torch's product, which rounds once, too."""
    exact, usual = x.double() @ weight.double().T, linear(x, weight)
    assert (out.dtype, out.shape) == (usual.dtype, usual.shape)
    if len(x):
        error, limit = ((result.double() - exact) for result in (out, usual))
        assert error.norm() <= 1.1 * limit.norm()
        assert error.abs().max() <= 2.0 * limit.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"),
    [(1, 32, 32), (64, 8, 72), (150, 104, 136), (64 * 17 + 3, 40, 32), (0, 16, 16)],
)
def test_large_linear(
    num_rows: int, num_columns: int, depth: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Tiles that are whole, that are not, and more rows of them than a group has."""
    make = partial(random, dtype=dtype, device=kernel_device)
    x, weight = make(num_rows, depth), make(num_columns, depth, seed=1) / depth**0.5
    tile = TileConfig("triton", columns=32, stages=2, rows=64, depth=32)
    assert_good(x, weight, large_linear(x, weight, tile, impl="triton"))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(3, 64).half(), torch.zeros(20, 64).half()
    with pytest.raises(ValueError, match=r"contiguous \[N, 64\], N and 64 multiples of 8, .* but is \[20, 64\]"):
        large_linear(x, weight, LARGE)
    with pytest.raises(ValueError, match=r"float16 or bfloat16 both, but are torch.float16 and torch.float32"):
        large_linear(x, weight.float(), LARGE)


# Rows, columns, depth: the fastest measured on an H100; None: cuBLAS was less than 5 % slower.
MEASURED = {
    (1024, 6144, 4096): None,
    (2048, 6144, 4096): LARGE,
    (4096, 6144, 4096): LARGE,
    (16_384, 6144, 4096): None,
    (2048, 4096, 4096): None,
    (4096, 4096, 4096): LARGE,
    (16_384, 4096, 4096): LARGE,
    (1024, 4096, 14_336): None,
    (2048, 4096, 14_336): DEEP_LARGE,
    (4096, 4096, 14_336): DEEP_LARGE,
    (16_384, 4096, 14_336): DEEP_LARGE,
    (4096, 28_672, 4096): None,
    (2300, 4096, 14_336): None,  # its third wave would be almost empty
    (2048, 4096, 12_288): None,  # not measured
}


@pytest.mark.parametrize("shape", MEASURED)
def test_tiles_are_the_fastest_measured(shape: tuple[int, int, int]) -> None:
    assert large_linear_config(H100, *shape, torch.bfloat16, gluon=True) == MEASURED[shape]
    without = None if MEASURED[shape] == LARGE else MEASURED[shape]
    assert large_linear_config(H100, *shape, torch.bfloat16, gluon=False) == without
    assert large_linear_config(H100, *shape, torch.float32, gluon=True) is None
    assert large_linear_config(GPU(100, 132), *shape, torch.bfloat16, gluon=True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_columns", "depth"), [(4096, 4096), (4096, 14_336), (1000, 1032), (8, 8)])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles(tile: TileConfig, num_columns: int, depth: int, dtype: torch.dtype) -> None:
    """As models have them, and awkward ones; of many rows the first and the last."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tiles are Hopper's")
    if tile.language == "gluon" and not has_gluon():
        pytest.skip("this Triton's Gluon is another one")
    make = partial(random, dtype=dtype, device=torch.device("cuda"))
    weight = make(num_columns, depth, seed=1) / depth**0.5
    for num_rows in (1, 100, 257, 1000, 2048, 16_384):
        x = make(num_rows, depth)
        out = large_linear(x, weight, tile)
        some = torch.cat([torch.arange(min(num_rows, 150)), torch.arange(max(num_rows - 150, 0), num_rows)])
        assert_good(x[some], weight, out[some])
        assert out.isfinite().all()
