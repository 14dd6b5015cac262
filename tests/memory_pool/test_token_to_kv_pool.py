"""The KV of tokens: one allocation, seen layer by layer."""

from __future__ import annotations

import torch

from memory_pool.token_to_kv_pool import TokenToKVPool


def test_buffers_are_views_of_one_allocation() -> None:
    pool = TokenToKVPool(5, 3, 2, 4, dtype=torch.float16, device=torch.device("cpu"))
    assert TokenToKVPool.bytes_per_slot(3, 2, 4, torch.float16) == 2 * 3 * 2 * 4 * 2
    pool.fill(0.0)
    rows = torch.zeros(1, 4, dtype=torch.int32)
    views = [pool.view(layer, rows) for layer in range(3)]
    views[1].k[2] = 1.0
    views[2].v[4] = 2.0
    assert views[0].k.shape == (5, 2, 4)
    assert views[0].k.untyped_storage().data_ptr() == views[2].v.untyped_storage().data_ptr()
    assert [float(view.k.sum()) for view in views] == [0, 8, 0]
    assert [float(view.v.sum()) for view in views] == [0, 0, 16]
    assert views[1].req_to_token is rows
