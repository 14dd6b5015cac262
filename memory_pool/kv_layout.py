"""What the layers of a model keep: KV of each token, and states of sequences."""

# Tests: tests/memory_pool/test_token_to_kv_pool.py, tests/memory_pool/test_state_pool.py

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateLayout:
    """The layers that keep a state of each sequence: last inputs of a convolution, and a float32 matrix a head.

    Attributes:
        num_layers: a stage's own, 0 where others of the model keep them.
        conv_parts: channels of the convolution, of each part that ranks divide by itself.
        conv_width: of the convolution, which reads `conv_width - 1` inputs before its own.
        num_heads, key_dim, value_dim: of the matrices; 0 where there are none.
        conv_dtype: of the inputs.
    """

    num_layers: int
    conv_parts: tuple[int, ...]
    conv_width: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_dtype: torch.dtype

    @property
    def conv_channels(self) -> int:
        return sum(self.conv_parts)

    @property
    def divided(self) -> dict[str, tuple[int, ...]]:
        """Channels or heads, of each part that ranks divide by itself, by the names of `parts`."""
        return {"conv": self.conv_parts, "recurrent": (self.num_heads,)}

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of what a layer keeps of a sequence, by name."""
        return {
            "conv": (self.conv_dtype, (self.conv_channels, self.conv_width - 1)),
            "recurrent": (torch.float32, (self.num_heads, self.key_dim, self.value_dim)),
        }

    @property
    def bytes_per_state(self) -> int:
        """Of one sequence's state in all layers."""
        return self.num_layers * sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.parts.values())


@dataclass(frozen=True)
class KVLayout:
    """The layers of a model that keep KV, or those of a rank's part of it: all have one shape and one dtype.

    `states` are kept by its other layers; None: the model has none of these.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    states: StateLayout | None = None

    @property
    def bytes_per_token(self) -> int:
        """Of one token's K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_state(self) -> int:
        """Of one sequence's state in all layers; 0 where none keeps one."""
        return 0 if self.states is None else self.states.bytes_per_state
