"""Rotary position embedding (Su et al., "RoFormer", 2021) and the kinds of frequency scaling.

A scaling extends a model's positions beyond those of its training. Its `frequencies` are float32
`[rotary_dim // 2]` on the CPU; `attention_factor` is a factor on cosines and sines. Frequencies may depend on the
context length, never on the length of a sequence: a key in the pool means the same whenever it was computed.

All numbers are computed in float32 on the CPU, in transformers' order of operations: at far positions the last bit
of a frequency matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn


def _powers(theta: float, rotary_dim: int) -> Tensor:
    """`theta^(2 i / rotary_dim)`, whose reciprocals are RoFormer's frequencies: float32 `[rotary_dim // 2]`."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return torch.pow(theta, exponents)


@dataclass(frozen=True)
class LinearScaling:
    """All positions divided by `factor` (Chen et al., "Position interpolation", 2023)."""

    factor: float
    attention_factor = 1.0

    def frequencies(self, theta: float, rotary_dim: int, context_length: int) -> Tensor:
        return 1.0 / _powers(theta, rotary_dim) / self.factor


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: a greater theta for sequences longer than `original_max_position_embeddings`.

    transformers chooses theta for the length of each sequence, which would make cached keys stale. Here it is
    chosen once, as transformers chooses it for a sequence that fills the context.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor = 1.0

    def frequencies(self, theta: float, rotary_dim: int, context_length: int) -> Tensor:
        stretch = max(1.0, context_length / self.original_max_position_embeddings)
        greater = (self.factor * stretch - (self.factor - 1)) ** (rotary_dim / (rotary_dim - 2))
        return 1.0 / _powers(theta * greater, rotary_dim)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, others blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor = 1.0

    def frequencies(self, theta: float, rotary_dim: int, context_length: int) -> Tensor:
        inv_freq, original = 1.0 / _powers(theta, rotary_dim), self.original_max_position_embeddings
        wavelengths = 2 * math.pi / inv_freq
        kept = (original / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - kept) * inv_freq / self.factor + kept * inv_freq
        others = torch.where(wavelengths < original / self.high_freq_factor, inv_freq, blended)
        return torch.where(wavelengths > original / self.low_freq_factor, inv_freq / self.factor, others)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): pairs that turn less than `beta_slow` times in the original length are
    interpolated by `factor`, pairs that turn more than `beta_fast` times are kept, with a ramp between them.

    With `truncate` the ramp's ends are whole pairs. `attention_factor`: the paper's temperature.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, theta: float, rotary_dim: int, context_length: int) -> Tensor:
        def pair_that_turns(times: float) -> float:
            turns = self.original_max_position_embeddings / (times * 2 * math.pi)
            return rotary_dim * math.log(turns) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        powers = _powers(theta, rotary_dim)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024): a factor for each pair's wavelength.

    `short_factors` are for contexts up to the original length, `long_factors` for longer ones. transformers
    chooses by the length of each sequence.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    def frequencies(self, theta: float, rotary_dim: int, context_length: int) -> Tensor:
        fits = context_length <= self.original_max_position_embeddings
        factors = self.short_factors if fits else self.long_factors
        scale = torch.tensor(factors, dtype=torch.float32, device="cpu")
        return 1.0 / (scale * _powers(theta, rotary_dim))


RopeScaling: TypeAlias = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeParameters:
    """The base of the frequencies, their scaling, and the share of a head's first elements that are rotated."""

    theta: float
    scaling: RopeScaling | None = None  # None: RoFormer's own frequencies
    partial_rotary_factor: float = 1.0

    def frequencies(self, head_dim: int, context_length: int) -> Tensor:
        """Of the pairs of elements that are rotated: float32 `[rotary_dim // 2]` on the CPU.

        Raises ValueError where they are no pairs, or more than a head has.
        """
        rotary_dim = int(head_dim * self.partial_rotary_factor)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            must_be = f"must be even and at most head_dim {head_dim}"
            raise ValueError(f"the rotated part of a head {must_be}, but is {rotary_dim}")
        if self.scaling is None:
            return 1.0 / _powers(self.theta, rotary_dim)
        return self.scaling.frequencies(self.theta, rotary_dim, context_length)

    def cos_sin_cache(self, head_dim: int, context_length: int, device: torch.device) -> nn.Buffer:
        """Cosines, then sines, of the positions below `context_length`: float32 `[context_length, rotary_dim]`."""
        positions = torch.arange(context_length, dtype=torch.float32, device="cpu")
        angles = positions.unsqueeze(1) * self.frequencies(head_dim, context_length)
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        return nn.Buffer(torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1).to(device))
