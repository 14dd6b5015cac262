"""MXFP4 against transformers, and experts in it against the same experts dequantised."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.random_tensors import random
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import gpu_of
from triton_ops.moe.moe import moe, moe_reference
from triton_ops.moe.mxfp4 import GROUP, Mxfp4, words_of
from triton_ops.moe.mxfp4_hopper import takes_words
from triton_ops.moe.topk_softmax import topk_softmax

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def random_mxfp4(*shape: int, device: torch.device, scales: tuple[int, int] = (115, 122), seed: int = 0) -> Mxfp4:
    """Matrices of all codes, with scales of that range."""
    generator, groups = torch.Generator().manual_seed(seed), (*shape[:-1], shape[-1] // GROUP)
    blocks = torch.randint(0, 256, (*groups, GROUP // 2), generator=generator).to(device, torch.uint8)
    return Mxfp4(blocks, torch.randint(*scales, groups, generator=generator).to(device, torch.uint8))


def as_on_a_gpu(kernel_device: torch.device) -> AbstractContextManager[object]:
    """Lets the interpreter add in one order in tiles of all sizes."""
    if kernel_device.type == "cuda":
        return nullcontext()
    from tests.support.tensor_cores import tensor_cores  # imports the interpreter

    return tensor_cores()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_means_what_transformers_reads(dtype: torch.dtype, device: torch.device) -> None:
    """To the last bit, as no number needs more digits than bfloat16 has."""
    weights = random_mxfp4(3, 24, 128, device=device, scales=(1, 241))
    theirs = convert_moe_packed_tensors(weights.blocks, weights.scales, dtype=dtype).mT
    ours = weights.dequantised(dtype)
    assert (ours.dtype, ours.shape) == (dtype, weights.shape)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.double(), weights.dequantised(torch.float64))
    assert torch.equal(weights[1].dequantised(dtype), ours[1])


def test_words_mean_the_same(device: torch.device) -> None:
    weights = random_mxfp4(3, 24, 160, device=device, scales=(1, 241))
    words = weights.as_words()
    assert words.shape == weights.shape
    assert words.is_contiguous()
    assert torch.equal(words.dequantised(torch.float32), weights.dequantised(torch.float32))
    assert torch.equal(words[2].dequantised(torch.float32), weights[2].dequantised(torch.float32))


def test_which_elements_a_word_has(device: torch.device) -> None:
    """Codes 1 of a row of 32, one after the other."""
    places = []
    for element in range(GROUP):
        blocks = torch.zeros(1, 1, 16, dtype=torch.uint8, device=device)
        blocks[0, 0, element // 2] = 1 << element % 2 * 4
        words = words_of(blocks).view(torch.int32)
        (word,) = words.nonzero()[:, -1].tolist()
        places.append((word, int(words[0, 0, word]).bit_length() - 1))
    assert places == [(k % 8 // 2, (6, 3, 0, 9)[k // 8] + k % 2 * 16) for k in range(GROUP)]


def test_codes_and_halves_of_a_byte(device: torch.device) -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8, device=device)
    blocks[0, 0, :3] = torch.tensor([0x21, 0xF7, 0x0A])
    scales = torch.full((1, 1), 128, dtype=torch.uint8, device=device)
    expected = torch.tensor([1.0, 2.0, 12.0, -12.0, -2.0, 0.0], device=device)
    assert torch.equal(Mxfp4(blocks, scales).dequantised(torch.float32)[0, :6], expected)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden", "inner"),
    [(1, 5, 2, 32, 32), (40, 3, 3, 96, 32), (70, 2, 1, 32, 96), (0, 4, 2, 32, 32)],
)
def test_the_bits_of_dequantised_experts(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    x = random(num_tokens, hidden, dtype=dtype, device=kernel_device)
    weights, experts = topk_softmax(
        random(num_tokens, num_experts, dtype=dtype, device=kernel_device, seed=1), top_k, renormalize=True
    )
    gate_up = random_mxfp4(num_experts, 2 * inner, hidden, device=kernel_device, seed=2)
    down = random_mxfp4(num_experts, hidden, inner, device=kernel_device, seed=3)
    options = {
        "gate_up_bias": random(num_experts, 2 * inner, dtype=dtype, device=kernel_device, seed=4),
        "down_bias": random(num_experts, hidden, dtype=dtype, device=kernel_device, seed=5),
        "activation": clamped_swiglu,
    }
    matrices = gate_up.dequantised(dtype), down.dequantised(dtype)
    for impl in ("torch", "triton"):
        with as_on_a_gpu(kernel_device):
            packed = moe(x, weights, experts, gate_up, down, impl=impl, **options)  # type: ignore[arg-type]
            dense = moe(x, weights, experts, *matrices, impl=impl, **options)  # type: ignore[arg-type]
            if takes_words(gpu_of(kernel_device), dtype):
                words = gate_up.as_words(), down.as_words()
                assert torch.equal(moe(x, weights, experts, *words, impl=impl, **options), dense)  # type: ignore[arg-type]
        assert torch.equal(packed, dense), impl
    exact = moe_reference(x, weights, experts, gate_up, down, **options)  # type: ignore[arg-type]
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(packed.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2880, 416])
@pytest.mark.parametrize("num_tokens", [1, 60, 130, 300, 2000, 6000])
def test_the_shape_of_gpt_oss(num_tokens: int, hidden: int, kernel_device: torch.device) -> None:
    """Tiles of all sizes, beside those of dense matrices, again and again: what loads and what multiplies run at
    the same time.
    """
    num_experts, inner, dtype = 32, hidden, torch.bfloat16
    x = random(num_tokens, hidden, dtype=dtype, device=kernel_device)
    logits = random(num_tokens, num_experts, dtype=dtype, device=kernel_device, seed=1)
    weights, experts = topk_softmax(logits, 4, renormalize=True)
    gate_up = random_mxfp4(num_experts, 2 * inner, hidden, device=kernel_device, seed=2)
    down = random_mxfp4(num_experts, hidden, inner, device=kernel_device, seed=3)
    biases = {
        "gate_up_bias": random(num_experts, 2 * inner, dtype=dtype, device=kernel_device, seed=4),
        "down_bias": random(num_experts, hidden, dtype=dtype, device=kernel_device, seed=5),
    }
    matrices = gate_up.dequantised(dtype), down.dequantised(dtype)
    words = (gate_up.as_words(), down.as_words()) if takes_words(gpu_of(kernel_device), dtype) else ()
    for activation in (clamped_swiglu, silu_and_mul):
        for parts_ok in (False, True):
            call = partial(moe, x, weights, experts, activation=activation, parts_ok=parts_ok, **biases)
            dense = call(*matrices, impl="triton")
            assert torch.equal(call(gate_up, down, impl="triton"), dense)
            for _ in range(10 if words else 0):
                assert torch.equal(call(*words, impl="triton"), dense)
    expected = moe(x, weights, experts, *matrices, activation=clamped_swiglu, impl="torch", **biases)
    packed = moe(x, weights, experts, gate_up, down, activation=clamped_swiglu, impl="triton", **biases)
    assert (packed - expected).float().norm() < 1e-2 * expected.float().norm()


@pytest.mark.parametrize("scales", [(0, 30), (100, 150), (220, 241)])
def test_scales_far_from_one(scales: tuple[int, int], kernel_device: torch.device) -> None:
    """A row with a single 1 reads a column of the matrices: products are exact."""
    x = torch.eye(32, device=kernel_device)
    weights, experts = (
        torch.ones(32, 1, device=kernel_device),
        torch.zeros(32, 1, dtype=torch.long, device=kernel_device),
    )
    gate_up = random_mxfp4(1, 64, 32, device=kernel_device, scales=scales)
    down = random_mxfp4(1, 32, 32, device=kernel_device, scales=(127, 128))

    def first(x: Tensor, **options: object) -> Tensor:
        return x[:, :32].clamp(-1e30, 1e30)

    dense = moe(x, weights, experts, gate_up.dequantised(torch.float32), down, activation=first, impl="triton")
    packed = moe(x, weights, experts, gate_up, down, activation=first, impl="triton")
    assert packed.abs().max() > 0
    assert torch.equal(packed, dense)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(0, 30), (100, 150), (220, 241)])
def test_words_of_scales_far_from_one(scales: tuple[int, int], kernel_device: torch.device) -> None:
    if not takes_words(gpu_of(kernel_device), torch.bfloat16):
        pytest.skip("matrices in words are for Hopper")
    x = torch.eye(32, device=kernel_device, dtype=torch.bfloat16)
    weights = torch.ones(32, 1, device=kernel_device)
    experts = torch.zeros(32, 1, dtype=torch.long, device=kernel_device)
    gate_up = random_mxfp4(1, 64, 32, device=kernel_device, scales=scales)
    down = random_mxfp4(1, 32, 32, device=kernel_device, scales=(127, 128))

    def first(x: Tensor, **options: object) -> Tensor:
        return x[:, :32].clamp(-1e30, 1e30)

    matrices = gate_up.dequantised(torch.bfloat16), down.dequantised(torch.bfloat16)
    dense = moe(x, weights, experts, *matrices, activation=first, impl="triton")
    packed = moe(x, weights, experts, gate_up.as_words(), down.as_words(), activation=first, impl="triton")
    assert packed.abs().max() > 0
    assert torch.equal(packed, dense)


def test_parts_that_do_not_fit_are_refused(kernel_device: torch.device) -> None:
    gate_up, down = (random_mxfp4(3, size, 32, device=kernel_device) for size in (64, 32))
    x = torch.ones(2, 32, device=kernel_device)
    weights, experts = topk_softmax(torch.ones(2, 3, device=kernel_device), 1, renormalize=True)
    wrong = Mxfp4(gate_up.blocks, gate_up.scales[:, :32])
    with pytest.raises(ValueError, match=r"gate_up must be contiguous \[3, 64, 32\]"):
        moe(x, weights, experts, wrong, down, impl="triton")
    for given in ((gate_up.as_words(), down), (gate_up.as_words(), down.as_words())):
        with pytest.raises(ValueError, match="in words are for bfloat16 on Hopper, both of them"):
            moe(x, weights, experts, *given, impl="triton")
