"""Free lists refuse what would corrupt them, and the table reports exactly what has changed."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from memory_pool.sparse_table import sparse_table
from memory_pool.token_to_kv_pool import TokenToKVPool


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_slots_are_handed_out_in_ascending_runs_and_never_slot_0() -> None:
    slots = SlotAllocator(8)
    assert slots.capacity == slots.num_free == 7
    assert slots.alloc(3).tolist() == [1, 2, 3]
    assert slots.alloc(0).tolist() == []
    assert slots.alloc(5) is None
    assert slots.num_free == 4
    assert slots.alloc(4).tolist() == [4, 5, 6, 7]


def test_with_nothing_in_use_slots_are_handed_out_in_ascending_runs_again() -> None:
    """Whatever the order in which they came back."""
    slots = SlotAllocator(8)
    first, second = slots.alloc(4), slots.alloc(3)
    slots.free(first[::-2])
    slots.free(second)
    scattered = slots.alloc(5)
    assert scattered.tolist() != sorted(scattered.tolist()), "while some are in use, the last to come goes first"
    slots.free(scattered)
    slots.free(first[[0, 2]])
    assert slots.num_free == slots.capacity
    again = slots.alloc(7)
    assert again.tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ids(0), "slots from 0 to 0 are not all in 1..7"),
        (ids(8), "slots from 8 to 8"),
        (ids(-1, 1), "slots from -1 to 1"),
        (ids(1, 5), r"free already: \[5\]"),
        (ids(2, 1, 2), r"twice in one call: \[2\]"),
    ],
)
def test_freeing_what_is_not_owned_raises_and_changes_nothing(wrong: np.ndarray, message: str) -> None:
    slots = SlotAllocator(8)
    slots.alloc(3)
    with pytest.raises(ValueError, match=message):
        slots.free(wrong)
    assert slots.num_free == 4
    slots.free(ids(3, 1, 2))
    assert sorted(slots.free_slots().tolist()) == [1, 2, 3, 4, 5, 6, 7]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_the_free_list_is_the_complement_of_what_is_held(actions: list[tuple[bool, int]]) -> None:
    slots = SlotAllocator(20)
    held: list[int] = []
    for allocate, count in actions:
        if allocate:
            got = slots.alloc(count)
            assert (got is None) == (count > 19 - len(held))
            held += [] if got is None else got.tolist()
        else:
            slots.free(ids(*held[:count]))
            held = held[count:]
        assert sorted(held + slots.free_slots().tolist()) == list(range(1, 20))


def test_sizes_that_hold_nothing() -> None:
    with pytest.raises(ValueError, match="num_slots is 1"):
        SlotAllocator(1)
    with pytest.raises(ValueError, match="cannot allocate -1 slots"):
        SlotAllocator(4).alloc(-1)
    with pytest.raises(ValueError, match="0 requests by 5 positions"):
        ReqToTokenPool(0, 5)


def test_rows_and_their_changes() -> None:
    rows = ReqToTokenPool(2, 6)
    first, second = rows.alloc(), rows.alloc()
    assert {first, second} == {0, 1}
    assert rows.alloc() is None
    rows.write(first, 1, ids(11, 12))
    rows.write_each(ids(first, second), ids(3, 0), ids(13, 21))
    assert rows.req_to_token[first].tolist() == [0, 11, 12, 13, 0, 0]
    changes = rows.take_changes()
    assert len(changes) == 4
    table = np.zeros((2, 6), dtype=np.int32)
    table[changes.rows, changes.positions] = changes.slots
    assert np.array_equal(table, rows.req_to_token)
    assert len(rows.take_changes()) == 0


def test_changes_of_a_freed_row_are_dropped_and_those_of_others_are_not() -> None:
    rows = ReqToTokenPool(2, 6)
    first, second = rows.alloc(), rows.alloc()
    rows.write(first, 0, ids(1, 2))
    rows.write_each(ids(first, second), ids(2, 0), ids(3, 4))
    rows.write(second, 1, ids(5, 6))
    rows.free(first)
    changes = rows.take_changes()
    assert (changes.rows.tolist(), changes.positions.tolist()) == ([second] * 3, [0, 1, 2])
    assert changes.slots.tolist() == [4, 5, 6]
    for row in (first, -1, 2):
        with pytest.raises(ValueError, match=f"freeing row {row}, which is not in use"):
            rows.free(row)


def test_a_sparse_table_takes_memory_where_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    table = sparse_table(64, 2**20)
    table[:, 0] = 1
    assert table.nbytes == 2**28
    assert process.memory_info().rss - before < table.nbytes // 8
    assert not table[:, 1].any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_sparse_table_is_a_process_s_own() -> None:
    table = sparse_table(2, 3)
    child = os.fork()
    if not child:
        table[1, 1] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert not table.any()


def test_changes_that_never_arrived_come_again_before_newer_ones() -> None:
    rows = ReqToTokenPool(1, 6)
    row = rows.alloc()
    rows.write(row, 0, ids(1, 2))
    lost = rows.take_changes()
    rows.write(row, 2, ids(3))
    rows.give_back(lost)
    assert rows.take_changes().slots.tolist() == [1, 2, 3]


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
