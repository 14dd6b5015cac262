"""The states of sequences as recurrent layers read and leave them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory_pool.layout import Part
from memory_pool.pool import Pool


def state_parts(
    num_layers: int,
    conv_channels: tuple[int, ...],
    conv_width: int,
    matrices: tuple[int, int, int],
    conv_dtype: torch.dtype,
) -> tuple[Part, Part]:
    """What layers keep of a sequence: last inputs of a convolution, and a float32 matrix a head.

    Args:
        conv_channels: of each group that ranks divide by itself.
        conv_width: of the convolution, which reads `conv_width - 1` inputs before its own.
        matrices: `(num_heads, key_dim, value_dim)`; zeros where there are none.
    """
    conv = sum(conv_channels), conv_width - 1
    return (
        Part("conv", num_layers, conv, conv_dtype, conv_channels),
        Part("recurrent", num_layers, matrices, torch.float32, matrices[:1]),
    )


@dataclass(frozen=True)
class StateView:
    """A layer's part of all states.

    Attributes:
        conv: `[num_states, conv_channels, conv_width - 1]`, the last inputs of the convolution.
        recurrent: `[num_states, num_heads, key_dim, value_dim]` float32.
    """

    conv: Tensor
    recurrent: Tensor


class StatePool(Pool):
    """Memory for states, of `state_parts`. Sequences begin with state 0, which counts as zeros, whatever it holds,
    and padding leaves it.
    """

    def view(self, layer_id: int) -> StateView:
        """A layer's part; `layer_id` counts the layers that keep states."""
        return StateView(self.memory["conv"][layer_id, 0], self.memory["recurrent"][layer_id, 0])
