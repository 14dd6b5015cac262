"""Norms, rotary embedding, gated activations and soft caps against float64, and against transformers bit by
bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from layers.rotary import RopeParameters, RotaryEmbedding
from radixrt.models.rope import read_rope
from tests.support.attention_cases import packed_qkv
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.kv.rope import apply_rotary
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm
from triton_ops.norms.rms_norm_fp32_weight import add_rms_norm_fp32_weight, rms_norm_fp32_weight

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
    assert torch.equal(rms_norm(x, reference.weight.data, 1e-5, impl="torch"), reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_fp32_weight(dtype: torch.dtype, offset: float) -> None:
    x, residual = random(5, 32, dtype=dtype), random(5, 32, dtype=dtype, seed=1)
    weight = random(32, dtype=dtype, seed=2)

    def dense(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (offset + weight.double())

    assert_matches(rms_norm_fp32_weight(x, weight, 1e-5, offset=offset), dense(x.double()), dtype)
    normed, total = add_rms_norm_fp32_weight(x, residual, weight, 1e-5, offset=offset)
    assert torch.equal(total, x + residual)
    assert_matches(normed, dense(total.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("reference", "offset"), [(Olmo2RMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_rms_norm_fp32_weight_rounds_as_transformers(dtype: torch.dtype, reference: Any, offset: float) -> None:
    norm = reference(64, eps=1e-5).to(dtype)
    norm.weight.data.copy_(random(64))
    x = random(33, 64, dtype=dtype, seed=3)
    assert torch.equal(rms_norm_fp32_weight(x, norm.weight.data, 1e-5, offset=offset, impl="torch"), norm(x))


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
    for x, rotated in zip((q, k), apply_rotary(q, k, rotary.cos_sin_cache, positions), strict=True):
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rotary_keeps_the_rest_of_a_head(dtype: torch.dtype) -> None:
    q, k, _ = (x.to(dtype) for x in packed_qkv(6, 4, 2, 32))
    cache, positions = random(9, 12), torch.tensor([8, 0, 1, 2, 3, 3], dtype=torch.int32)
    whole = apply_rotary(q[..., :12], k[..., :12], cache, positions)
    for x, rotated, first in zip((q, k), apply_rotary(q, k, cache, positions), whole, strict=True):
        assert torch.equal(rotated[..., :12], first)
        assert torch.equal(rotated[..., 12:], x[..., 12:])


# rope_parameters, max_position_embeddings, head_dim. Lengths, factors and thetas of released models.
ROPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "default": ({"rope_type": "default", "rope_theta": 500000.0}, 9000, 64),
    "partial": ({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}, 9000, 128),
    "linear": ({"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}, 9000, 64),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 9000, 64),
    "dynamic, longer": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 3000, 64),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        9000,
        64,
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        9000,
        128,
    ),
    "yarn, all parameters": (
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
        9000,
        64,
    ),
    "yarn, attention factor": (
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 0.8,
        },
        9000,
        64,
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + i / 32 for i in range(24)],
            "long_factor": [1.0 + i * i / 8 for i in range(24)],
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
        },
        9000,
        64,
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_embedding_is_that_of_transformers(name: str) -> None:
    """For a context of 9000: transformers' tables for a sequence that fills it."""
    parameters, max_length, head_dim = ROPES[name]
    config = Phi3Config if parameters["rope_type"] == "longrope" else LlamaConfig
    own = {"original_max_position_embeddings": 4096} if config is Phi3Config else {"head_dim": head_dim}
    source = config(
        hidden_size=8 * head_dim,
        num_attention_heads=8,
        max_position_embeddings=max_length,
        rope_parameters=dict(parameters),
        pad_token_id=0,
        **own,
    )
    # LlamaRotaryEmbedding knows no partial rotary; Phi-3's is the same but for that.
    embedding = Phi3RotaryEmbedding if "partial_rotary_factor" in parameters else LlamaRotaryEmbedding
    with torch.device("cpu"):  # a GPU's powers differ in their last bits, which position 9000 enlarges
        cos, sin = embedding(source)(torch.zeros(1), torch.arange(9000)[None])
    cos, sin = cos.to(torch.get_default_device()), sin.to(torch.get_default_device())
    half = cos.shape[-1] // 2
    rope = read_rope(source.rope_parameters, head_dim, max_length)
    rotary = RotaryEmbedding(head_dim, 9000, rope, device=torch.get_default_device())
    ours_cos, ours_sin = rotary.cos_sin_cache.chunk(2, dim=-1)
    # transformers computes a dynamic theta in float32, where we keep a Python float.
    tolerance = 2e-3 if name == "dynamic, longer" else 2e-7
    torch.testing.assert_close(ours_cos, cos[0, :, :half], atol=tolerance, rtol=0)
    torch.testing.assert_close(ours_sin, sin[0, :, :half], atol=tolerance, rtol=0)
    # Positions in any order, against transformers' own formula.
    positions = torch.tensor([8999, 17, 0, 4096], dtype=torch.int32)
    q, k, _ = packed_qkv(4, 8, 2, head_dim)
    at = (cos[:, positions.long()], sin[:, positions.long()])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *at)
    for ours, theirs in zip(apply_rotary(q, k, rotary.cos_sin_cache, positions), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=2e-6 + 4 * tolerance, rtol=0)


def test_rotary_embedding_refuses_odd_heads() -> None:
    with pytest.raises(ValueError, match=r"must be even and at most head_dim 15, but is 15"):
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (1, 2), (0, 8)])
def test_gelu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
    assert_matches(gelu_and_mul(x, approximate="none"), exact * up, dtype)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    assert_matches(gelu_and_mul(x, approximate="tanh"), gate / 2 * (1 + torch.tanh(inner)) * up, dtype)


def test_the_two_kinds_of_gelu_differ() -> None:
    x = random(50, 2) * 2
    difference = gelu_and_mul(x, approximate="none") - gelu_and_mul(x, approximate="tanh")
    assert 1e-5 < difference.abs().max() < 1e-2


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul_at_the_extremes(approximate: Any) -> None:
    x = torch.tensor([[100.0, -100.0, 0.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(gelu_and_mul(x, approximate=approximate), torch.tensor([[200.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(dtype: torch.dtype) -> None:
    x = random(50, dtype=dtype) * 40
    assert_matches(soft_cap(x, 30.0, impl="torch"), 30 * torch.tanh(x.double() / 30), dtype)
    extreme = torch.tensor([1e4, -1e4, 6e4, 0.0], dtype=dtype)
    assert torch.equal(soft_cap(extreme, 30.0), torch.tensor([30.0, -30.0, 30.0, 0.0], dtype=dtype))
