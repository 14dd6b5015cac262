"""Pauses in long loops: with them other threads need not wait 5 ms, Python's default, for the interpreter."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

BETWEEN = 16  # items between two pauses

T = TypeVar("T")


def with_pauses(items: Iterable[T]) -> Iterator[T]:
    """The items; after every few this thread lets go of the interpreter."""
    for place, item in enumerate(items, 1):
        yield item
        if place % BETWEEN == 0:
            time.sleep(1e-5)  # 0 would hand it to nobody
