"""The free list of KV slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator


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
