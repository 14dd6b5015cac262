"""Times of GPU work: eager with the L2 cache flushed, and as a captured graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from radixrt.bench.kernels.roofline import EXPS_PER_SM, Machine

WARM_UP_MS = 25
GRAPH_SECONDS = 2e-3  # of work in a captured graph, so that its launch does not count
MAX_CALLS = 256  # in a captured graph
MAX_SETS = 64  # of inputs


class Timer(Protocol):
    """Seconds of one call."""

    def eager(self, call: Callable[[], object]) -> float:
        """Each call by itself, with nothing of its inputs in the L2 cache; median."""
        ...

    def graph(self, calls: Sequence[Callable[[], object]], eager_seconds: float) -> float:
        """One of `calls`, all captured in one graph, one after the other; median of many replays.

        The calls do the same on different tensors; `eager_seconds` is what one took.
        """
        ...


class CudaTimer:
    """The times on the current CUDA device, each from about `measure_seconds` of calls."""

    def __init__(self, measure_seconds: float = 0.1) -> None:
        self.measure_seconds = measure_seconds

    def eager(self, call: Callable[[], object]) -> float:
        """As Triton's do_bench has it: the L2 cache is overwritten before each call."""
        from triton.testing import do_bench  # Triton is for Linux alone

        milliseconds = do_bench(
            call, warmup=WARM_UP_MS, rep=round(1e3 * self.measure_seconds), return_mode="median"
        )
        return float(milliseconds) / 1e3

    def graph(self, calls: Sequence[Callable[[], object]], eager_seconds: float) -> float:
        """A graph holds whole rounds of the calls, about GRAPH_SECONDS in all."""
        rounds = max(1, round(GRAPH_SECONDS / (eager_seconds * len(calls))))
        rounds = min(rounds, max(1, MAX_CALLS // len(calls)))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # whatever is made on first use
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        num_calls = rounds * len(calls)
        replays = min(200, max(10, math.ceil(self.measure_seconds / (eager_seconds * num_calls))))
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            graph.replay()
            ended.record()
            times.append((began, ended))
        torch.cuda.synchronize()
        milliseconds: float = median(began.elapsed_time(ended) for began, ended in times)
        return milliseconds / 1e3 / num_calls


def measure_machine(timer: Timer, device: torch.device) -> Machine:
    """What this GPU does now: a copy of 1 GiB, within its memory and both ways to pinned host memory, and a bf16
    product of 8192 x 8192 matrices.
    """
    source = torch.zeros(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = timer.eager(lambda: target.copy_(source))
    host = torch.zeros(2**30, dtype=torch.uint8, device="cpu", pin_memory=True)
    to_device_seconds = timer.eager(lambda: target.copy_(host, non_blocking=True))
    to_host_seconds = timer.eager(lambda: host.copy_(source, non_blocking=True))
    matrices = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=device)

    def product() -> Tensor:
        return matrices[0] @ matrices[1]

    product_seconds = timer.eager(product)
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        name=properties.name,
        bandwidth=2 * 2**30 / copy_seconds,
        flops=2 * 8192**3 / product_seconds,
        exps=EXPS_PER_SM * properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        host_to_device=2**30 / to_device_seconds,
        device_to_host=2**30 / to_host_seconds,
    )


def copies_beyond_l2(num_bytes: float, l2_bytes: int) -> int:
    """How many sets of inputs a graph has to go through so that none is still in L2 when its turn comes: twice
    the cache, at most MAX_SETS.
    """
    return min(MAX_SETS, max(1, math.ceil(2 * l2_bytes / num_bytes)))
