"""A large table of which little is used."""

from __future__ import annotations

import os

import psutil
import pytest

from memory_pool.sparse_table import sparse_table


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
