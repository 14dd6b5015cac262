"""Where a run's time goes: counts of a simulated run, seconds of clocks that are known, a real model's."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt import Activity, Runtime, SamplingParams
from radixrt.bench.throughput.passes import busy_seconds, device_intervals, device_profiler
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.engine.engine import Engine
from radixrt.execution import in_flight
from radixrt.execution.in_flight import PassTimer
from radixrt.sampling_params import SamplingParams as Params
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking, Push
from radixrt.schedule.passes import Pass, PassResult
from radixrt.schedule.policy import SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from tests.support.world.runner import SimulatedPass
from tests.support.world.walk import Walk, random_sizes
from tests.support.world.world import Sizes, World

COUNTS = ("passes", "extend_passes", "extended_tokens", "decoded_tokens")


def counts(activity: Activity) -> dict[str, float]:
    return {name: getattr(activity, name) for name in COUNTS}


# -- what is counted ---------------------------------------------------------------------------------------


class Recorder:
    """Counts, from the requests themselves, the passes of a world whose results come."""

    def __init__(self, world: World) -> None:
        self.seen: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._extended: dict[int, int] = {}
        self._launch, self._collect = world.runner.launch, world.runner.collect
        world.runner.launch = self.launch  # type: ignore[method-assign]
        world.runner.collect = self.collect  # type: ignore[method-assign]

    def launch(self, batch: Pass) -> SimulatedPass:
        handle = self._launch(batch)
        new = zip(handle.booking.answers, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True)
        self._extended[id(batch)] = sum(end - start for request, start, end in new if start < request.extend_len)
        return handle

    def collect(self, handle: SimulatedPass) -> PassResult:
        extended = self._extended.pop(id(handle.batch))
        result = self._collect(handle)
        self.seen["passes"] += 1
        self.seen["extend_passes"] += extended > 0
        self.seen["extended_tokens"] += extended
        self.seen["decoded_tokens"] += int(handle.batch.num_samples.sum())
        return result


@pytest.mark.long_unless(kept=lambda given: given["seed"] < 3)
@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_the_passes(seed: int) -> None:
    """Whatever happens: chunks, retractions, aborts, forks, several answers, failures."""
    world = World(random_sizes(seed))
    recorder, walk, before = Recorder(world), Walk(world, seed), Activity()
    for _ in range(120):
        walk.act()
        now = world.engine.activity
        assert counts(now) == recorder.seen
        assert all(getattr(now - before, field.name) >= 0 for field in fields(Activity))
        before = now
    assert before.passes >= before.extend_passes > 5
    assert before.decoded_tokens > 5


def test_counts_add_up_over_a_run() -> None:
    """Where no pass is wasted, what was extended is what was not cached, and what was sampled is the answers."""
    world = World(Sizes(num_slots=200, chunk=5, max_running=4))
    walk = Walk(world, seed=3)
    for i in range(60):
        world.submit(walk.prompt(), 1 + i % 9)
    while world.engine.has_work:
        world.step()
    activity, cache = world.engine.activity, world.cache.stats()
    assert not world.scheduler.num_retractions
    assert activity.passes == world.cache.passes_launched
    assert cache.cached_tokens
    assert activity.extended_tokens == cache.prompt_tokens - cache.cached_tokens
    assert activity.decoded_tokens == sum(request.num_output for request in world.answers)


def test_a_cached_prompt_that_computes_one_token_extends() -> None:
    world = World()
    for _ in range(2):
        world.submit([1, 2, 3, 4], 1)
        before = world.engine.activity
        while world.engine.has_work:
            world.step()
    activity = world.engine.activity - before
    assert counts(activity) == {"passes": 1, "extend_passes": 1, "extended_tokens": 1, "decoded_tokens": 1}


@pytest.mark.parametrize("fault", ["fail_launch", "fail_run"])
def test_a_pass_that_fails_is_not_counted(fault: str) -> None:
    world = World()
    world.submit([1, 2, 3], 1)
    setattr(world.runner, fault, True)
    while world.engine.has_work:
        world.step()
    assert counts(world.engine.activity) == dict.fromkeys(COUNTS, 0)
    assert world.engine.activity.busy_seconds == 0
    assert world.engine.activity.scheduling_seconds > 0


# -- seconds -----------------------------------------------------------------------------------------------


class Clock:
    """Moves when it is told to; its seconds are sums of powers of two, which are exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


PLANNING, LAUNCHING, WAITING, BOOKING = 1.0, 0.25, 16.0, 4.0  # of the host, for each pass
PREFILL, DECODE = 64.0, 32.0  # of the device


class ClockedRunner:
    """Samples token 0. `measured`: it says how long passes take."""

    def __init__(self, clock: Clock, measured: bool) -> None:
        self._clock = clock
        self._measured = measured

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        raise AssertionError("there is no host tier")

    def launch(self, batch: Pass) -> Pass:
        self._clock.now += LAUNCHING
        return batch

    def collect(self, handle: object) -> PassResult:
        assert isinstance(handle, Pass)
        self._clock.now += WAITING
        tokens, finite = np.zeros(int(handle.num_samples.sum()), np.int32), np.ones(handle.num_rows, bool)
        if not self._measured:
            return PassResult(tokens, handle.num_samples, finite)
        seconds = PREFILL if handle.prefix_lens[0] < 7 else DECODE
        return PassResult(tokens, handle.num_samples, finite, seconds=seconds, launch_seconds=LAUNCHING)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("measured", [True, False])
def test_seconds(monkeypatch: pytest.MonkeyPatch, measured: bool, lag: int) -> None:
    """A prompt of 7 tokens in chunks of 3, then 4 decodes; planning and booking move the clock, too."""
    clock = Clock()
    cache = PrefixCache(ReqToTokenPool(4, 32), SlotAllocator(33))
    scheduler = Scheduler(
        cache, SchedulerConfig(max_running_requests=2, chunked_prefill_size=3, max_samples_per_pass=4)
    )
    plan, process = scheduler.next_pass, scheduler.process

    def slow_plan() -> Booking | None:
        batch = plan()
        clock.now += PLANNING if batch is not None else 0.0
        return batch

    def slow_process(booking: Booking, result: PassResult, push: Push) -> list[Answer]:
        clock.now += BOOKING
        return process(booking, result, push)

    monkeypatch.setattr(scheduler, "next_pass", slow_plan)
    monkeypatch.setattr(scheduler, "process", slow_process)
    engine = Engine(scheduler, ClockedRunner(clock, measured), max_in_flight=lag, clock=clock)
    engine.submit_all([Request(0, np.arange(7, dtype=np.int32), Params(), max_new_tokens=5, seed=0)])
    began = clock.now
    while engine.has_work:
        clock.now += 1024.0  # what the caller does is nobody's
        engine.step()
    activity = engine.activity
    assert counts(activity) == {"passes": 7, "extend_passes": 3, "extended_tokens": 7, "decoded_tokens": 5}
    assert activity.prefill_seconds == 3 * PREFILL * measured
    assert activity.decode_seconds == 4 * DECODE * measured
    assert activity.busy_seconds == activity.prefill_seconds + activity.decode_seconds
    assert activity.scheduling_seconds == 7 * (PLANNING + BOOKING + LAUNCHING * measured)
    assert clock.now - began > 7 * WAITING + activity.scheduling_seconds


def test_a_snapshot_stays_as_it_is_and_differences_are_of_each_field() -> None:
    earlier, later = Activity(1, 2, 3, 4, 0.5, 0.25, 0.125), Activity(11, 22, 33, 44, 5.5, 6.25, 7.125)
    assert later - earlier == Activity(10, 20, 30, 40, 5.0, 6.0, 7.0)
    assert (later - earlier).busy_seconds == 11.0
    world = World()
    world.submit([1, 2, 3], 4)
    world.step()
    world.step()
    before = world.engine.activity
    as_it_was = counts(before)
    while world.engine.has_work:
        world.step()
    assert counts(before) == as_it_was != counts(world.engine.activity)


class Stream:
    """A device that runs what was launched in order: `free_at` is when it will have ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = 0.0
        self.made = 0

    def run(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.clock.now) + seconds


class StreamEvent:
    """An event on a Stream. It may be recorded again once somebody has waited for it."""

    def __init__(self, stream: Stream) -> None:
        stream.made += 1
        self._stream = stream
        self.at = -1.0

    def record(self) -> None:
        self.at = max(self._stream.free_at, self._stream.clock.now)

    def synchronize(self) -> None:
        self._stream.clock.now = max(self._stream.clock.now, self.at)

    def query(self) -> bool:
        return self.at <= self._stream.clock.now

    def elapsed_time(self, end: StreamEvent) -> float:
        assert max(self.at, end.at) <= self._stream.clock.now, "an event is read before it was due"
        return 1000 * (end.at - self.at)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """What timers of CUDA devices use."""
    clock = Clock()
    stream = Stream(clock)
    monkeypatch.setattr(in_flight.time, "perf_counter", clock)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: StreamEvent(stream))
    return stream


def launched(timer: PassTimer, stream: Stream, *, before: float = 0.0, after: float = 0.0, takes: float) -> Any:
    """A pass that takes the host some seconds before and after it begins on the device."""
    timer.begin()
    stream.clock.now += before
    timer.start()
    stream.run(takes)
    stream.clock.now += after
    return timer.end()


def test_passes_of_a_gpu_begin_where_the_ones_before_end(stream: Stream) -> None:
    timer = PassTimer(torch.device("cuda"))
    first = launched(timer, stream, before=4.0, after=1.0, takes=8.0)
    second = launched(timer, stream, before=2.0, takes=16.0)  # the first is computed
    assert timer.wait(first) == (8.0, 5.0)
    assert timer.wait(second) == (16.0, 2.0)
    stream.clock.now += 64.0  # the device idles
    third = launched(timer, stream, before=0.5, takes=2.0)
    assert timer.wait(third) == (2.0, 0.5)


def test_events_are_used_again(stream: Stream) -> None:
    timer = PassTimer(torch.device("cuda"))
    in_flight: deque[Any] = deque()
    for i in range(50):
        in_flight.append((float(i), launched(timer, stream, takes=float(i))))
        if len(in_flight) > 1:
            takes, timed = in_flight.popleft()
            assert timer.wait(timed) == (takes, 0.0)
    assert stream.made == 4  # two each of two passes


def test_a_launch_that_raises_leaves_the_times_of_others_alone(stream: Stream) -> None:
    timer = PassTimer(torch.device("cuda"))
    before = launched(timer, stream, takes=8.0)
    timer.begin()
    timer.start()
    stream.run(32.0)  # a part of it; then the launch raises
    after = launched(timer, stream, takes=2.0)
    assert timer.wait(before)[0] == 8.0
    assert timer.wait(after)[0] == 2.0
    assert stream.made == 4


def test_what_is_not_launching_does_not_count(stream: Stream) -> None:
    """Between the two halves of a launch another pass is waited for, and its events are free again."""
    timer = PassTimer(torch.device("cuda"))
    before = launched(timer, stream, takes=8.0)
    timer.begin()
    timer.start()
    stream.run(4.0)
    stream.clock.now += 1.0
    timer.pause()
    assert timer.wait(before) == (8.0, 0.0)
    waits = timer.resume()
    stream.run(2.0)
    stream.clock.now += 0.5
    halves = timer.end()
    after = launched(timer, stream, takes=16.0)
    assert not waits  # the first half was still being computed
    assert timer.wait(halves) == (6.0, 1.5)
    assert timer.wait(after) == (16.0, 0.0)
    assert stream.made == 5  # one at the pause


def test_a_device_that_has_ended_waits_for_what_follows_a_pause(stream: Stream) -> None:
    timer = PassTimer(torch.device("cuda"))
    found = []
    for host in (1.0, 3.0, 5.0):  # between the halves
        timer.begin()
        timer.start()
        stream.run(4.0)
        timer.pause()
        stream.clock.now += host
        found.append(timer.resume())
        stream.run(1.0)
        timer.wait(timer.end())
    assert found == [False, False, True]
    assert stream.made == 3


# -- a model -----------------------------------------------------------------------------------------------

QUESTION = "Mira likes Oslo. Tarek counts {}.\nQ: Mira likes?\nA:"
LONG = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)


def timed_generate(runtime: Runtime, prompts: Any, params: SamplingParams) -> tuple[Activity, float]:
    """What a `generate` call has brought, and its seconds."""
    before, began = runtime.activity(), time.perf_counter()
    outputs = runtime.generate(prompts, params)
    seconds, activity = time.perf_counter() - began, runtime.activity() - before
    assert activity.decoded_tokens == sum(output.usage.completion_tokens for output in outputs)
    assert activity.extended_tokens == sum(output.usage.computed_tokens for output in outputs)
    return activity, seconds


@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_cpu_passes_are_most_of_the_time(overlap: bool) -> None:
    with Runtime(device="cpu", max_total_tokens=8000, overlap=overlap) as runtime:
        assert runtime.activity() == Activity()
        prompts = [QUESTION.format(i) for i in range(12)]
        activity, seconds = timed_generate(runtime, prompts, LONG)
        assert activity.passes - activity.extend_passes >= 30
        assert 0.5 * seconds < activity.busy_seconds
        assert activity.busy_seconds + activity.scheduling_seconds < seconds
        assert 0 < activity.prefill_seconds < activity.decode_seconds
        again, _ = timed_generate(runtime, prompts, LONG)
        assert again.extended_tokens < activity.extended_tokens


def test_who_runs_and_who_waits() -> None:
    with Runtime(device="cpu", max_total_tokens=4000, max_running_requests=4) as runtime:
        params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
        requests = [runtime.prepare(QUESTION.format(i), params, index=i) for i in range(9)]
        runtime.submit(*requests)
        assert (runtime.num_running, runtime.num_waiting) == (0, 9)
        most = ended = 0
        while runtime.has_work:
            ended += len(runtime.step())
            most = max(most, runtime.num_running)
            assert runtime.num_running + runtime.num_waiting + ended == 9
        assert most == 4


@pytest.fixture
def heavy(tmp_path: Path) -> Path:
    """A config alone: each decode step of such a model reads 5 GB of weights."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
    ).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_gpu_a_large_model_keeps_it_busy(heavy: Path, overlap: bool) -> None:
    """Decode steps that take the device longer than the host."""
    options: dict[str, Any] = {"max_total_tokens": 16_000, "max_running_requests": 16, "overlap": overlap}
    with Runtime(heavy, device="cuda", dtype="bfloat16", load_format="dummy", **options) as runtime:
        rng = np.random.default_rng(0)
        prompts = rng.integers(3, 32_000, (16, 100)).tolist()
        params = SamplingParams(temperature=0, max_new_tokens=256, ignore_eos=True)
        timed_generate(runtime, prompts, params)  # what is left to be compiled is
        runtime.flush_cache()
        activity, seconds = timed_generate(runtime, prompts, params)
        assert activity.passes - activity.extend_passes >= 250
        assert 0.6 * seconds < activity.busy_seconds <= seconds
        assert 0 < activity.prefill_seconds < activity.decode_seconds
        assert 0 < activity.scheduling_seconds < seconds


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_on_a_gpu_all_kernels_run_in_passes(cuda_graphs: bool) -> None:
    """The built-in model takes a GPU less time than the host; the profiler says how much at least."""
    with Runtime(device="cuda", max_total_tokens=60_000, cuda_graphs=cuda_graphs) as runtime:
        prompts = [QUESTION.format(i) for i in range(256)]
        params = SamplingParams(temperature=0, max_new_tokens=128, ignore_eos=True)
        timed_generate(runtime, prompts, params)
        runtime.flush_cache()
        with device_profiler() as profiler:
            activity, seconds = timed_generate(runtime, prompts, params)
            torch.cuda.synchronize()
        kernels = busy_seconds(device_intervals(profiler))
        assert kernels > 0.01
        assert 0.95 * kernels <= activity.busy_seconds <= seconds
        assert 0 < activity.prefill_seconds < activity.decode_seconds
