"""Soft capping of attention scores and logits (Gemma 2, Google DeepMind, 2024)."""

from __future__ import annotations

from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, in x's dtype: about x near 0, within -cap and cap however large x is."""
    return (x / cap).tanh_().mul_(cap)
