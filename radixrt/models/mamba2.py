"""What families with Mamba-2 layers have in common."""

# Tests: tests/models/test_loader.py, tests/models/test_parity.py

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from layers.mamba2 import Mamba2, Mamba2Sizes
from layers.placement import Placement
from memory_pool.kv_layout import StateLayout
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig

if TYPE_CHECKING:
    from typing import Self


def read_dt_limits(source: Any) -> dict[str, float]:
    """Read the bounds of steps; without any, all positive ones are taken."""
    least, most = source.time_step_limit or (0.0, math.inf)
    return {"dt_min": float(least), "dt_max": float(most)}


@dataclass(frozen=True)
class Mamba2Config(ModelConfig):
    """`num_mamba_heads` to `conv_width` are those of `Mamba2Sizes`, the rest arguments of `Mamba2`."""

    recurrent_type: ClassVar[str | None] = "linear_attention"

    num_mamba_heads: int
    mamba_head_dim: int
    num_mamba_groups: int
    state_size: int
    conv_width: int
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

    def for_ranks(self, size: int) -> Self:
        if size > 1 and self.keeps_states:
            raise ModelError(
                f"tensor_parallel_size is {size}, but {self.told_states}, which one rank alone computes"
            )
        return super().for_ranks(size)

    def check_stages(self, count: int) -> None:
        if count > 1 and self.keeps_states:
            raise ModelError(
                f"pipeline_parallel_size is {count}, but {self.told_states}, which one stage alone computes"
            )
        super().check_stages(count)

    @property
    def recurrent_weights(self) -> int:
        sizes = self.mamba_sizes
        return self.hidden_size * (sizes.channels + 2 * sizes.values + sizes.num_heads)

    def state_layout(self, num_layers: int, dtype: torch.dtype) -> StateLayout:
        sizes = self.mamba_sizes
        matrices = sizes.num_heads, sizes.state_size, sizes.head_dim
        return StateLayout(num_layers, sizes.channels, sizes.conv_width, *matrices, dtype)

    def build_mamba2(self, layer_id: int, layers: range, *, norm_groups: int, placement: Placement) -> Mamba2:
        """The layer of that number in the model, of which there are `layers` here."""
        return Mamba2(
            self.place_of(layer_id, layers),
            self.hidden_size,
            self.mamba_sizes,
            self.rms_norm_eps,
            dt_limits=(self.dt_min, self.dt_max),
            norm_groups=norm_groups,
            conv_bias=self.conv_bias,
            bias=self.mamba_bias,
            placement=placement,
        )
