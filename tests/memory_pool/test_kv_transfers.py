"""Copies of KV that are booked: their order, and what is merged."""

from __future__ import annotations

from collections import deque

import numpy as np

from memory_pool.kv_transfers import KVTransfer, KVTransfers


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def shown(transfers: deque[KVTransfer]) -> list[tuple[bool, list[int], list[int]]]:
    return [(t.to_host, t.device_slots.tolist(), t.host_slots.tolist()) for t in transfers]


def test_neighbours_of_one_direction_are_one_transfer() -> None:
    transfers = KVTransfers()
    transfers.store(ids(5, 6), ids(1, 2))
    transfers.store(ids(7), ids(3))
    transfers.load(ids(2), ids(5))
    transfers.load(ids(1), ids(9))
    transfers.store(ids(8), ids(1))
    assert shown(transfers.take()) == [
        (True, [5, 6, 7], [1, 2, 3]),
        (False, [5, 9], [2, 1]),
        (True, [8], [1]),
    ]
    assert not transfers.take()


def test_a_target_that_is_written_twice_gets_the_last() -> None:
    transfers = KVTransfers()
    transfers.store(ids(5), ids(1))
    transfers.store(ids(6), ids(1))
    assert shown(transfers.take()) == [(True, [5], [1]), (True, [6], [1])]


def test_what_is_given_back_comes_first() -> None:
    transfers = KVTransfers()
    for slot in (1, 2):
        transfers.store(ids(slot), ids(slot))
        transfers.load(ids(slot), ids(slot + 4))
    taken = transfers.take()
    taken.popleft()  # made
    transfers.store(ids(9), ids(9))
    transfers.give_back(taken)
    assert [t.sources.tolist() for t in transfers.take()] == [[1], [2], [2], [9]]
