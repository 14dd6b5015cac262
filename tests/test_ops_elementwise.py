"""rms_norm, add_rms_norm, apply_rotary and silu_and_mul against float64, and against transformers bit by bit."""

from __future__ import annotations

import pytest
import torch
from attention_cases import packed_qkv
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from layers.rotary import Llama3Scaling, RopeParameters, RotaryEmbedding
from triton_ops.rms_norm import add_rms_norm, rms_norm
from triton_ops.rotary import apply_rotary
from triton_ops.silu_and_mul import silu_and_mul

pytestmark = pytest.mark.usefixtures("device")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_matches(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


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
    assert torch.equal(rms_norm(x, reference.weight.data, 1e-5), reference(x))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_rotary(dtype: torch.dtype, head_dim: int) -> None:
    """Each pair (i, i + head_dim / 2) is a complex number turned by position * theta^(-2 i / head_dim)."""
    positions = torch.tensor([0, 1, 5, 5, 63, 40], dtype=torch.int32)
    q, k, _ = (x.to(dtype) for x in packed_qkv(6, 4, 2, head_dim))
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions.double().view(-1, 1, 1) * frequencies
    rotary = RotaryEmbedding(head_dim, 64, RopeParameters(10000.0), device=torch.get_default_device())
    for x, rotated in zip((q, k), rotary(q, k, positions), strict=True):
        turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        expected = torch.cat([turned.real, turned.imag], dim=-1)
        assert rotated.dtype == dtype
        tolerance = 2e-5 if dtype == torch.float32 else TOLERANCE[dtype]  # float32 angles up to 63
        torch.testing.assert_close(rotated.double(), expected, atol=tolerance, rtol=tolerance)


def test_rotary_computes_in_float32() -> None:
    cache = random(9, 16)
    q, k, _ = packed_qkv(6, 4, 2, 16)
    positions = torch.tensor([8, 0, 1, 2, 3, 3], dtype=torch.int32)
    for wide, half in zip(
        apply_rotary(q.bfloat16().float(), k.bfloat16().float(), cache, positions),
        apply_rotary(q.bfloat16(), k.bfloat16(), cache, positions),
        strict=True,
    ):
        assert torch.equal(wide.bfloat16(), half)


SCALINGS = {
    "default": ({"rope_type": "default", "rope_theta": 500000.0}, None),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        Llama3Scaling(32.0, 1.0, 4.0, 8192),
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_embedding_is_that_of_transformers(kind: str) -> None:
    parameters, scaling = SCALINGS[kind]
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=9000, rope_parameters=dict(parameters)
    )
    with torch.device("cpu"):  # a GPU's powers differ in their last bits, which position 9000 enlarges
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(9000)[None])
    cos, sin = cos.to(torch.get_default_device()), sin.to(torch.get_default_device())
    rotary = RotaryEmbedding(64, 9000, RopeParameters(500000.0, scaling), device=torch.get_default_device())
    ours_cos, ours_sin = rotary.cos_sin_cache.chunk(2, dim=-1)
    torch.testing.assert_close(ours_cos, cos[0, :, :32], atol=2e-7, rtol=0)
    torch.testing.assert_close(ours_sin, sin[0, :, :32], atol=2e-7, rtol=0)
    # Positions in any order, against transformers' own formula.
    positions = torch.tensor([8999, 17, 0, 4096], dtype=torch.int32)
    q, k, _ = packed_qkv(4, 8, 2, 64)
    at = (cos[:, positions.long()], sin[:, positions.long()])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *at)
    for ours, theirs in zip(rotary(q, k, positions), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=2e-6, rtol=0)


def test_rotary_embedding_refuses_odd_heads() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be even.* 15"):
        RotaryEmbedding(15, 64, RopeParameters(10000.0), device=torch.get_default_device())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (1, 2), (0, 8)])
def test_silu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    assert_matches(silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype)


def test_silu_and_mul_at_the_extremes() -> None:
    x = torch.tensor([[100.0, -100.0, 0.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(silu_and_mul(x), torch.tensor([[200.0, 0.0, 0.0]]))
