"""Configs of models some of whose layers keep a state of each sequence in the place of keys and values."""

# Tests: tests/models/test_hybrid.py

from __future__ import annotations

from dataclasses import dataclass

from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """A family sets `recurrent_type`, and overrides `state_layout` and `recurrent_weights`."""

    def check(self) -> None:
        super().check()
        if all(kind.is_recurrent for kind in self.attention):
            raise ModelError(f"none of the {self.num_layers} layers has attention, which is not supported")
