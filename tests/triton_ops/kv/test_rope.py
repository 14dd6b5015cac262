"""Rotary embedding against float64, and against transformers bit by bit."""

from __future__ import annotations

import pytest
import torch

from layers.rotary import RopeParameters
from tests.support.attention_cases import packed_qkv
from tests.support.elementwise_cases import DTYPES, TOLERANCE
from tests.support.random_tensors import random
from triton_ops.kv.rope import apply_rotary

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_rotary(dtype: torch.dtype, head_dim: int) -> None:
    """Each pair (i, i + head_dim / 2) is a complex number turned by position * theta^(-2 i / head_dim)."""
    positions = torch.tensor([0, 1, 5, 5, 63, 40], dtype=torch.int32)
    q, k, _ = (x.to(dtype) for x in packed_qkv(6, 4, 2, head_dim))
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions.double().view(-1, 1, 1) * frequencies
    cos_sin_cache = RopeParameters(10000.0).cos_sin_cache(head_dim, 64, torch.get_default_device())
    for x, rotated in zip((q, k), apply_rotary(q, k, cos_sin_cache, positions), strict=True):
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
