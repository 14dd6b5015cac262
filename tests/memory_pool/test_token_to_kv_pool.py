"""The KV of tokens on the device and on the host: views of one allocation, and memory that cannot be locked."""

from __future__ import annotations

import pytest
import torch

from memory_pool.kv_layout import KVLayout
from memory_pool.page_lock import page_lock
from memory_pool.token_to_kv_pool import HostKVPool, TokenToKVPool

LAYOUT = KVLayout(2, 2, 8, torch.float32)


def test_layers_are_views_of_one_allocation() -> None:
    layout = KVLayout(3, 2, 4, torch.float16)
    pool = TokenToKVPool(5, layout, device=torch.device("cpu"))
    assert layout.bytes_per_token == 2 * 3 * 2 * 4 * 2
    pool.buffer.fill_(0.0)
    table = torch.zeros(1, 1, dtype=torch.int32)
    views = [pool.view(layer, table) for layer in range(3)]
    views[1].k[2] = 1.0
    views[2].v[4] = 2.0
    assert views[0].k.shape == (5, 2, 4)
    assert views[0].req_to_token is table
    assert views[0].k.untyped_storage().data_ptr() == views[2].v.untyped_storage().data_ptr()
    assert [float(view.k.sum()) for view in views] == [0, 8, 0]
    assert [float(view.v.sum()) for view in views] == [0, 0, 16]
    assert [float(layer.sum()) for layer in pool.buffer[:, 1]] == [0, 0, 16]


def test_host_pool_is_seen_as_the_device_s(device: torch.device) -> None:
    pool = TokenToKVPool(12, LAYOUT, device=device)
    host = HostKVPool(9, pool)
    assert host.buffer.shape == (2, 2, 9, 2, 8)
    assert pool.buffer.shape == (2, 2, 12, 2, 8)
    assert host.buffer.dtype == torch.float32
    assert host.buffer.device.type == "cpu"
    assert host.buffer[:, :, 3].data_ptr() == host.buffer.data_ptr() + 3 * LAYOUT.bytes_per_token
    assert host.buffer.is_pinned() == (device.type == "cuda")
    assert host.allocator.capacity == 8


@pytest.mark.gpu
def test_memory_that_cannot_be_locked_is_nobody_elses_error() -> None:
    device = torch.device("cuda")
    host = HostKVPool(64, TokenToKVPool(2, LAYOUT, device=device))
    with pytest.raises(RuntimeError, match="cannot be page-locked"):
        page_lock(host.buffer, device)  # a second time
    assert torch.arange(3, device=device).sum().item() == 3
