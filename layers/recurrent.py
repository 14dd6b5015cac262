"""RecurrentLayer: a layer that keeps a state of fixed size of each sequence, in the place of attention."""

# Tests: tests/models/test_hybrid.py

from __future__ import annotations

from layers.sublayer import Sublayer


class RecurrentLayer(Sublayer):
    """`layer_id` counts the layers that keep states. `forward` writes those that the pass's rows leave."""

    layer_id: int
