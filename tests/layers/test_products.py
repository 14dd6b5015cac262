"""Products with the same bits at all numbers of rows, and the comparison that says where torch has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from layers import products
from layers.input_metadata import NO_PASS
from layers.linear import Linear, StackedLinear
from layers.placement import Placement
from layers.products import Product, ProductTable, compare_products, same_bits
from layers.vocabulary import LogitsHead
from tests.support.interpreter import require_interpreter
from tests.support.random_tensors import random
from tests.support.row_bits import COUNTS, ROWS, differing_counts, threads
from triton_ops.linear.ordered_linear import ordered_linear, plain_linear

CPU = torch.device("cpu")
LADDER = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compared(columns: int, depth: int, dtype: torch.dtype = torch.float32, **given: Any) -> ProductTable:
    given = {"has_bias": False, "counts": LADDER, **given}
    return compare_products(columns, depth, dtype=dtype, device=CPU, **given)


def ordered(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ordered_linear(x, weight, bias, impl="torch")


def honest(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return out.copy_(ordered(x, weight, bias))


def never(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Agrees at no number of rows."""
    return out.fill_(torch.nan)


# -- the comparison --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (6, 33), (8, 256)])
def test_a_product_in_another_order_is_found_out(
    columns: int, depth: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """One that adds both halves apart, in float32; at one row of six columns, too."""

    def right(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        total = ordered(x.float(), weight.float(), None)
        return (total if bias is None else total + bias.float()).to(dtype)

    def lies(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if len(x) not in (1, 24):
            return out.copy_(right(x, weight, bias))
        half = depth // 2
        first, second = (
            ordered(x[:, part].float(), weight[:, part].float().contiguous(), None)
            for part in (slice(0, half), slice(half, None))
        )
        total = first + second
        return out.copy_(total if bias is None else total + bias.float())

    table = compared(columns, depth, dtype, has_bias=has_bias, plain=lies, ordered=right)
    assert table.equal == tuple(count for count in LADDER if count not in (1, 24))


def test_a_bias_that_is_added_too_late_is_found_out() -> None:
    """To what is rounded already."""

    def right(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return (ordered(x.float(), weight.float(), None) + bias.float()).bfloat16()

    def late(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        assert bias is not None
        return out.copy_(ordered(x.float(), weight.float(), None).bfloat16() + bias)

    assert compared(8, 256, torch.bfloat16, has_bias=True, plain=late, ordered=right).equal == ()


def test_one_wrong_row_is_enough() -> None:
    def lies(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        honest(x, weight, bias, out)
        if len(x) == 32:
            out[31, 5] = torch.nextafter(out[31, 5], out.new_tensor(1.0))
        return out

    assert set(LADDER) - set(compared(64, 64, plain=lies).equal) == {32}


def test_a_device_whose_rows_know_their_place_is_refused() -> None:
    def by_place(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = ordered(x, weight, bias)
        out[5::8] += 2.0**-24
        return out

    def by_count(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ordered(x, weight, bias) + (2.0**-24 if len(x) == 24 else 0.0)

    for wrong in (by_place, by_count):
        with pytest.raises(ValueError, match=r"torch.float32 with weights \[64, 64\] on cpu, the bits of a row"):
            compared(64, 64, ordered=wrong, plain=never)
    # Where torch's product serves, the ordered one may do what it likes.
    assert compared(64, 64, ordered=by_count, plain=honest).equal == LADDER


def test_the_comparison_is_in_one_place() -> None:
    """Memory for each number of rows would be asked of the device anew."""
    places = set()

    def seen(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        places.add((x.data_ptr() if len(x) > 16 else 0, out.data_ptr()))
        return honest(x, weight, bias, out)

    compared(64, 64, plain=seen)
    assert len(places) == 2


def test_same_bits() -> None:
    nan, zero = torch.tensor([torch.nan, 1.0]), torch.zeros(2)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(nan, zero)


# -- the table -------------------------------------------------------------------------------------------------


def test_what_rows_are_padded_to() -> None:
    """To the next number compared, or further if that is no more than a block of the ordered product."""
    table = ProductTable(64, 32, False, LADDER, equal=(4, 8, 16, 32, 64))
    found = {count: table.rows_for(count) for count in (1, 2, 3, 4, 5, 9, 16, 17, 24, 25, 32, 33, 40, 57, 64)}
    assert found == {
        1: 4, 2: 4, 3: 4, 4: 4, 5: 8, 9: 16, 16: 16, 17: 0, 24: 0, 25: 32, 32: 32, 33: 0, 40: 0, 57: 64, 64: 64,
    }  # fmt: skip
    assert table.ordered == (24, 40, 48, 56)
    assert table.to_json() == {
        "columns": 64,
        "depth": 32,
        "has_bias": False,
        "compared": [*LADDER],
        "equal": [4, 8, 16, 32, 64],
        "ordered": [24, 40, 48, 56],
    }


# -- layers ----------------------------------------------------------------------------------------------------


def layer_of(kind: str, dtype: torch.dtype, columns: int = 48, depth: int = 96) -> Linear | LogitsHead:
    placement = Placement(dtype, CPU, deterministic=True)
    layer: Linear | LogitsHead
    if kind == "head":
        layer = LogitsHead(placement.parameter(columns, depth), columns, softcap=5.0, placement=placement)
    elif kind == "stacked":
        layer = StackedLinear(depth, {"a": columns - 8, "b": 8}, packed_as=None, bias=True, placement=placement)
    else:
        layer = Linear(depth, columns, bias=False, placement=placement)
    for seed, weight in enumerate(layer.parameters()):
        weight.copy_(random(*weight.shape, seed=seed + 1) / depth**0.5)
    return layer


def with_table(layer: Linear | LogitsHead) -> Linear | LogitsHead:
    assert layer.product is not None
    has_bias = isinstance(layer, Linear) and layer.bias is not None
    layer.product.table = compared(*layer.weight.shape, next(layer.parameters()).dtype, has_bias=has_bias)
    return layer


def applied(layer: Linear | LogitsHead) -> Any:
    return partial(layer, metadata=NO_PASS) if isinstance(layer, Linear) else partial(layer, logits_indices=None)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["linear", "stacked", "head"])
def test_rows_of_a_layer_are_their_own(kind: str, dtype: torch.dtype, num_threads: int) -> None:
    """With the table and without, and both have the same bits; also of more rows than were compared."""
    layer, x = layer_of(kind, dtype), random(2 * ROWS, 96, dtype=dtype)
    with threads(num_threads):
        before = applied(layer)(x)
        assert not differing_counts(applied(layer), x)
        with_table(layer)
        assert not differing_counts(applied(layer), x, counts=(*COUNTS, ROWS + 1, 2 * ROWS - 1))
        assert same_bits(applied(layer)(x), before)


def test_a_result_is_put_where_it_is_wanted() -> None:
    for kind in ("linear", "head"):
        layer, x = with_table(layer_of(kind, torch.float32)), random(ROWS, 96)
        for count in (0, 1, 3, 4, 64, 65):
            expected = applied(layer)(x[:count])
            assert expected.shape == (count, 48)
            if isinstance(layer, LogitsHead):
                out = torch.full((count, 48), torch.nan)
                assert layer(x[:count], None, out=out) is out
                assert same_bits(out, expected)


def test_rows_of_a_batch_of_sequences() -> None:
    layer, x = with_table(layer_of("linear", torch.float32)), random(6, 5, 96)
    assert same_bits(layer(x, NO_PASS), layer(x.flatten(0, 1), NO_PASS).view(6, 5, 48))
    packed = random(10, 3 * 96)
    assert same_bits(layer(packed[:, 96:192], NO_PASS), layer(packed[:, 96:192].contiguous(), NO_PASS))


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[tuple[str, int]]]:
    """Which products `layers.products` asks for, and of how many rows."""
    seen: list[tuple[str, int]] = []

    def recording(name: str, function: Any) -> Any:
        def recorded(x: Tensor, *given: Any, **keywords: Any) -> Tensor:
            seen.append((name, len(x)))
            result: Tensor = function(x, *given, **keywords)
            return result

        return recorded

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(products, name, recording(name, getattr(products, name)))
        yield seen


def test_which_product_computes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    product, weight = Product("torch"), random(8, 32)
    compute = partial(product, weight=weight)
    with calls(monkeypatch, "plain_linear", "ordered_linear") as seen:
        compute(random(5, 32))
        product.table = ProductTable(8, 32, False, LADDER, equal=(4, 8, 16, 32, 64))
        for count in (2, 4, 20, 30, 150):
            compute(random(count, 32))
    assert seen == [
        ("ordered_linear", 5),
        ("plain_linear", 4),
        ("plain_linear", 4),
        ("ordered_linear", 20),
        ("plain_linear", 32),
        *[("plain_linear", 64)] * 2,
        ("ordered_linear", 22),
    ]


def test_the_ordered_product_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def recorded(*given: Any, out: Tensor, **keywords: Any) -> Tensor:
        places.append(out.data_ptr())
        return ordered_linear(*given, out=out, **keywords)

    monkeypatch.setattr(products, "ordered_linear", recorded)
    product, weight, out = Product("torch"), random(8, 32), torch.empty(20, 8)
    product.table = ProductTable(8, 32, False, (1, 16), equal=())
    product(random(20, 32), weight, out=out)
    assert places == [out.data_ptr(), out[16:].data_ptr()]


def test_other_layers_compute_as_before() -> None:
    layer = Linear(96, 48, bias=False, placement=Placement(torch.float32, CPU))
    layer.weight.values.copy_(random(48, 96))
    x = random(3, 96)
    assert layer.product is None
    assert torch.equal(layer(x, NO_PASS), linear(x, layer.weight.values))
    assert torch.equal(plain_linear(x, layer.weight.values, None, torch.empty(3, 48)), x @ layer.weight.values.T)


def test_no_sum_is_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*given: object) -> None:
        raise AssertionError("it looked for parts")

    require_interpreter()
    monkeypatch.setattr("layers.formats.weight_format.split_k_config", cut)
    x, weight = random(3, 32), random(16, 32, seed=1)
    for deterministic in (True, False):
        layer = Linear(32, 16, bias=False, placement=Placement(torch.float32, CPU, "triton", deterministic))
        layer.weight.values.copy_(weight)
        layer.emits_parts = True
        if deterministic:
            torch.testing.assert_close(layer(x, NO_PASS), linear(x, weight))
        else:
            with pytest.raises(AssertionError, match="looked for parts"):
                layer(x, NO_PASS)
