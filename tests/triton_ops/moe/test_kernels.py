"""The Triton kernels of routing and of experts against their torch references."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from layers.products import revealing_inputs
from tests.support.interpreter import require_interpreter
from tests.support.random_tensors import random
from tests.support.row_bits import ROWS, differing_counts
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.activations.squared_relu import squared_relu
from triton_ops.moe.expert_tiles import expert_tiles
from triton_ops.moe.moe import moe
from triton_ops.moe.topk_sigmoid import topk_sigmoid
from triton_ops.moe.topk_softmax import topk_softmax
from triton_ops.tuning import MAX_PART_TOKENS

# The interpreter does not know bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (300, 128, 8), (17, 60, 4), (5, 1, 1), (3, 6, 6), (0, 8, 2)],
)
def test_topk_softmax(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    # Without ties: where weights are equal, either expert is right.
    order = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0)).argsort(-1)
    logits = (order / 16 - 3).to(kernel_device, dtype)
    weights, experts = topk_softmax(logits, top_k, renormalize=renormalize, impl="triton")
    expected, expected_experts = topk_softmax(logits, top_k, renormalize=renormalize, impl="torch")
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (300, 128, 8), (17, 60, 4), (5, 1, 1), (3, 6, 6), (0, 8, 2)],
)
def test_topk_sigmoid(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    """Of equals the first expert is chosen: logits repeat where there are many experts."""
    chance = torch.Generator().manual_seed(0)
    logits = (torch.rand(num_tokens, num_experts, generator=chance).argsort(-1) // 2 / 16 - 3).to(
        kernel_device, dtype
    )
    correction = (torch.randint(0, 5, (num_experts,), generator=chance) / 64).to(kernel_device)
    options = {"renormalize": renormalize, "factor": 2.5, "tiny": 0.25}
    weights, experts = topk_sigmoid(logits, correction, top_k, **options, impl="triton")
    expected, expected_experts = topk_sigmoid(logits, correction, top_k, **options, impl="torch")
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_sigmoids_of_a_row_of_nan_name_experts_that_exist(kernel_device: torch.device) -> None:
    logits, correction = random(4, 6, dtype=torch.float32, device=kernel_device), torch.zeros(6)
    logits[1], logits[2, 3], logits[3] = torch.nan, torch.nan, -torch.inf
    weights, experts = topk_sigmoid(logits, correction.to(kernel_device), 3, renormalize=True, impl="triton")
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all(), "one of six that is NaN is not chosen"
    assert (weights[3] == 0).all()
    assert experts.min() >= 0
    assert experts.max() < 6
    assert all(row.unique().numel() == 3 for row in experts)


def test_arguments_of_sigmoids_that_are_refused(kernel_device: torch.device) -> None:
    logits, correction = torch.ones(2, 6, device=kernel_device), torch.ones(6, device=kernel_device)
    with pytest.raises(ValueError, match=r"top_k must be 1 to 6 \(all experts\), but is 7"):
        topk_sigmoid(logits, correction, 7, renormalize=True, impl="triton")
    with pytest.raises(ValueError, match=r"correction must be float32 \[6\], but is torch.float16 \[6\]"):
        topk_sigmoid(logits, correction.half(), 2, renormalize=True, impl="triton")


def test_experts_of_a_row_of_nan_exist(kernel_device: torch.device) -> None:
    logits = random(4, 6, dtype=torch.float32, device=kernel_device)
    logits[1], logits[2, 3] = torch.nan, torch.nan
    logits[3] = -torch.inf
    weights, experts = topk_softmax(logits, 3, renormalize=True, impl="triton")
    assert weights[1:].isnan().all()
    assert weights[0].isfinite().all()
    assert experts.min() >= 0
    assert experts.max() < 6
    assert all(row.unique().numel() == 3 for row in experts)


def test_there_are_as_many_experts_as_chosen(kernel_device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"top_k must be 1 to 6 \(all experts\), but is 7"):
        topk_softmax(torch.ones(2, 6, device=kernel_device), 7, renormalize=True, impl="triton")


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "tile_rows"),
    [
        (1, 8, 2, 16),
        (40, 5, 3, 16),
        (33, 128, 8, 16),
        (700, 16, 4, 64),  # counted in two steps
        (20, 1, 1, 16),
        (16, 16, 16, 16),
        (0, 8, 2, 16),
    ],
)
def test_expert_tiles(
    num_tokens: int, num_experts: int, top_k: int, tile_rows: int, kernel_device: torch.device
) -> None:
    """Some experts have no tokens, the last among them; others whole tiles, or one row more."""
    chances = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    chances[: num_tokens // 2, : num_experts // 2] += 1
    experts = chances.topk(top_k).indices.to(kernel_device)
    order, tiles = expert_tiles(experts, num_experts, tile_rows, impl="triton")
    expected_order, expected_tiles = expert_tiles(experts, num_experts, tile_rows, impl="torch")
    assert (order.dtype, tiles.dtype) == (torch.int32, torch.int32)
    assert torch.equal(order, expected_order)
    assert torch.equal(tiles[:, 0], expected_tiles[:, 0])
    is_used = tiles[:, 0] >= 0
    assert torch.equal(tiles[is_used], expected_tiles[is_used])
    # Of the reference: each choice once, in a tile of its expert.
    chosen = experts.flatten()
    rows = [range(row, min(row + tile_rows, end)) for _, row, end in expected_tiles[is_used].tolist()]
    assert [row for tile in rows for row in tile] == [*range(num_tokens * top_k)]
    for (expert, *_), tile in zip(expected_tiles[is_used].tolist(), rows, strict=True):
        assert (chosen[expected_order[tile.start : tile.stop]] == expert).all()


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden", "inner"),
    [
        (1, 5, 2, 48, 24),
        (9, 5, 2, 48, 24),
        (40, 3, 3, 20, 12),
        (40, 3, 1, 200, 144),
        (150, 2, 1, 64, 32),
        (3, 64, 4, 32, 16),
        (0, 4, 2, 32, 16),
    ],
)
def test_moe(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    x = make(num_tokens, hidden)
    logits = random(num_tokens, num_experts, dtype=torch.float32, device=kernel_device, seed=1)
    weights, experts = topk_softmax(logits, top_k, renormalize=False)
    gate_up = make(num_experts, 2 * inner, hidden, seed=2) / hidden**0.5
    down = make(num_experts, hidden, inner, seed=3) / inner**0.5
    out, expected = (moe(x, weights, experts, gate_up, down, impl=impl) for impl in ("triton", "torch"))
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden", "inner"), [(9, 48, 24), (40, 20, 12), (100, 200, 144)])
def test_biases_and_another_activation(
    num_tokens: int, hidden: int, inner: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    weights, experts = topk_softmax(make(num_tokens, 3, seed=1), 2, renormalize=True)
    gate_up = make(3, 2 * inner, hidden, seed=2) / hidden**0.5
    down = make(3, hidden, inner, seed=3) / inner**0.5
    biases = {"gate_up_bias": make(3, 2 * inner, seed=4), "down_bias": make(3, hidden, seed=5)}
    given = (make(num_tokens, hidden), weights, experts, gate_up, down)
    out, expected = (
        moe(*given, **biases, activation=clamped_swiglu, impl=impl)  # type: ignore[arg-type]
        for impl in ("triton", "torch")
    )
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [9, 100])
def test_experts_without_gates(num_tokens: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    weights, experts = topk_softmax(make(num_tokens, 3, seed=1), 2, renormalize=True)
    up, down = make(3, 24, 48, seed=2) / 48**0.5, make(3, 48, 24, seed=3) / 24**0.5
    given = (make(num_tokens, 48), weights, experts, up, down)
    out, expected = (moe(*given, activation=squared_relu, impl=impl) for impl in ("triton", "torch"))
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    with pytest.raises(ValueError, match=r"gate_up must be contiguous \[3, 48, 48\], but is \[3, 24, 48\]"):
        moe(*given, impl="triton")


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [silu_and_mul, clamped_swiglu])
def test_the_bits_of_an_activation_by_itself(
    activation: Callable[..., Tensor], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    weights, experts = topk_softmax(make(40, 3, seed=1), 2, renormalize=True)
    given = make(40, 48), weights, experts, make(3, 72, 48, seed=2), make(3, 48, 36, seed=3)
    biases = {"gate_up_bias": make(3, 72, seed=4)}
    fused = moe(*given, **biases, activation=activation, impl="triton")  # type: ignore[arg-type]
    own = moe(*given, **biases, activation=partial(activation), impl="triton")  # type: ignore[arg-type]
    if kernel_device.type == "cuda":
        assert torch.equal(fused, own)
    else:  # the interpreter's exponentials depend on a number's place, on some CPUs
        torch.testing.assert_close(fused, own, atol=1e-3, rtol=1e-3)  # of numbers in the hundreds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 40, MAX_PART_TOKENS])
def test_parts(num_tokens: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    weights, experts = topk_softmax(make(num_tokens, 5, seed=1), 3, renormalize=True)
    x, gate_up = make(num_tokens, 48), make(5, 48, 48, seed=2) / 48**0.5
    down, down_bias = make(5, 48, 24, seed=3) / 24**0.5, make(5, 48, seed=4)
    given = x, weights, experts, gate_up, down
    parts = moe(*given, down_bias=down_bias, parts_ok=True, impl="triton")
    assert parts.dtype == torch.float32
    for nth, part in enumerate(parts.unbind()):
        own = weights[:, nth : nth + 1].contiguous(), experts[:, nth : nth + 1]
        expected = moe(x, *own, gate_up, down, down_bias=down_bias, impl="torch")
        torch.testing.assert_close(part, expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_many_tokens_and_many_choices_have_no_parts(kernel_device: torch.device) -> None:
    make = partial(random, dtype=torch.float32, device=kernel_device)
    gate_up, down = make(9, 24, 16, seed=2), make(9, 16, 12, seed=3)
    for num_tokens, top_k in ((MAX_PART_TOKENS + 1, 2), (3, 9)):
        x = make(num_tokens, 16)
        weights, experts = topk_softmax(make(num_tokens, 9, seed=1), top_k, renormalize=True)
        out = moe(x, weights, experts, gate_up, down, parts_ok=True, impl="triton")
        assert torch.equal(out, moe(x, weights, experts, gate_up, down, impl="triton"))


def test_experts_without_tokens_are_not_read(kernel_device: torch.device) -> None:
    make = partial(random, dtype=torch.float32, device=kernel_device)
    x, experts = make(3, 16), torch.tensor([[1], [3], [1]], device=kernel_device)
    gate_up, down = make(5, 24, 16, seed=2), make(5, 16, 12, seed=3)
    weights = torch.ones(3, 1, device=kernel_device)
    expected = moe(x, weights, experts, gate_up, down, impl="torch")
    gate_up[[0, 2, 4]], down[[0, 2, 4]] = torch.nan, torch.nan
    out = moe(x, weights, experts, gate_up, down, impl="triton")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)


def test_tokens_do_not_disturb_one_another(kernel_device: torch.device) -> None:
    make = partial(random, dtype=torch.float32, device=kernel_device)
    x, experts = make(3, 16), torch.tensor([[1, 0], [1, 2], [2, 1]], device=kernel_device)
    gate_up, down = make(3, 24, 16, seed=2), make(3, 16, 12, seed=3)
    weights = torch.full((3, 2), 0.5, device=kernel_device)
    clean = moe(x, weights, experts, gate_up, down, impl="triton")
    x[1] = torch.nan
    out = moe(x, weights, experts, gate_up, down, impl="triton")
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_experts_of_other_shapes_are_refused(kernel_device: torch.device) -> None:
    make = partial(random, dtype=torch.float32, device=kernel_device)
    x, gate_up, down = make(3, 16), make(3, 24, 16), make(3, 16, 12)
    weights, experts = topk_softmax(make(3, 3), 2, renormalize=True)
    for wrong, message in (
        ((x[:, :8], gate_up, down), r"gate_up must be contiguous \[3, 24, 8\]"),
        ((x, gate_up, down[:, :8]), r"down must be contiguous \[3, 16, 12\]"),
        ((x, gate_up[:2], down), r"down must be contiguous \[2, 16, 12\]"),
        ((x, gate_up, down.half()), "x, gate_up and down are torch.float32, torch.float32 and torch.float16"),
    ):
        tensors = dict(zip(("x", "gate_up", "down"), wrong, strict=True))
        with pytest.raises(ValueError, match=message):
            moe(**tensors, weights=weights, experts=experts, impl="triton")
    with pytest.raises(ValueError, match=r"down_bias must be contiguous \[3, 16\], but is \[16\]"):
        moe(x, weights, experts, gate_up, down, down_bias=make(16), impl="triton")


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiles_change_no_bit(dtype: torch.dtype) -> None:
    """As tensor cores add, whether an expert has few tokens or many: tiles have 16 to 64 rows here."""
    require_interpreter()
    num_experts, hidden, inner, cpu = 2, 80, 72, torch.device("cpu")
    x, gate_up, _ = revealing_inputs(ROWS, num_experts * 2 * inner, hidden, dtype, cpu)
    _, down, _ = revealing_inputs(1, num_experts * hidden, inner, dtype, cpu)
    matrices = gate_up.view(num_experts, 2 * inner, hidden), down.view(num_experts, hidden, inner)
    generator = torch.Generator(cpu).manual_seed(0)
    weights = torch.rand(ROWS, 2, generator=generator)
    experts = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(ROWS)])
    from tests.support.tensor_cores import tensor_cores  # imports the interpreter

    with tensor_cores():
        assert not differing_counts(
            lambda *rows: moe(*rows, *matrices, impl="triton"), x / 256, weights, experts, counts=(13, 40)
        )
