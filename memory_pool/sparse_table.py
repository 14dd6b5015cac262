"""Large tables that are mostly unused. Numpy only."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray


def sparse_table(num_rows: int, num_columns: int) -> NDArray[np.int32]:
    """Zeros `[num_rows, num_columns]` int32, at least one, whose memory is taken page by page as they are written.

    np.zeros requests huge pages, with which the first cells of all rows would take nearly the whole table.
    """
    num_bytes = 4 * num_rows * num_columns
    if sys.platform == "win32":
        memory = mmap.mmap(-1, num_bytes)
    else:  # private, so that a forked process has its own table
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32).reshape(num_rows, num_columns)
