"""Norms against float64, and against transformers bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tests.support.attention_cases import packed_qkv
from tests.support.elementwise_cases import DTYPES, assert_matches
from tests.support.random_tensors import random
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (3, 4, 16), (1, 7), (0, 8)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)

    def dense(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_matches(rms_norm(x, weight, 1e-5), dense(x.double()), dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_matches(normed, dense(total.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_as_transformers(dtype: torch.dtype) -> None:
    reference = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    reference.weight.data.copy_(random(64))
    x = random(33, 64, dtype=dtype, seed=3)
    assert torch.equal(rms_norm(x, reference.weight.data, 1e-5, impl="torch"), reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_with_an_offset(dtype: torch.dtype, offset: float) -> None:
    x, residual = random(5, 32, dtype=dtype), random(5, 32, dtype=dtype, seed=1)
    weight = random(32, dtype=dtype, seed=2)

    def dense(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (offset + weight.double())

    assert_matches(rms_norm(x, weight, 1e-5, offset=offset), dense(x.double()), dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, offset=offset)
    assert torch.equal(total, x + residual)
    assert_matches(normed, dense(total.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("reference", "offset"), [(Olmo2RMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_rms_norm_with_an_offset_rounds_as_transformers(dtype: torch.dtype, reference: Any, offset: float) -> None:
    norm = reference(64, eps=1e-5).to(dtype)
    norm.weight.data.copy_(random(64))
    x = random(33, 64, dtype=dtype, seed=3)
    assert torch.equal(rms_norm(x, norm.weight.data, 1e-5, offset=offset, impl="torch"), norm(x))


def test_rms_norm_reads_strided_heads() -> None:
    q, _, _ = packed_qkv(5, 4, 2, 16)
    assert torch.equal(rms_norm(q, torch.ones(16), 1e-6), rms_norm(q.contiguous(), torch.ones(16), 1e-6))


def test_rms_norm_of_values_whose_square_overflows_half_precision() -> None:
    x = torch.tensor([[300.0, -400.0]], dtype=torch.float16)
    assert_matches(
        rms_norm(x, torch.ones(2, dtype=torch.float16), 1e-6),
        x.double() / x.double().square().mean().sqrt(),
        torch.float16,
    )
