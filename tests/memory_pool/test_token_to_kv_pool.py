"""The KV of tokens: one allocation, seen layer by layer."""

from __future__ import annotations

import torch

from memory_pool.token_to_kv_pool import TokenToKVPool


def test_buffers_are_views_of_one_allocation() -> None:
    pool = TokenToKVPool(5, 3, 2, 4, dtype=torch.float16, device=torch.device("cpu"))
    assert TokenToKVPool.bytes_per_slot(3, 2, 4, torch.float16) == 2 * 3 * 2 * 4 * 2
    pool.fill(0.0)
    pool.k_buffer(1)[2] = 1.0
    pool.v_buffer(2)[4] = 2.0
    assert pool.k_buffer(0).shape == (5, 2, 4)
    assert pool.k_buffer(0).untyped_storage().data_ptr() == pool.v_buffer(2).untyped_storage().data_ptr()
    assert [float(pool.k_buffer(i).sum()) for i in range(3)] == [0, 8, 0]
    assert [float(pool.v_buffer(i).sum()) for i in range(3)] == [0, 0, 16]
