"""Tensors of normal numbers that are the same on all devices."""

from __future__ import annotations

import torch
from torch import Tensor


def random(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None, seed: int = 0
) -> Tensor:
    """On the default device, if none is given."""
    numbers = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device() if device is None else device, dtype)
