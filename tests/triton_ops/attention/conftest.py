"""Fixtures of attention tests: what runs, and what the pools hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.attention_checks import POOL, RUNS
from tests.support.interpreter import require_interpreter
from triton_ops.e4m3 import FIRST_CAPABILITY
from triton_ops.implementation import Impl, gpu_of


@pytest.fixture(scope="module", params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Impl]:
    """What the functions below run: the reference, or the kernel, on a CPU in Triton's interpreter."""
    if request.param == "triton" and device.type == "cpu":
        require_interpreter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RUNS, "impl", request.param)
        yield request.param


@pytest.fixture(scope="module", params=["plain", "e4m3"])
def pool(request: pytest.FixtureRequest, device: torch.device, impl: Impl) -> Iterator[None]:
    """What the pools of `make_case` hold: numbers of the queries' dtype, or e4m3."""
    if request.param == "e4m3" and impl == "triton" and gpu_of(device).capability < FIRST_CAPABILITY:
        pytest.skip("this GPU does not know e4m3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POOL, "e4m3", request.param == "e4m3")
        yield
