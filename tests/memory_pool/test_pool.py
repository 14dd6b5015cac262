"""Memory for KV and states: views of one allocation a part, the host's, and memory that cannot be locked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memory_pool.layout import Layout
from memory_pool.page_lock import page_lock
from memory_pool.pool import HostPool, as_slots
from memory_pool.state_pool import StatePool, state_parts
from memory_pool.token_to_kv_pool import TokenToKVPool, kv_part

CPU = torch.device("cpu")
STATES = state_parts(3, (6, 4), 4, (2, 5, 6), torch.bfloat16)
LAYOUT = Layout((kv_part(3, 2, 4, torch.float16),), STATES)
PLAIN = replace(LAYOUT, sequences=())


def test_layers_are_views_of_one_allocation() -> None:
    pool = TokenToKVPool(5, PLAIN, device=CPU)
    assert PLAIN.bytes_per_token == 2 * 3 * 2 * 4 * 2
    pool.fill(0.0)
    table = torch.zeros(1, 1, dtype=torch.int32)
    views = [pool.view(layer, table) for layer in range(3)]
    views[1].k[2] = 1.0
    views[2].v[4] = 2.0
    assert views[0].k.shape == (5, 2, 4)
    assert views[0].req_to_token is table
    assert views[0].k.untyped_storage().data_ptr() == views[2].v.untyped_storage().data_ptr()
    assert [float(view.k.sum()) for view in views] == [0, 8, 0]
    assert [float(view.v.sum()) for view in views] == [0, 0, 16]
    assert [float(layer.sum()) for layer in pool.memory["kv"][:, 1]] == [0, 0, 16]


def test_layers_are_views_of_states() -> None:
    pool = StatePool(7, STATES, device=CPU)
    pool.fill(0.0)
    conv, recurrent = pool.memory.values()
    views = [pool.view(layer) for layer in range(3)]
    assert views[0].conv.shape == (7, 10, 3)
    assert views[0].recurrent.shape == (7, 2, 5, 6)
    assert (conv.dtype, recurrent.dtype) == (torch.bfloat16, torch.float32)
    views[1].conv[4] = 1.0
    views[2].recurrent[3] = 1.0
    assert [float(layer.sum()) for layer in conv] == [0, 30, 0]
    assert [float(layer.sum()) for layer in recurrent] == [0, 0, 60]
    assert LAYOUT.bytes_per_sequence == (conv.nbytes + recurrent.nbytes) // 7


def test_the_first_state_is_nobody_s() -> None:
    """And layers that keep none have no pool."""
    pool = TokenToKVPool(5, LAYOUT, num_states=3, device=CPU).states
    assert pool is not None
    states = pool.allocator.alloc(2)
    assert states is not None
    assert states.tolist() == [1, 2]
    assert pool.allocator.alloc(1) is None
    with pytest.raises(ValueError, match="slot 0 is reserved"):
        StatePool(1, STATES, device=CPU)
    plain = TokenToKVPool(5, PLAIN, num_states=4, device=CPU)
    assert plain.states is HostPool(9, plain, num_states=6).states is None


@pytest.mark.parametrize("matrices", [(2, 5, 6), (0, 5, 6)])
def test_the_host_s_are_seen_as_the_device_s(device: torch.device, matrices: tuple[int, int, int]) -> None:
    """There a part of a token or a state lies in one piece."""
    states = state_parts(3, (6, 4), 4, matrices, torch.bfloat16)
    pool = TokenToKVPool(12, replace(LAYOUT, sequences=states), num_states=4, device=device)
    host = HostPool(9, pool, num_states=6)
    assert pool.memory["kv"].shape == (3, 2, 12, 2, 4)
    assert host.memory["kv"].shape == (3, 2, 9, 2, 4)
    for each, count in zip(host.kinds, (9, 6), strict=True):
        assert each.allocator.capacity == count - 1
        for part in each.parts:
            memory = each.memory[part.name]
            assert memory.shape == (part.num_layers, part.num_arrays, count, *part.shape)
            assert (memory.dtype, memory.device.type) == (part.dtype, "cpu")
            assert memory[:, :, 3].data_ptr() == memory.data_ptr() + 3 * part.num_bytes
            assert memory.is_pinned() == (device.type == "cuda" and memory.nbytes > 0)


@pytest.mark.gpu
def test_memory_that_cannot_be_locked_is_nobody_elses_error() -> None:
    device = torch.device("cuda")
    host = HostPool(64, TokenToKVPool(2, PLAIN, device=device))
    with pytest.raises(RuntimeError, match="cannot be page-locked"):
        page_lock(host.memory["kv"], device)  # a second time
    assert torch.arange(3, device=device).sum().item() == 3


@pytest.mark.parametrize("shape", [(3, 7, 3, 3), (2, 5, 4), (2, 5, 0, 3)])
def test_states_as_slots(shape: tuple[int, ...]) -> None:
    """A view: also of an odd number of elements, of state-major memory, and of none."""
    for part in (torch.zeros(shape).bfloat16(), torch.zeros(shape[1], shape[0], *shape[2:]).transpose(0, 1)):
        slots = as_slots(part.unsqueeze(1))
        num_bytes = part[0, 0].numel() * part.itemsize
        assert slots.shape == (shape[0], 2, shape[1], 1, num_bytes // 2)
        slots[1, :, 4] = 1
        marked = torch.zeros(shape[:2], dtype=torch.bool)
        marked[1, 4] = num_bytes > 0
        assert torch.equal(part.flatten(2).ne(0).any(-1), marked)
