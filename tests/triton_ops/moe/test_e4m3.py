"""Experts in e4m3: the kernels against the torch form, and that against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.random_tensors import random
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.linear.e4m3_linear import quantised_weight
from triton_ops.moe.e4m3 import ScaledE4M3
from triton_ops.moe.moe import moe, moe_reference
from triton_ops.moe.topk_softmax import topk_softmax

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
CASES = [  # tokens, experts, top_k, hidden, inner
    (1, 5, 2, 128, 128),
    (40, 3, 3, 96, 32),
    (70, 2, 1, 264, 128),
    (0, 4, 2, 128, 128),
    pytest.param((300, 8, 2, 384, 256), marks=pytest.mark.gpu),
    pytest.param((4096, 16, 4, 512, 384), marks=pytest.mark.gpu),
]


def random_e4m3(*shape: int, blocks: bool, device: torch.device, seed: int) -> ScaledE4M3:
    """Matrices whose rows are of different sizes."""
    wide = random(*shape, dtype=torch.float32, device=device, seed=seed) * shape[-1] ** -0.5
    wide *= torch.linspace(0.5, 2, shape[-2], device=device).unsqueeze(1)
    codes, scale = zip(*(quantised_weight(one, blocks=blocks) for one in wide), strict=True)
    return ScaledE4M3(torch.stack(codes), torch.stack(scale))


def given(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, blocks: bool, biases: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    num_tokens, num_experts, top_k, hidden, inner = sizes
    x = random(num_tokens, hidden, dtype=dtype, device=device)
    scores = random(num_tokens, num_experts, dtype=dtype, device=device, seed=1)
    gate_up = random_e4m3(num_experts, 2 * inner, hidden, blocks=blocks, device=device, seed=2)
    down = random_e4m3(num_experts, hidden, inner, blocks=blocks, device=device, seed=3)
    options: dict[str, Any] = {}
    if biases:
        options = {
            "gate_up_bias": random(num_experts, 2 * inner, dtype=dtype, device=device, seed=4),
            "down_bias": random(num_experts, hidden, dtype=dtype, device=device, seed=5),
        }
    return (x, *topk_softmax(scores, top_k, renormalize=True), gate_up, down), options


@pytest.mark.each_once
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_compute_what_torch_does(
    dtype: torch.dtype, sizes: tuple[int, ...], blocks: bool, biases: bool, kernel_device: torch.device
) -> None:
    """Both quantise alike; here and there a number that lies between two codes becomes the other one."""
    args, options = given(sizes, dtype, kernel_device, blocks=blocks, biases=biases)
    expected = moe(*args, **options, impl="torch").float()
    ours = moe(*args, **options, impl="triton")
    assert (ours.dtype, ours.shape) == (dtype, args[0].shape)
    assert (ours.float() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("blocks", [False, True])
def test_the_torch_form_in_float64(blocks: bool, device: torch.device) -> None:
    """And the quantisation of what experts multiply is most of the way to exact products."""
    args, options = given((9, 4, 2, 264, 128), torch.float32, device, blocks=blocks, biases=True)
    ours = moe(*args, **options, impl="torch").double()
    expected = moe_reference(*args, **options)
    x, weights, experts, gate_up, down = args
    plain = [torch.stack([one[i].dequantised(torch.float32) for i in range(4)]) for one in (gate_up, down)]
    exact = moe_reference(x, weights, experts, *plain, **options)
    assert (ours - expected).norm() < 0.002 * expected.norm()
    assert 0.01 < (ours - exact).norm() / exact.norm() < 0.05


def test_parts(kernel_device: torch.device) -> None:
    args, options = given((5, 4, 2, 128, 128), torch.float32, kernel_device, blocks=True, biases=True)
    whole = moe(*args, **options, impl="triton")
    parts = moe(*args, **options, parts_ok=True, impl="triton")
    assert parts.shape == (2, 5, 128)
    assert torch.allclose(parts.sum(0), whole, atol=1e-5)


def test_other_activations(kernel_device: torch.device) -> None:
    args, options = given((5, 4, 2, 128, 128), torch.float32, kernel_device, blocks=False, biases=True)
    ours, theirs = (moe(*args, **options, activation=clamped_swiglu, impl=impl) for impl in ("triton", "torch"))
    assert (ours - theirs).norm() <= 0.01 * theirs.norm()


def test_both_matrices_are_alike(kernel_device: torch.device) -> None:
    (x, weights, experts, gate_up, down), _ = given(
        (5, 4, 2, 128, 128), torch.float32, kernel_device, blocks=False, biases=False
    )
    plain = torch.zeros(down.shape, dtype=x.dtype, device=x.device)
    with pytest.raises(ValueError, match="gate_up and down are ScaledE4M3 and Tensor"):
        moe(x, weights, experts, gate_up, plain, impl="triton")
    with pytest.raises(ValueError, match=r"down must be contiguous \[4, 128, 128\]"):
        moe(x, weights, experts, gate_up, ScaledE4M3(down.values.mT, down.scale), impl="triton")
