"""Copies of KV that are booked: their order, and what is merged."""

from __future__ import annotations

from collections import deque

import numpy as np

from memory_pool.kv_transfers import KVTransfer, KVTransfers


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def store(device_slots: np.ndarray, host_slots: np.ndarray) -> KVTransfer:
    return KVTransfer(True, device_slots, host_slots)


def load(host_slots: np.ndarray, device_slots: np.ndarray) -> KVTransfer:
    return KVTransfer(False, host_slots, device_slots)


def shown(transfers: deque[KVTransfer]) -> list[tuple[bool, list[int], list[int]]]:
    return [(t.to_host, t.sources.tolist(), t.targets.tolist()) for t in transfers]


def test_neighbours_of_one_direction_are_one_transfer() -> None:
    transfers = KVTransfers()
    transfers.book(store(ids(5, 6), ids(1, 2)))
    transfers.book(store(ids(7), ids(3)))
    transfers.book(load(ids(2), ids(5)))
    transfers.book(load(ids(1), ids(9)))
    transfers.book(store(ids(8), ids(1)))
    assert shown(transfers.take()) == [
        (True, [5, 6, 7], [1, 2, 3]),
        (False, [2, 1], [5, 9]),
        (True, [8], [1]),
    ]
    assert not transfers.take()


def test_states_have_an_order_of_their_own() -> None:
    """None of KV comes between two that can be one."""
    transfers = KVTransfers()
    transfers.book(KVTransfer(True, ids(5), ids(1), of_states=True))
    transfers.book(store(ids(5), ids(1)))
    transfers.book(KVTransfer(True, ids(6), ids(2), of_states=True))
    transfers.book(KVTransfer(False, ids(2), ids(5), of_states=True))
    transfers.book(store(ids(6), ids(2)))
    taken = transfers.take()
    assert shown(taken) == [(True, [5, 6], [1, 2]), (True, [5, 6], [1, 2]), (False, [2], [5])]
    assert [transfer.of_states for transfer in taken] == [False, True, True]


def test_a_target_that_is_written_twice_gets_the_last() -> None:
    transfers = KVTransfers()
    transfers.book(store(ids(5), ids(1)))
    transfers.book(store(ids(6), ids(1)))
    assert shown(transfers.take()) == [(True, [5], [1]), (True, [6], [1])]


def test_what_is_given_back_comes_first() -> None:
    transfers = KVTransfers()
    for slot in (1, 2):
        transfers.book(store(ids(slot), ids(slot)))
        transfers.book(load(ids(slot), ids(slot + 4)))
    taken = transfers.take()
    taken.popleft()  # made
    transfers.book(store(ids(9), ids(9)))
    transfers.give_back(taken)
    assert [t.sources.tolist() for t in transfers.take()] == [[1], [2], [2], [9]]
