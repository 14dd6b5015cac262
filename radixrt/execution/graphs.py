"""Captured passes: their shapes, to the smallest of which a pass is padded, and what captures their graphs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from radixrt.schedule.passes import Features

MAX_CAPTURED_BATCH = 2048  # requests
FINE_BATCH = 512  # requests up to which sizes are close to one another
CAPTURED_DRAWS = (Features(), Features(is_random=True), Features(is_random=True, has_top=True))
TOKEN_SIZES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 14336, 16384)
# Tokens times weights. A pass of more keeps an H200 busy for longer than launching its kernels one by one takes,
# also where a server's event loop takes turns with that.
MAX_WORK = 2.1e13

Launch = Callable[[], object]
_one_at_a_time = threading.Lock()  # Runtimes of several threads capture on the same stream


@dataclass(frozen=True)
class PassShape:
    """What a pass is padded to."""

    num_tokens: int  # of extends
    num_rows: int  # decodes, and rows of logits
    num_extends: int  # all that may have two tokens or more each, and one of the padding; 0 if `num_tokens` is

    @property
    def is_decode(self) -> bool:
        """Whether each row computes one token, and samples one."""
        return not self.num_extends


def ladder(max_size: int) -> list[int]:
    """Batch sizes up to `max_size` that are captured, ascending: a batch is padded to the next of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, FINE_BATCH, 32)]
    sizes += range(FINE_BATCH, max_size, 128)
    return [*(size for size in sizes if size < max_size), max_size]


def captured_shapes(
    max_requests: int, max_tokens: int, num_weights: int, token_sizes: tuple[int, ...] = TOKEN_SIZES
) -> list[PassShape]:
    """The shapes of decodes, then those with extends, each ascending, for `max_requests` of a pass; none for 0.

    `max_tokens` of extends are among them unless they are more than all `token_sizes`. A model of many weights has
    no shapes with extends: launching a pass takes the host less time than computing it takes the GPU.
    """
    max_rows = min(max_requests, MAX_CAPTURED_BATCH)
    if not max_rows:
        return []
    sizes = {*(size for size in token_sizes if size <= max_tokens), min(max_tokens, token_sizes[-1])}
    row_sizes = {max_rows, -(-max_rows // 4), min(-(-max_rows // 4), FINE_BATCH // 4)}
    return [PassShape(0, size, 0) for size in ladder(max_rows)] + [
        PassShape(num_tokens, num_rows, min(num_tokens // 2, max_rows) + 1)
        for num_tokens in sorted(sizes)
        for num_rows in sorted(row_sizes)
        if num_tokens and (num_tokens + num_rows) * num_weights <= MAX_WORK
    ]


def largest_shapes(shapes: list[PassShape]) -> list[PassShape]:
    """Those of each kind into whose memory the others' graphs fit, in their order: no other one has as many tokens
    and rows, or more.
    """
    return [
        shape
        for shape in shapes
        if not any(
            other.is_decode == shape.is_decode
            and other.num_tokens >= shape.num_tokens
            and other.num_rows >= shape.num_rows
            for other in shapes
            if other != shape
        )
    ]


class GraphRecorder:
    """Captures CUDA graphs that never run side by side: what they need in between is in one pool of memory.

    Passes may be in flight meanwhile: torch waits for them, and gives the memory that they have left back to the
    device, before a capture begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def captured(self, compute: Launch, warm_up: Launch) -> Launch:
        """What launches a graph of `compute`, after `warm_up`, which makes all that is made on first use. Raises
        torch.OutOfMemoryError where there is no memory for it.
        """
        warm_up()
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._device)
        try:
            with (
                _one_at_a_time,
                _garbage_left_alone(),
                torch.cuda.stream(stream),  # torch's own context does not go back where a capture cannot be ended
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                compute()
        except torch.AcceleratorError as error:
            if "out of memory" in str(error):  # the driver's own, where it makes the graph ready
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return graph.replay


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """What a user's garbage frees on the device in the middle of a capture would end it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps a workspace for each stream. torch's own capture stream
    is on the device that was the current one when the first graph of the process was captured.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
