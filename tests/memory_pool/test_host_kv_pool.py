"""Host memory for KV: its views, and memory that cannot be locked."""

from __future__ import annotations

import pytest
import torch

from memory_pool.host_kv_pool import HostKVPool, page_lock
from memory_pool.token_to_kv_pool import TokenToKVPool

SHAPE = (2, 2, 8)  # layers, heads, elements


def test_host_pool_is_seen_as_the_device_s(device: torch.device) -> None:
    pool = TokenToKVPool(12, *SHAPE, dtype=torch.float32, device=device)
    host = HostKVPool(9, *SHAPE, dtype=torch.float32, device=device)
    assert host.buffer.shape == (2, 2, 9, 2, 8)
    assert pool.buffer.shape == (2, 2, 12, 2, 8)
    assert host.buffer.device.type == "cpu"
    assert host.buffer[:, :, 3].data_ptr() == host.buffer.data_ptr() + 3 * TokenToKVPool.bytes_per_slot(
        *SHAPE, torch.float32
    )
    rows = torch.zeros(1, 4, dtype=torch.int32, device=device)
    assert torch.equal(pool.buffer[1, 0], pool.view(1, rows).k)
    assert torch.equal(pool.buffer[0, 1], pool.view(0, rows).v)
    assert host.buffer.is_pinned() == (device.type == "cuda")
    assert host.allocator.capacity == 8


@pytest.mark.gpu
def test_memory_that_cannot_be_locked_is_nobody_elses_error() -> None:
    device = torch.device("cuda")
    pool = HostKVPool(64, 2, 2, 8, dtype=torch.float32, device=device)
    with pytest.raises(RuntimeError, match="cannot be page-locked"):
        page_lock(pool.buffer, device)  # a second time
    assert torch.arange(3, device=device).sum().item() == 3
