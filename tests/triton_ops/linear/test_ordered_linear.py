"""ordered_linear against float64, its kernel against its torch form, and its bits on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from layers.products import compare_products, revealing_inputs
from tests.support.interpreter import require_interpreter
from tests.support.random_tensors import random
from tests.support.row_bits import ROWS, differing_counts, threads
from triton_ops.implementation import GPU, Impl
from triton_ops.linear.ordered_linear import ordered_linear, ordered_linear_reference
from triton_ops.tuning import ordered_linear_config

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter does not know bfloat16.
KERNEL_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def product_of(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias of `shape` rows, columns and depth."""
    num_rows, columns, depth = shape
    x = random(num_rows, depth, dtype=dtype, device=device)
    weight = random(columns, depth, dtype=dtype, device=device, seed=1) / max(1, depth) ** 0.5
    return x, weight, random(columns, dtype=dtype, device=device, seed=2) if bias else None


def assert_close(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected = ordered_linear_reference(x, weight, bias)
    assert (found.dtype, found.shape) == (x.dtype, expected.shape)
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 8), (1, 1, 1), (3, 101, 33), (16, 64, 64), (37, 48, 100)])
def test_on_a_cpu(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    given = product_of(shape, dtype, torch.device("cpu"), bias=bias)
    assert_close(ordered_linear(*given, impl="torch"), *given)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(0, 5, 8), (1, 1, 1), (3, 101, 33), (16, 64, 64), (37, 48, 100), (70, 200, 130), (130, 64, 128)]
)
def test_kernel(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """One row, several tiles, sums that are no whole steps, columns that are no whole tile."""
    given = product_of(shape, dtype, kernel_device, bias=bias)
    before = given[0].clone()
    assert_close(ordered_linear(*given, impl="triton"), *given)
    assert torch.equal(given[0], before)


def test_kernel_reads_strided_rows(kernel_device: torch.device) -> None:
    packed = random(20, 3 * 64, dtype=torch.float16, device=kernel_device)
    weight = random(48, 64, dtype=torch.float16, device=kernel_device, seed=1) / 8.0
    for x in (packed[:, 64:128], packed[::2, :64], packed[:, ::3], packed[:1].expand(5, -1)[:, :64]):
        for impl in ("triton", "torch"):
            assert_close(ordered_linear(x, weight, impl=impl), x, weight, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_result_is_put_where_it_is_wanted(impl: Impl, kernel_device: torch.device) -> None:
    """In the very tensor, whole blocks and a rest, wherever it begins, and nowhere else."""
    for num_rows in (0, 1, 16, 37):
        x, weight, bias = product_of((num_rows, 24, 48), torch.float32, kernel_device, bias=True)
        expected = ordered_linear(x, weight, bias, impl=impl)
        for first in (16, 3):
            memory = torch.full((num_rows * 24 + 32,), torch.nan, device=kernel_device)
            out = memory[first : first + num_rows * 24].view(num_rows, 24)
            assert ordered_linear(x, weight, bias, out=out, impl=impl) is out
            assert torch.equal(out, expected)
            assert int(memory.isnan().sum()) == 32


def test_rows_are_apart(kernel_device: torch.device) -> None:
    x, weight, _ = product_of((40, 48, 64), torch.float16, kernel_device, bias=False)
    clean = ordered_linear(x, weight, impl="triton")
    x[3] = torch.nan
    found = ordered_linear(x, weight, impl="triton")
    assert found[3].isnan().all()
    others = [row for row in range(40) if row != 3]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (6, 33), (10, 257), (24, 48), (512, 256)])
def test_bits_of_a_row_are_its_own(columns: int, depth: int, dtype: torch.dtype, num_threads: int) -> None:
    x, weight, bias = revealing_inputs(ROWS, columns, depth, dtype, torch.device("cpu"))
    with threads(num_threads):
        for own in (bias, None):
            assert not differing_counts(lambda rows, own=own: ordered_linear(rows, weight, own, impl="torch"), x)


def test_bits_of_a_row_beside_zeros() -> None:
    x, weight, _ = revealing_inputs(ROWS, 64, 64, torch.float32, torch.device("cpu"))
    expected = ordered_linear(x, weight, impl="torch")
    for place in range(ROWS):
        alone = torch.zeros_like(x)
        alone[place] = x[0]
        assert torch.equal(ordered_linear(alone, weight, impl="torch")[place], expected[0])


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other libraries may keep to one order")
def test_torch_adds_in_other_orders() -> None:
    """What all this is for: on processors with MKL's kernels for AVX2 and AVX-512, one row, at least, differs."""
    x, weight, _ = revealing_inputs(ROWS, 64, 256, torch.float32, torch.device("cpu"))
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("not such a processor")
    assert 1 in differing_counts(lambda rows: linear(rows, weight), x)


def never(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """In place of torch's product: the ordered one is to serve all numbers of rows, and is compared at them."""
    return out.fill_(torch.nan)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("columns", "depth"),
    [(1024, 3072), (4096, 1024), (4096, 4096), (28_672, 4096), (4096, 14_336), (151_936, 1024)],
)
def test_on_a_gpu(columns: int, depth: int, dtype: torch.dtype) -> None:
    """The order of the kernel is one at all sizes, and the library's at some of them."""
    counts, cuda = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 640, 1024, 2048), torch.device("cuda")
    compare = partial(compare_products, columns, depth, counts=counts, dtype=dtype, device=cuda)
    for has_bias in (False, True):
        assert not compare(has_bias=has_bias, plain=never).equal
        assert compare(has_bias=has_bias).equal or dtype == torch.float32


def test_what_disagrees_is_refused() -> None:
    x, weight, bias = product_of((3, 8, 16), torch.float16, torch.device("cpu"), bias=True)
    assert bias is not None
    for wrong, message in (
        ((x.float(), weight, None), r"one dtype, but are torch.float32, torch.float16"),
        ((x, weight, bias.float()), r"torch.float16 and torch.float32"),
        ((x[:, :8], weight, None), r"\[3, 8\] and \[8, 16\]"),
        ((x[0], weight, None), r"\[16\] and \[8, 16\]"),
        ((x[:, :8], weight[:, :8], None), r"with strides \[16, 1\]"),
        ((x, weight, bias[:4]), r"bias must be contiguous \[8\], but is \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ordered_linear(*wrong)
    for out, message in (
        (x.new_empty(3, 9), r"out must be contiguous \[3, 8\] in torch.float16, but is \[3, 9\] in torch.float16"),
        (x.new_empty(3, 8).float(), r"is \[3, 8\] in torch.float32"),
        (x.new_empty(8, 3).T, r"with strides \[1, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ordered_linear(x, weight, out=out)


def test_configurations() -> None:
    """Tiles of few rows are as small as it takes to occupy the GPU; they fit into the shared memory of any."""
    gpu = GPU(capability=90, num_sms=132)

    def tile(num_rows: int, num_columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
        config = ordered_linear_config(gpu, num_rows, num_columns, dtype)
        step = (config.rows + config.columns) * config.depth * dtype.itemsize
        assert (config.stages - 1) * step <= 96 << 10
        return config.rows, config.columns

    for num_rows in (1, 8, 16):
        found = [tile(num_rows, columns) for columns in (576, 1024, 2048, 2560, 4096, 5120, 28_672)]
        assert found == [(16, 16)] * 4 + [(16, 32), (16, 32), (16, 64)]
    assert [tile(num_rows, 1024) for num_rows in (24, 32, 64)] == [(16, 16), (16, 16), (64, 16)]
    assert [tile(num_rows, 28_672) for num_rows in (24, 32, 64)] == [(32, 64), (32, 64), (64, 64)]
    assert tile(65, 1024) == tile(16_896, 1024) == (128, 128)
    assert [tile(num_rows, 1024, torch.float32) for num_rows in (1, 33, 512)] == [(16, 64), (64, 64), (64, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (101, 33)])
def test_tiles_of_the_kernel_change_no_bit(columns: int, depth: int, dtype: torch.dtype) -> None:
    """As tensor cores add, at all tiles of rows: of 16, 32, 64 and 128."""
    require_interpreter()
    given = {"dtype": dtype, "device": torch.device("cpu"), "impl": "triton", "counts": (1, 16, 17, 40, 64, 130)}
    from tests.support.tensor_cores import tensor_cores  # imports the interpreter

    with tensor_cores():
        for has_bias in (False, True):
            compare_products(columns, depth, has_bias=has_bias, plain=never, **given)
