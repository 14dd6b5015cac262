"""Captures graphs: each is launched as a whole, and reads and writes where it did when it was captured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Launch = Callable[[], object]
_one_at_a_time = threading.Lock()  # Runtimes of several threads capture on the same stream


class GraphRecorder:
    """Captures CUDA graphs that never run side by side: what they need in between is in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def captured(self, compute: Launch, warm_up: Launch) -> Launch:
        """What launches a graph of `compute`, after `warm_up`, which makes all that is made on first use."""
        warm_up()
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._device)
        with (
            _one_at_a_time,
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            compute()
        return graph.replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps a workspace for each stream. torch's own capture stream
    is on the device that was the current one when the first graph of the process was captured.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
