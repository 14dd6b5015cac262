"""topk_softmax, topk_sigmoid, and moe in torch, against what they mean."""

from __future__ import annotations

import pytest
import torch

from tests.support.random_tensors import random
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.squared_relu import squared_relu
from triton_ops.moe.moe import moe, moe_reference
from triton_ops.moe.topk_sigmoid import topk_sigmoid
from triton_ops.moe.topk_softmax import topk_softmax

pytestmark = pytest.mark.usefixtures("device")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(9, 5, 2), (1, 5, 1), (40, 3, 3), (0, 4, 2)])
def test_moe(dtype: torch.dtype, num_tokens: int, num_experts: int, top_k: int) -> None:
    x = random(num_tokens, 16, dtype=dtype)
    weights, experts = topk_softmax(random(num_tokens, num_experts, seed=1), top_k, renormalize=False)
    gate_up = random(num_experts, 24, 16, dtype=dtype, seed=2) / 4
    down = random(num_experts, 16, 12, dtype=dtype, seed=3) / 4
    out = moe(x, weights, experts, gate_up, down)
    assert out.dtype == dtype
    expected = moe_reference(x, weights, experts, gate_up, down)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_biases_and_another_activation(dtype: torch.dtype, deterministic: bool) -> None:
    x = random(9, 16, dtype=dtype)
    weights, experts = topk_softmax(random(9, 5, seed=1), 2, renormalize=True)
    gate_up = random(5, 24, 16, dtype=dtype, seed=2) / 4
    down = random(5, 16, 12, dtype=dtype, seed=3) / 4
    biases = {"gate_up_bias": random(5, 24, dtype=dtype, seed=4), "down_bias": random(5, 16, dtype=dtype, seed=5)}
    out = moe(x, weights, experts, gate_up, down, **biases, activation=clamped_swiglu, deterministic=deterministic)
    expected = moe_reference(x, weights, experts, gate_up, down, **biases, activation=clamped_swiglu)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_experts_without_gates(dtype: torch.dtype) -> None:
    x = random(9, 16, dtype=dtype)
    weights, experts = topk_softmax(random(9, 5, seed=1), 2, renormalize=True)
    up, down = (random(5, *shape, dtype=dtype, seed=2) / 4 for shape in ((12, 16), (16, 12)))
    out = moe(x, weights, experts, up, down, activation=squared_relu)
    expected = moe_reference(x, weights, experts, up, down, activation=lambda inner: inner.clamp(min=0).square())
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_experts_without_tokens_are_not_read() -> None:
    x, experts = random(3, 16), torch.tensor([[1], [3], [1]])
    gate_up, down = random(5, 24, 16, seed=2), random(5, 16, 12, seed=3)
    expected = moe_reference(x, torch.ones(3, 1), experts, gate_up, down)
    gate_up[[0, 2, 4]], down[[0, 2, 4]] = torch.nan, torch.nan
    out = moe(x, torch.ones(3, 1), experts, gate_up, down)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


def test_tokens_do_not_disturb_one_another() -> None:
    x, experts = random(3, 16), torch.tensor([[1, 0], [1, 2], [2, 1]])
    gate_up, down = random(3, 24, 16, seed=2), random(3, 16, 12, seed=3)
    weights = torch.full((3, 2), 0.5)
    clean = moe(x, weights, experts, gate_up, down)
    x[1] = torch.nan
    out = moe(x, weights, experts, gate_up, down)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_softmax(dtype: torch.dtype, renormalize: bool) -> None:
    logits = random(20, 7, dtype=dtype) * 3
    weights, experts = topk_softmax(logits, 3, renormalize=renormalize)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    exact = torch.softmax(logits.double(), -1)
    for row, w, e in zip(exact, weights, experts, strict=True):
        best = row[e] / (row[e].sum() if renormalize else 1.0)
        torch.testing.assert_close(w.double(), best, atol=1e-6, rtol=1e-5)
        assert (w.diff() <= 0).all()
        rest = row[[i for i in range(7) if i not in e.tolist()]]
        assert row[e].min() >= rest.max()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (4, 4), (2, 1)])
def test_topk_sigmoid(num_groups: int, top_groups: int, renormalize: bool, dtype: torch.dtype) -> None:
    """Chosen expert by expert; the correction is greater than most differences of scores."""
    num_experts, top_k, factor = 12, 3, 1.5
    logits, correction = random(20, num_experts, dtype=dtype), random(num_experts, seed=1) / 2
    options = {"renormalize": renormalize, "factor": factor, "num_groups": num_groups, "top_groups": top_groups}
    weights, experts = topk_sigmoid(logits, correction, top_k, **options, tiny=0.25)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    size, scores = num_experts // num_groups, torch.sigmoid(logits.float())
    for row, w, e in zip(scores, weights, experts, strict=True):
        good = (row + correction).tolist()
        best = [sum(sorted(good[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        groups = sorted(range(num_groups), key=lambda g: best[g])[-top_groups:]
        among = [i for i in range(num_experts) if i // size in groups]
        assert e.tolist() == sorted(among, key=lambda i: -good[i])[:top_k]
        expected = row[e] * factor / (row[e].sum() + 0.25 if renormalize else 1.0)
        torch.testing.assert_close(w, expected, atol=1e-6, rtol=1e-5)
