"""What families with Mamba-2 layers have in common."""

# Tests: tests/models/test_loader.py, tests/models/test_parity.py

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from layers.mamba2 import Mamba2, Mamba2Sizes
from layers.placement import Placement
from memory_pool.layout import Part
from memory_pool.state_pool import state_parts
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig


def read_dt_limits(source: Any) -> dict[str, float]:
    """Read the bounds of steps; without any, all positive ones are taken."""
    least, most = source.time_step_limit or (0.0, math.inf)
    return {"dt_min": float(least), "dt_max": float(most)}


@dataclass(frozen=True)
class Mamba2Config(ModelConfig):
    """`num_mamba_heads` to `conv_width` are those of `Mamba2Sizes`, the rest arguments of `Mamba2`."""

    recurrent_type: ClassVar[str | None] = "linear_attention"
    output_sizes: ClassVar[frozenset[str]] = ModelConfig.output_sizes | {"num_mamba_groups"}

    num_mamba_heads: int
    mamba_head_dim: int
    num_mamba_groups: int
    state_size: int
    conv_width: int
    norm_groups: int
    dt_min: float
    dt_max: float
    conv_bias: bool
    mamba_bias: bool

    @property
    def mamba_sizes(self) -> Mamba2Sizes:
        heads = self.num_mamba_heads, self.mamba_head_dim
        return Mamba2Sizes(*heads, self.num_mamba_groups, self.state_size, self.conv_width)

    def check(self) -> None:
        super().check()
        if self.keeps_states and self.num_mamba_heads % self.num_mamba_groups:
            raise ModelError(
                f"{self.num_mamba_heads} heads of Mamba-2 are not a multiple of its {self.num_mamba_groups} groups"
            )

    @property
    def widths(self) -> dict[str, int]:
        return {
            **super().widths,
            "num_mamba_heads": self.mamba_head_dim,
            "num_mamba_groups": self.state_size,
        }

    def _check_units(self, whole: ModelConfig) -> None:
        super()._check_units(whole)
        assert isinstance(whole, Mamba2Config)
        # Of the step of each head.
        name = self.inner_sizes["num_mamba_heads"]
        self._check_unit(name, self.num_mamba_heads, whole.num_mamba_heads, is_output=True)

    @property
    def recurrent_weights(self) -> int:
        sizes = self.mamba_sizes
        return self.hidden_size * (sizes.channels + 2 * sizes.values + sizes.num_heads)

    def state_parts(self, num_layers: int, dtype: torch.dtype) -> tuple[Part, ...]:
        sizes = self.mamba_sizes
        matrices = sizes.num_heads, sizes.state_size, sizes.head_dim
        return state_parts(num_layers, (*sizes.parts,), sizes.conv_width, matrices, dtype)

    def build_mamba2(self, layer_id: int, layers: range, placement: Placement) -> Mamba2:
        """The layer of that number in the model, of which there are `layers` here."""
        return Mamba2(
            self.place_of(layer_id, layers),
            self.hidden_size,
            self.mamba_sizes,
            self.rms_norm_eps,
            dt_limits=(self.dt_min, self.dt_max),
            norm_groups=self.norm_groups,
            conv_bias=self.conv_bias,
            bias=self.mamba_bias,
            placement=placement,
        )
