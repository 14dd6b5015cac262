"""The gate and up projections with their activation, in one kernel: Triton's and Gluon's against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import GPU, has_gluon
from triton_ops.linear.gated_linear import gated_linear
from triton_ops.tuning import (
    NARROW_GATED,
    TRITON_GATED,
    WIDE_GATED,
    TileConfig,
    gated_linear_config,
)

# The interpreter does not know bfloat16.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SMALL = TileConfig("triton", columns=32, stages=2, rows=64, depth=32)
TILES = {"wide": WIDE_GATED, "narrow": NARROW_GATED, "Triton": TRITON_GATED}
H100 = GPU(capability=90, num_sms=132)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def assert_good(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """About as far from float64 as a product and an activation, which round at the same places."""
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    exact = silu(gate) * up
    usual = silu_and_mul(linear(x, weight), impl="torch")
    assert (out.dtype, out.shape) == (usual.dtype, usual.shape)
    if len(x):
        error, limit = ((result.double() - exact) for result in (out, usual))
        assert error.norm() <= 1.1 * limit.norm()
        assert error.abs().max() <= 2.0 * limit.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"),
    [(1, 32, 32), (64, 8, 72), (65, 40, 136), (150, 104, 8), (64 * 17 + 3, 32, 32), (0, 16, 16)],
)
def test_gated_linear(
    num_rows: int, num_columns: int, depth: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Tiles that are whole, that are not, and more rows of them than a group has."""
    make = partial(random, dtype=dtype, device=kernel_device)
    x, weight = make(num_rows, depth), make(2 * num_columns, depth, seed=1) / depth**0.5
    before = x.clone()
    assert_good(x, weight, gated_linear(x, weight, SMALL, impl="triton"))
    assert torch.equal(x, before)


def strided(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Rows of 64 between NaN: in place, and what has to be copied."""
    packed = torch.full((80, 3 * 64), torch.nan, dtype=dtype, device=device)
    fill = random(80, 64, dtype=dtype, device=device)
    views = {
        "columns of a packed projection": packed.clone()[:, 64:128],
        "columns that begin off 16 bytes": packed.clone()[:, 3:67],
        "rows apart": packed.repeat(2, 1)[::2, :64],
        "columns apart": packed.clone()[:, ::3],
        "rows of an odd length": torch.full((80, 67), torch.nan, dtype=dtype, device=device)[:, :64],
    }
    for view in views.values():
        view.copy_(fill)
    return views | {"one row, again and again": fill[:1].expand(80, -1)}


@pytest.mark.parametrize("name", strided(torch.float16, torch.device("cpu")))
@pytest.mark.parametrize(
    "tile", [SMALL, *(pytest.param(tile, marks=pytest.mark.gpu, id=name) for name, tile in TILES.items())]
)
def test_strided_rows(name: str, tile: TileConfig, kernel_device: torch.device) -> None:
    if tile is not SMALL:
        require(tile)
    x = strided(torch.float16, kernel_device)[name]
    weight = random(80, 64, dtype=torch.float16, device=kernel_device, seed=1) / 8
    assert_good(x, weight, gated_linear(x, weight, tile, impl="triton"))


def test_rows_are_apart_and_leading_dimensions_are_kept(kernel_device: torch.device) -> None:
    x = random(70, 64, dtype=torch.float16, device=kernel_device)
    weight = random(80, 64, dtype=torch.float16, device=kernel_device, seed=1) / 8
    clean = gated_linear(x.view(7, 10, 64), weight, SMALL, impl="triton")
    assert clean.shape == (7, 10, 40)
    x[3] = torch.nan
    out = gated_linear(x, weight, SMALL, impl="triton")
    assert out[3].isnan().all()
    others = [row for row in range(70) if row != 3]
    assert torch.equal(out[others], clean.flatten(0, 1)[others])


def test_what_does_not_fit_is_refused() -> None:
    x, weight = random(3, 64, dtype=torch.float16, device=torch.device("cpu")), torch.zeros(48, 64).half()
    for wrong, message in (
        ((x.float(), weight), r"must be float16 or bfloat16 both, but are torch.float32 and torch.float16"),
        ((x.bfloat16(), weight), r"but are torch.bfloat16 and torch.float16"),
        ((x[:, :56], weight), r"contiguous \[2 N, 56\], .* but is \[48, 64\]"),
        ((x[:, :56], weight[:, :56]), r"with strides \[64, 1\]"),
        ((x[:, :60], weight[:, :60].contiguous()), r"N and 60 multiples of 8"),
        ((x, weight[:40]), r"but is \[40, 64\]"),
        ((x, torch.zeros(48 * 64 + 1).half()[1:].view(48, 64)), r"begin at a multiple of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_linear(*wrong, SMALL)


# --- which tile ---

# Rows, columns, depth: the fastest measured on an H100; None: a product and an activation were as fast.
MEASURED = {
    (64, 14_336, 4096): None,
    (128, 14_336, 4096): None,
    (256, 14_336, 4096): WIDE_GATED,
    (512, 14_336, 4096): NARROW_GATED,
    (1024, 14_336, 4096): WIDE_GATED,
    (2048, 14_336, 4096): WIDE_GATED,
    (4096, 14_336, 4096): WIDE_GATED,
    (16_384, 14_336, 4096): WIDE_GATED,
    (128, 3072, 1024): None,
    (512, 3072, 1024): None,
    (1024, 3072, 1024): NARROW_GATED,
    (2048, 3072, 1024): WIDE_GATED,
    (4096, 3072, 1024): WIDE_GATED,
    (16_384, 3072, 1024): WIDE_GATED,
}
# Of Triton's kernel, where there is no Gluon.
MEASURED_TRITON = {
    (1024, 14_336, 4096): None,
    (4096, 14_336, 4096): None,
    (512, 3072, 1024): None,
    (1024, 3072, 1024): None,
    (2048, 3072, 1024): TRITON_GATED,
    (16_384, 3072, 1024): TRITON_GATED,
}


@pytest.mark.parametrize("shape", MEASURED)
def test_tiles_are_the_fastest_measured(shape: tuple[int, int, int]) -> None:
    assert gated_linear_config(H100, *shape, torch.bfloat16, gluon=True) == MEASURED[shape]


@pytest.mark.parametrize("shape", MEASURED_TRITON)
def test_triton_runs_where_it_gains(shape: tuple[int, int, int]) -> None:
    assert gated_linear_config(H100, *shape, torch.bfloat16, gluon=False) == MEASURED_TRITON[shape]


def test_waves_that_are_mostly_empty_are_left_to_two_kernels() -> None:
    """And so are other cards, dtypes and sizes."""
    config = partial(gated_linear_config, gluon=True)
    assert config(H100, 300, 14_336, 4096, torch.bfloat16) is None
    assert config(H100, 384, 14_336, 4096, torch.bfloat16) == WIDE_GATED
    shape = (2048, 14_336, 4096)
    assert config(H100, *shape, torch.float16) == WIDE_GATED
    assert config(H100, *shape, torch.float32) is None
    for capability in (80, 89, 100):
        assert config(GPU(capability, 132), *shape, torch.bfloat16) is None
    for num_columns, depth in ((28_672, 4096), (2048, 4096), (14_336, 8192), (14_336, 512), (14_332, 4096)):
        assert config(H100, 2048, num_columns, depth, torch.bfloat16) is None


# --- on a card ---


def require(tile: TileConfig) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tiles are Hopper's")
    if tile.language == "gluon" and not has_gluon():
        pytest.skip("this Triton's Gluon is another one")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_columns", "depth"), [(14_336, 4096), (3072, 1024), (1000, 1032), (8, 8)])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles(tile: TileConfig, num_columns: int, depth: int, dtype: torch.dtype) -> None:
    """As models have them, and awkward ones; of many rows the first and the last."""
    require(tile)
    make = partial(random, dtype=dtype, device=torch.device("cuda"))
    weight = make(2 * num_columns, depth, seed=1) / depth**0.5
    for num_rows in (1, 100, 128, 257, 1000, 2048, 16_384):
        x = make(num_rows, depth)
        out = gated_linear(x, weight, tile)
        some = torch.cat([torch.arange(min(num_rows, 150)), torch.arange(max(num_rows - 150, 0), num_rows)])
        assert_good(x[some], weight, out[some])
        assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_a_captured_graph_reads_what_is_there(tile: TileConfig) -> None:
    """Several launches of one kernel with tensors of their own, replayed after others of its launches."""
    require(tile)
    make = partial(random, dtype=torch.bfloat16, device=torch.device("cuda"))
    x, weights = make(500, 512), [make(2 * 768, 512, seed=seed) / 512**0.5 for seed in (1, 2)]
    gated_linear(x, weights[0], tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [gated_linear(x, weight, tile) for weight in weights]
    for seed in (3, 4):
        other = make(300, 512, seed=seed + 10)
        assert_good(other, weights[0], gated_linear(other, weights[0], tile))
        x.copy_(make(500, 512, seed=seed))
        weights[1].copy_(make(2 * 768, 512, seed=seed) / 512**0.5)
        graph.replay()
        for weight, out in zip(weights, outs, strict=True):
            assert_good(x, weight, out)
