"""A large table of which little is used. Numpy only."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray


def sparse_table(num_rows: int, num_columns: int) -> NDArray[np.int32]:
    """Zeros `[num_rows, num_columns]` int32, at least one: memory is taken page by page where they are written.

    np.zeros asks for huge pages: then the first cells of all rows take, and clear, nearly the whole table.
    """
    num_bytes = 4 * num_rows * num_columns
    if sys.platform == "win32":
        memory = mmap.mmap(-1, num_bytes)
    else:  # private: a process that is forked has a table of its own
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel that has no huge pages does not know them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32).reshape(num_rows, num_columns)
