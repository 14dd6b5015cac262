"""The sigmoid of gates."""

# Tests: tests/triton_ops/test_row_bits.py

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor, *, deterministic: bool = False) -> Tensor:
    """`1 / (1 + exp(-x))` in x's shape and dtype, rounded once, by torch. `deterministic`: see `silu_and_mul`."""
    if not deterministic or x.device.type != "cpu":
        return torch.sigmoid(x)
    return (1.0 / (-x.float()).exp_().add_(1.0)).to(x.dtype)
