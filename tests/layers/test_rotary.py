"""RopeParameters against transformers' cosines and sines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from layers.rotary import RopeParameters
from radixrt.models.rope import read_rope
from tests.support.attention_cases import packed_qkv
from triton_ops.kv.rope import apply_rotary

pytestmark = pytest.mark.usefixtures("device")

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
def test_cosines_and_sines_are_those_of_transformers(name: str) -> None:
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
    cos_sin_cache = rope.cos_sin_cache(head_dim, 9000, torch.get_default_device())
    ours_cos, ours_sin = cos_sin_cache.chunk(2, dim=-1)
    # transformers computes a dynamic theta in float32, where we keep a Python float.
    tolerance = 2e-3 if name == "dynamic, longer" else 2e-7
    torch.testing.assert_close(ours_cos, cos[0, :, :half], atol=tolerance, rtol=0)
    torch.testing.assert_close(ours_sin, sin[0, :, :half], atol=tolerance, rtol=0)
    # Positions in any order, against transformers' own formula.
    positions = torch.tensor([8999, 17, 0, 4096], dtype=torch.int32)
    q, k, _ = packed_qkv(4, 8, 2, head_dim)
    at = (cos[:, positions.long()], sin[:, positions.long()])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *at)
    for ours, theirs in zip(apply_rotary(q, k, cos_sin_cache, positions), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=2e-6 + 4 * tolerance, rtol=0)


def test_odd_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be even and at most head_dim 15, but is 15"):
        RopeParameters(10000.0).cos_sin_cache(15, 64, torch.get_default_device())
