"""Measures single passes: the CPU's work in a decode step; profiles of a prefill pass and of decode steps."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from radixrt.bench.run import TEMPERATURE
from radixrt.bench.throughput.figures import KernelCost, Profile, StepTime
from radixrt.cache.radix_tree import Tokens
from radixrt.errors import RadixrtError
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import Pass
from radixrt.workloads.lists import WorkloadPrompt

T = TypeVar("T")

TIMED_STEPS, WARM_STEPS = 100, 20
STEP_REQUESTS = 512
PREFILLS_BEFORE, DECODES_PROFILED = 2, 5
NEW_TOKENS = 512  # of each request: more than measured steps
PROMPT_LEN = 32  # where only decode steps matter
MAX_PASSES = 10_000  # until all requests decode


class _Watch:
    """The last launched pass, and the seconds in the runner's `launch` and `collect` since `reset`."""

    def __init__(self) -> None:
        self.batch: Pass | None = None
        self.reset()

    def reset(self) -> None:
        self.launching = self.waiting = 0.0

    def decodes(self, requests: int) -> bool:
        """Whether the last pass was a decode step of that many requests."""
        batch = self.batch
        return batch is not None and batch.num_rows == requests and batch.num_extends == 0

    def launch(self, launch: Callable[[Pass], T], batch: Pass) -> T:
        self.batch = batch
        began = time.perf_counter()
        try:
            return launch(batch)
        finally:
            self.launching += time.perf_counter() - began

    def collect(self, collect: Callable[[Any], T], handle: Any) -> T:
        began = time.perf_counter()
        try:
            return collect(handle)
        finally:
            self.waiting += time.perf_counter() - began


def measure_step(runtime: Runtime) -> StepTime:
    """Time decode steps of STEP_REQUESTS requests, or of the Runtime's limit if that is lower.

    Raises:
        RadixrtError: the pool or the context is too small for them.
    """
    rng = np.random.default_rng(0)
    count = min(STEP_REQUESTS, runtime.limits.max_running_requests)
    prompts = rng.integers(0, runtime.config.vocab_size, (count, PROMPT_LEN)).astype(np.int32)
    planning, launching, waiting = [], [], []
    with _running(runtime, list(prompts)) as watch:
        _until_all_decode(runtime, watch, count)
        for i in range(WARM_STEPS + TIMED_STEPS):
            watch.reset()
            began = time.perf_counter()
            runtime.step()
            seconds = time.perf_counter() - began
            if not watch.decodes(count):
                raise RadixrtError(
                    f"{count} requests did not stay together for {TIMED_STEPS} steps: a larger pool"
                )
            if i >= WARM_STEPS:
                planning.append(seconds - watch.launching - watch.waiting)
                launching.append(watch.launching)
                waiting.append(watch.waiting)
    return StepTime(count, TIMED_STEPS, median(planning), median(launching), median(waiting))


def profile_passes(runtime: Runtime, prompts: Sequence[WorkloadPrompt], folder: Path, name: str) -> list[Profile]:
    """Profile a prefill pass of `prompts`, and then some decode steps of all of them.

    Writes Chrome traces: `folder`/`name`-prefill.json and -decode.json.

    Raises:
        RadixrtError: the pool or the context is too small for them.
    """
    count = min(len(prompts), runtime.limits.max_running_requests)
    with _running(runtime, [prompt.prompt_ids for prompt in prompts[:count]]) as watch:
        for _ in range(PREFILLS_BEFORE):
            runtime.step()
        prefill = _profiled(runtime, 1, "prefill", folder / f"{name}-prefill.json")
        if watch.batch is None or watch.batch.num_extends == 0:
            raise RadixrtError(f"after {PREFILLS_BEFORE} passes nothing of {count} prompts was left to profile")
        _until_all_decode(runtime, watch, count)
        for _ in range(WARM_STEPS):
            runtime.step()
        return [prefill, _profiled(runtime, DECODES_PROFILED, "decode", folder / f"{name}-decode.json")]


def _profiled(runtime: Runtime, steps: int, name: str, file: Path) -> Profile:
    _synchronize(runtime.device)
    with full_profiler(runtime.device) as profiler:
        for _ in range(steps):
            runtime.step()
        _synchronize(runtime.device)
    profiler.export_chrome_trace(str(file))
    return Profile(name, steps, costs(profiler, steps, runtime.device), str(file))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _running(runtime: Runtime, prompts: Sequence[Tokens]) -> Iterator[_Watch]:
    """Run requests for `prompts` until the block ends, and watch each step of the engine."""
    longest = max(map(len, prompts))
    new_tokens = min(NEW_TOKENS, runtime.context_length - longest)
    params = SamplingParams(max_new_tokens=max(1, new_tokens), temperature=TEMPERATURE, ignore_eos=True)
    runtime.flush_cache()
    requests = [runtime.prepare(prompt, params, index=i) for i, prompt in enumerate(prompts)]
    runner = runtime.parts.engine.runner  # nobody else has a use for single passes
    watch, launch, collect = _Watch(), runner.launch, runner.collect
    with contextlib.ExitStack() as undo:
        for method, watched in (
            ("launch", lambda batch: watch.launch(launch, batch)),
            ("collect", lambda handle: watch.collect(collect, handle)),
        ):
            setattr(runner, method, watched)
            undo.callback(delattr, runner, method)  # the class's method is visible again
        try:
            runtime.submit(*requests)
            yield watch
        finally:
            for request in requests:
                runtime.abort(request)
            while runtime.has_work:
                runtime.step()
            runtime.flush_cache()


def _until_all_decode(runtime: Runtime, watch: _Watch, count: int) -> None:
    for _ in range(MAX_PASSES):
        if watch.decodes(count) or not runtime.has_work:
            break
        runtime.step()
    if not watch.decodes(count):
        raise RadixrtError(f"{count} requests of {NEW_TOKENS} new tokens never ran together: a larger pool")


def device_profiler() -> Any:
    """A profiler of the GPU only, which costs the host little."""
    return profile(activities=[ProfilerActivity.CUDA])


def full_profiler(device: torch.device) -> Any:
    """A profiler of the GPU and of the host's operators."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *on_gpu])


def busy_seconds(intervals: Iterable[tuple[int, int]]) -> float:
    """Seconds covered by at least one interval (start, end) in nanoseconds, in any order."""
    busy, reached = 0, 0
    for start, end in sorted(intervals):
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e9


def device_intervals(profiler: Any) -> list[tuple[int, int]]:
    """(start, end) in nanoseconds of each kernel and copy that ran on the GPU under a profiler."""
    return [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in _device_events(profiler)]


def costs(profiler: Any, steps: int, device: torch.device) -> tuple[KernelCost, ...]:
    """Kernels and copies by time per step, the longest first; on a CPU, operators without their callees."""
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
