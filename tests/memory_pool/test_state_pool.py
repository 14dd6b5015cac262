"""States of sequences: views of one allocation, and what they take."""

from __future__ import annotations

import pytest
import torch

from memory_pool.kv_layout import KVLayout, StateLayout
from memory_pool.state_pool import StatePool
from memory_pool.token_to_kv_pool import TokenToKVPool

CPU = torch.device("cpu")
STATES = StateLayout(3, 10, 4, 2, 5, 6, torch.bfloat16)
LAYOUT = KVLayout(1, 2, 8, torch.float16, STATES)


def test_layers_are_views_of_one_allocation() -> None:
    pool = StatePool(7, STATES, device=CPU)
    pool.conv.zero_()
    pool.recurrent.zero_()
    views = [pool.view(layer) for layer in range(3)]
    assert views[0].conv.shape == (7, 10, 3)
    assert views[0].recurrent.shape == (7, 2, 5, 6)
    assert (pool.conv.dtype, pool.recurrent.dtype) == (torch.bfloat16, torch.float32)
    views[1].conv[4] = 1.0
    views[2].recurrent[3] = 1.0
    assert [float(layer.sum()) for layer in pool.conv] == [0, 30, 0]
    assert [float(layer.sum()) for layer in pool.recurrent] == [0, 0, 60]
    assert LAYOUT.bytes_per_state == (pool.conv.nbytes + pool.recurrent.nbytes) // 7


def test_the_first_state_is_nobody_s() -> None:
    pool = StatePool(3, STATES, device=CPU)
    states = pool.allocator.alloc(2)
    assert states is not None
    assert states.tolist() == [1, 2]
    assert pool.allocator.alloc(1) is None
    with pytest.raises(ValueError, match="slot 0 is reserved"):
        StatePool(1, STATES, device=CPU)


def test_a_kv_pool_has_them_where_layers_keep_them() -> None:
    pool = TokenToKVPool(5, LAYOUT, num_states=4, device=CPU)
    assert pool.buffer.shape == (1, 2, 5, 2, 8)
    assert pool.states is not None
    assert pool.states.allocator.capacity == 3
    plain = KVLayout(1, 2, 8, torch.float16)
    assert TokenToKVPool(5, plain, num_states=4, device=CPU).states is None
    assert plain.bytes_per_state == 0
