"""Tolerances for tests of norms, activations and the steps before attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The interpreter does not know bfloat16.
KERNEL_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# Two roundings apart at most.
KERNEL_TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_matches(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Kernel and torch are equal except for the order of a sum, which seldom changes how a half rounds."""
    tolerance = KERNEL_TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    if expected.dtype != torch.float32 and expected.numel() > 50:
        equal = ((actual - expected).abs() < 1e-5) | expected.isnan()
        assert equal.float().mean() > 0.97, "it rounds elsewhere"
