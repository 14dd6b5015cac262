"""`log(1 + exp(x))`, of which recurrent layers make the sizes of their steps."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import tl, triton

LINEAR_FROM = 20.0  # it is its argument from there on, as torch has it

_LINEAR_FROM: tl.constexpr = LINEAR_FROM if tl is None else tl.constexpr(LINEAR_FROM)


def softplus(x: Tensor) -> Tensor:
    """In x's dtype, of steps that torch computes alike at all places, as it does not in its own."""
    return torch.where(x > LINEAR_FROM, x, x.exp().log1p())


# --- for kernels ---


@triton.jit
def softplus_of(wide):
    """Of float32."""
    grown = tl.exp(wide)
    # What 1 + grown would round away decays the state over thousands of tokens.
    small = grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0 - grown * 0.25)))
    return tl.where(wide > _LINEAR_FROM, wide, tl.where(grown < 0.03, small, tl.log(1.0 + grown)))
