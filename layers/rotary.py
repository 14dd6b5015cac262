"""Rotary position embedding and the kinds of frequency scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triton_ops.rotary import apply_rotary


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between
    blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, inv_freq: Tensor) -> Tensor:
        wavelengths = 2 * math.pi / inv_freq
        longest = self.original_max_position_embeddings / self.low_freq_factor
        shortest = self.original_max_position_embeddings / self.high_freq_factor
        kept = (self.original_max_position_embeddings / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - kept) * inv_freq / self.factor + kept * inv_freq
        return torch.where(
            wavelengths > longest,
            inv_freq / self.factor,
            torch.where(wavelengths < shortest, inv_freq, blended),
        )


@dataclass(frozen=True)
class RopeParameters:
    """Base of the geometric series of frequencies, and how they are scaled (None: the default rope)."""

    theta: float
    scaling: Llama3Scaling | None = None


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions; one serves all layers of a model."""

    def __init__(self, head_dim: int, max_position: int, rope: RopeParameters, *, device: torch.device) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated, but is {head_dim}")
        # In float32, on the CPU: the same angles on every device, and the same as transformers'.
        inv_freq = 1.0 / (
            rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
        )
        if rope.scaling is not None:
            inv_freq = rope.scaling.scale(inv_freq)
        angles = torch.arange(max_position, dtype=torch.float32, device="cpu").unsqueeze(1) * inv_freq
        self.cos_sin_cache = nn.Buffer(torch.cat([angles.cos(), angles.sin()], dim=-1).to(device))

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k `[T, heads, head_dim]` rotated by `positions` int32 `[T]`, each below
        `max_position`.
        """
        return apply_rotary(q, k, self.cos_sin_cache, positions)
