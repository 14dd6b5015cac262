"""Copies on the host: their numbers, and the memory that they use one after the other."""

from __future__ import annotations

import pytest
import torch

from radixrt.execution.in_flight import MIN_BYTES, HostCopies


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool])
@pytest.mark.parametrize("shape", [(0,), (1,), (300,), (7, 5), (4, 0)])
def test_a_copy_has_the_numbers_of_its_tensor(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    copies, tensor = HostCopies(device), torch.randint(0, 2, shape).to(dtype)
    copy = copies.start(tensor)
    wait_for(device)
    taken = copies.take(copy)
    assert taken.shape == shape
    assert taken.tolist() == tensor.tolist()


def test_memory_is_used_again_after_its_copy_was_taken(device: torch.device) -> None:
    copies = HostCopies(device)
    held = copies.start(torch.ones(MIN_BYTES // 4, dtype=torch.int32))
    for value in range(5):
        other = copies.start(torch.full((3,), value, dtype=torch.int32))
        wait_for(device)
        assert copies.take(other).tolist() == [value] * 3
    assert copies.num_allocated == 2
    first = copies.take(held)
    copies.take(copies.start(torch.full((2,), 9, dtype=torch.int32)))
    assert first.tolist() == [1] * (MIN_BYTES // 4)  # in memory of its own
    assert copies.num_allocated == 2
