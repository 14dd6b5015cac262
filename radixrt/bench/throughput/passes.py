"""Passes one by one: what the CPU does in a decode step, and profiles of a prefill pass and of decode steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from radixrt.bench.run import TEMPERATURE
from radixrt.bench.throughput.device_time import costs, full_profiler
from radixrt.bench.throughput.figures import Profile, StepTime
from radixrt.bench.throughput.goals import STEP_REQUESTS
from radixrt.cache.radix_tree import Tokens
from radixrt.errors import RadixrtError
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import Pass
from radixrt.workloads.lists import Ask

T = TypeVar("T")

TIMED_STEPS, WARM_STEPS = 100, 20
PREFILLS_BEFORE, DECODES_PROFILED = 2, 5
NEW_TOKENS = 512  # of each request: more than there are steps
PROMPT_LEN = 32  # where only decode steps matter
MOST_PASSES = 10_000  # until all requests decode


class _Watch:
    """What the engine launched last, and the seconds in the runner's `launch` and `collect` since `reset`."""

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
    """Decode steps of STEP_REQUESTS requests, or of as many as run at once if these are fewer.

    Raises:
        RadixrtError: the pool or the context is too small for them.
    """
    rng = np.random.default_rng(0)
    count = min(STEP_REQUESTS, runtime._scheduler.config.max_running_requests)
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


def profile_passes(runtime: Runtime, asks: Sequence[Ask], folder: Path, name: str) -> list[Profile]:
    """Profile a prefill pass of `asks`, and then some decode steps of all of them.

    Writes Chrome traces: `folder`/`name`-prefill.json and -decode.json.

    Raises:
        RadixrtError: the pool or the context is too small for them.
    """
    count = min(len(asks), runtime._scheduler.config.max_running_requests)
    with _running(runtime, [ask.prompt_ids for ask in asks[:count]]) as watch:
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
    """Requests for `prompts` that run until the block ends; each step of the engine is watched."""
    longest = max(map(len, prompts))
    new_tokens = min(NEW_TOKENS, runtime.context_length - longest)
    params = SamplingParams(max_new_tokens=max(1, new_tokens), temperature=TEMPERATURE, ignore_eos=True)
    runtime.flush_cache()
    requests = [runtime.prepare(prompt, params, index=i) for i, prompt in enumerate(prompts)]
    runner = runtime._driver.check_open().runner  # nobody else has a use for single passes
    watch, launch, collect = _Watch(), runner.launch, runner.collect
    with contextlib.ExitStack() as undo:
        for method, watched in (
            ("launch", lambda batch: watch.launch(launch, batch)),
            ("collect", lambda handle: watch.collect(collect, handle)),
        ):
            setattr(runner, method, watched)
            undo.callback(delattr, runner, method)  # what the class has shows again
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
    for _ in range(MOST_PASSES):
        if watch.decodes(count) or not runtime.has_work:
            break
        runtime.step()
    if not watch.decodes(count):
        raise RadixrtError(f"{count} requests of {NEW_TOKENS} new tokens never ran together: a larger pool")
