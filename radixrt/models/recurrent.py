"""Configs of models some of whose layers keep a state of each sequence in the place of keys and values."""

# Tests: tests/models/test_hybrid.py

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Of a model that one rank and one stage compute. A family sets `recurrent_type`, and overrides `state_layout`
    and `recurrent_weights`.
    """

    def check(self) -> None:
        super().check()
        if all(kind.is_recurrent for kind in self.attention):
            raise ModelError(f"none of the {self.num_layers} layers has attention, which is not supported")

    def for_ranks(self, size: int) -> Self:
        if size > 1:
            raise ModelError(
                f"tensor_parallel_size is {size}, but {self.told_states}, which one rank alone computes"
            )
        return super().for_ranks(size)

    def check_stages(self, count: int) -> None:
        if count > 1:
            raise ModelError(
                f"pipeline_parallel_size is {count}, but {self.told_states}, which one stage alone computes"
            )
