"""The gate and up projections with their activation, in one kernel, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.support.interpreter import require_interpreter
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import GPU, Impl, compiling_for, gpu_of, has_gluon, triton
from triton_ops.linear import gated_linear as module
from triton_ops.linear.gated_linear import gated_linear
from triton_ops.tuning import NARROW_GATED, WIDE_GATED, TileConfig, gated_linear_config

TILES = {"wide": WIDE_GATED, "narrow": NARROW_GATED}
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


class StandIn:
    """In place of the kernel, which nothing interprets: computes what it would, of rows that it could read."""

    def __getitem__(self, grid: tuple[int]) -> StandIn:
        self.num_programs = grid[0]
        return self

    def __call__(self, x: Tensor, weights: Tensor, out: Tensor, *sizes: int, **constexprs: int) -> None:
        for rows in (x, out):
            assert (rows.data_ptr() % 16, rows.stride(0) * rows.itemsize % 16, rows.stride(1)) == (0, 0, 1)
        assert sizes == (len(x), out.shape[1], -(-x.shape[1] // 64), self.num_programs)
        out.copy_(silu_and_mul(linear(x, weights.flatten(0, 1)), impl="torch"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A Hopper, or a CPU on which the kernel has a stand-in."""
    if request.param == "cuda":
        require()
        yield torch.device("cuda")
        return
    if not triton.__version__:
        pytest.skip("there is no Triton for this platform")
    for name, value in {
        "has_gluon": lambda: True,
        "_descriptor": lambda tensor, block: tensor,
        "_gated_hopper_kernel": StandIn(),
    }.items():
        monkeypatch.setattr(module, name, value)
    with compiling_for(H100):
        yield torch.device("cpu")


def require() -> None:
    if not (has_gluon() and gpu_of(torch.device("cuda")).has_wgmma):
        pytest.skip("the kernel is Hopper's, in the Gluon of some versions")


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
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_strided_rows(name: str, tile: TileConfig, kernel_device: torch.device) -> None:
    x = strided(torch.float16, kernel_device)[name]
    before = x.clone()
    weight = random(80, 64, dtype=torch.float16, device=kernel_device, seed=1) / 8
    assert_good(x, weight, gated_linear(x, weight, tile, impl="triton"))
    assert torch.equal(x, before)


def test_rows_are_apart_and_leading_dimensions_are_kept(kernel_device: torch.device) -> None:
    x = random(70, 64, dtype=torch.float16, device=kernel_device)
    weight = random(80, 64, dtype=torch.float16, device=kernel_device, seed=1) / 8
    clean = gated_linear(x.view(7, 10, 64), weight, WIDE_GATED, impl="triton")
    assert clean.shape == (7, 10, 40)
    x[3] = torch.nan
    out = gated_linear(x, weight, WIDE_GATED, impl="triton")
    assert out[3].isnan().all()
    others = [row for row in range(70) if row != 3]
    assert torch.equal(out[others], clean.flatten(0, 1)[others])
    assert gated_linear(x[:0], weight, WIDE_GATED, impl="triton").shape == (0, 40)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_without_gluon_it_is_a_product_and_an_activation(impl: Impl, monkeypatch: pytest.MonkeyPatch) -> None:
    require_interpreter()
    monkeypatch.setattr(module, "has_gluon", lambda: False)
    make = partial(random, dtype=torch.float16, device=torch.device("cpu"))
    x, weight = make(3, 64), make(80, 64, seed=1) / 8
    out = gated_linear(x, weight, WIDE_GATED, impl=impl)
    assert torch.equal(out, silu_and_mul(linear(x, weight), impl=impl))


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
            gated_linear(*wrong, WIDE_GATED)


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


@pytest.mark.parametrize("shape", MEASURED)
def test_tiles_are_the_fastest_measured(shape: tuple[int, int, int]) -> None:
    assert gated_linear_config(H100, *shape, torch.bfloat16, gluon=True) == MEASURED[shape]


def test_waves_that_are_mostly_empty_are_left_to_two_kernels() -> None:
    """And so are other cards, dtypes and sizes, and a Triton without Gluon."""
    config = partial(gated_linear_config, gluon=True)
    assert config(H100, 300, 14_336, 4096, torch.bfloat16) is None
    assert config(H100, 384, 14_336, 4096, torch.bfloat16) == WIDE_GATED
    shape = (2048, 14_336, 4096)
    assert config(H100, *shape, torch.float16) == WIDE_GATED
    assert config(H100, *shape, torch.float32) is None
    assert gated_linear_config(H100, *shape, torch.bfloat16, gluon=False) is None
    for capability in (80, 89, 100):
        assert config(GPU(capability, 132), *shape, torch.bfloat16) is None
    for num_columns, depth in ((28_672, 4096), (2048, 4096), (14_336, 8192), (14_336, 512), (14_332, 4096)):
        assert config(H100, 2048, num_columns, depth, torch.bfloat16) is None


# --- on a card ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_columns", "depth"), [(14_336, 4096), (3072, 1024), (1000, 1032), (8, 8)])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles(tile: TileConfig, num_columns: int, depth: int, dtype: torch.dtype) -> None:
    """As models have them, and awkward ones; of many rows the first and the last."""
    require()
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
    require()
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
