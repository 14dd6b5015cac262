"""What the device does, from torch's profiler: how long it is busy, and with which kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from radixrt.bench.throughput.figures import KernelCost


def device_profiler() -> Any:
    """A profiler of what runs on the GPU alone: it costs the host little."""
    return profile(activities=[ProfilerActivity.CUDA])


def full_profiler(device: torch.device) -> Any:
    """A profiler of the host's operators too."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *on_gpu])


def busy_seconds(intervals: Iterable[tuple[int, int]]) -> float:
    """How long at least one of the intervals lasts; they are (start, end) in nanoseconds, in any order."""
    busy, reached = 0, 0
    for start, end in sorted(intervals):
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e9


def device_intervals(profiler: Any) -> list[tuple[int, int]]:
    """(start, end) in nanoseconds of each kernel and copy that ran on the GPU under a profiler."""
    return [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in _device_events(profiler)]


def costs(profiler: Any, steps: int, device: torch.device) -> tuple[KernelCost, ...]:
    """Kernels and copies by time per step, the dearest first; on a CPU, operators without those they call."""
    totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    if device.type == "cuda":
        for event in _device_events(profiler):
            seconds, calls = totals[event.name()]
            totals[event.name()] = seconds + event.duration_ns() / 1e9, calls + 1
    else:
        for operator in profiler.key_averages():
            totals[operator.key] = operator.self_cpu_time_total / 1e6, operator.count
    listed = [KernelCost(name, seconds / steps, calls / steps) for name, (seconds, calls) in totals.items()]
    return tuple(sorted(listed, key=lambda cost: -cost.seconds))


def _device_events(profiler: Any) -> list[Any]:
    return [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    ]
