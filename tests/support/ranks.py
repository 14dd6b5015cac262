"""Ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from layers.ranks import Ranks

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` gives on each of `size` ranks, in their order. An error on one of them is raised."""
    store, groups = HashStore(), list[ProcessGroupGloo]()  # which stay until all are connected and have ended

    def run(rank: int) -> T:
        group = ProcessGroupGloo(PrefixStore("ranks", store), rank, size, timedelta(seconds=60))
        groups.append(group)
        with torch.inference_mode():
            return work(Ranks(rank, size, group))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
