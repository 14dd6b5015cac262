"""States of sequences: views of one allocation, and what they take."""

from __future__ import annotations

import pytest
import torch

from memory_pool.kv_layout import KVLayout, StateLayout
from memory_pool.state_pool import HostStatePool, StatePool, as_slots
from memory_pool.token_to_kv_pool import HostKVPool, TokenToKVPool

CPU = torch.device("cpu")
STATES = StateLayout(3, (6, 4), 4, 2, 5, 6, torch.bfloat16)
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


def test_the_host_s_are_seen_as_the_device_s(device: torch.device) -> None:
    """A part of a state lies in one piece there."""
    pool = TokenToKVPool(5, LAYOUT, num_states=4, device=device)
    host = HostKVPool(9, pool, num_states=6).states
    assert isinstance(host, HostStatePool)
    conv, recurrent = host.parts
    assert (conv.shape, conv.dtype) == ((3, 6, 10, 3), torch.bfloat16)
    assert (recurrent.shape, recurrent.dtype) == ((3, 6, 2, 5, 6), torch.float32)
    assert conv[0, 2].data_ptr() == conv.data_ptr() + 2 * 3 * 30 * 2
    assert all(part.is_pinned() == (device.type == "cuda") for part in host.parts)
    assert host.allocator.capacity == 5
    conv_alone = KVLayout(1, 2, 8, torch.float16, StateLayout(3, (6, 4), 4, 0, 5, 6, torch.bfloat16))
    assert HostKVPool(9, TokenToKVPool(5, conv_alone, device=device)).states is not None
    plain = TokenToKVPool(5, KVLayout(1, 2, 8, torch.float16), device=device)
    assert HostKVPool(9, plain, num_states=6).states is None


@pytest.mark.parametrize("shape", [(3, 7, 3, 3), (2, 5, 4), (2, 5, 0, 3)])
def test_states_as_slots(shape: tuple[int, ...]) -> None:
    """A view: also of an odd number of elements, of state-major memory, and of none."""
    for part in (torch.zeros(shape).bfloat16(), torch.zeros(shape[1], shape[0], *shape[2:]).transpose(0, 1)):
        slots = as_slots(part)
        num_bytes = part[0, 0].numel() * part.itemsize
        assert slots.shape == (shape[0], 2, shape[1], 1, num_bytes // 2)
        slots[1, :, 4] = 1
        marked = torch.zeros(shape[:2], dtype=torch.bool)
        marked[1, 4] = num_bytes > 0
        assert torch.equal(part.flatten(2).ne(0).any(-1), marked)
