"""RecurrentLayer: a layer that keeps a state of fixed size of each sequence, in the place of attention."""

# Tests: tests/models/test_hybrid.py

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from layers.input_metadata import InputMetadata
from layers.placement import Layer
from layers.radix_attention import KVCache
from layers.ranks import Addend
from memory_pool.state_pool import StateView
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.recurrent.rows import StateRows


class RecurrentLayer(Layer):
    """`layer_id` counts the layers that keep states."""

    layer_id: int

    @property
    @abstractmethod
    def input_groups(self) -> bool | None:
        """As `Linear.input_groups`."""

    def forward(
        self,
        hidden: Tensor | QuantisedRows,
        metadata: InputMetadata,
        kv_pool: KVCache,
        *,
        split_k_ok: bool = False,
    ) -> Addend:
        """`hidden [T, hidden_size]` to the same shape, or to parts if they are allowed: see `Linear.forward`. The
        states that the pass's rows leave are written to the pool.
        """
        rows, pool = metadata.states, kv_pool.states
        assert rows is not None
        assert pool is not None
        return self.mixed(hidden, rows, pool.view(self.layer_id), split_k_ok=split_k_ok)

    @abstractmethod
    def mixed(
        self, hidden: Tensor | QuantisedRows, rows: StateRows, states: StateView, *, split_k_ok: bool = False
    ) -> Addend:
        """`forward`, of rows and this layer's part of a pool."""
