"""The table of positions to slots, and the changes that a device is sent."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest

from memory_pool.req_to_token_pool import ReqToTokenPool, sparse_table


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


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


def test_changes_that_never_arrived_come_again_before_newer_ones() -> None:
    rows = ReqToTokenPool(1, 6)
    row = rows.alloc()
    rows.write(row, 0, ids(1, 2))
    lost = rows.take_changes()
    rows.write(row, 2, ids(3))
    rows.give_back(lost)
    assert rows.take_changes().slots.tolist() == [1, 2, 3]


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
