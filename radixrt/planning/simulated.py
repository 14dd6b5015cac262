"""Engines and Runtimes without a model: the real scheduler and cache around a runner that computes nothing."""

# Tests: tests/engine/test_driver.py, tests/planning/test_batch_plan.py

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.arrays import Int32Array
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.snapshot import Loaded, Saved
from radixrt.cache.states import states_of
from radixrt.config import RuntimeConfig
from radixrt.engine.engine import Engine
from radixrt.engine.parts import Parts, request_output
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.limits import RunLimits
from radixrt.schedule.passes import Pass, PassResult, Runner
from radixrt.schedule.policy import SchedulePolicy, SchedulerConfig
from radixrt.schedule.scheduler import Scheduler
from radixrt.text.tokenizer import Tokenizer


@dataclass
class ConstantRunner:
    """Samples the same token whenever one is wanted."""

    token: int = 0

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        transfers.clear()

    def prepare(self, pass_: Pass) -> None:
        """Nothing is to be prepared."""

    def launch(self, pass_: Pass) -> Pass:
        return pass_

    def mask_memory(self, num_masks: int, num_words: int) -> Int32Array:
        return np.zeros((num_masks, num_words), np.int32)

    def draw_masked(self, handle: object, masks: Int32Array) -> None:
        """What it samples is not masked."""

    def collect(self, handle: object) -> PassResult:
        assert isinstance(handle, Pass)  # what `launch` returned
        tokens = self.draw(int(handle.num_samples.sum()))
        return PassResult(tokens, handle.num_samples, np.ones(handle.num_rows, dtype=bool))

    def check_device(self, error: Exception) -> None:
        """There is none."""

    def draw(self, count: int) -> Int32Array:
        """The sampled tokens `[count]`."""
        return np.full(count, self.token, dtype=np.int32)


@dataclass
class DistinctRunner(ConstantRunner):
    """Samples each token once, from `token` on: no two answers are alike, and none is like a prompt."""

    token: int = 2**30

    def draw(self, count: int) -> Int32Array:
        """The sampled tokens `[count]`."""
        self.token += count
        return np.arange(self.token - count, self.token, dtype=np.int32)


@dataclass(frozen=True)
class NoWeights:
    """A `ServedModel` of a vocabulary alone. It is its own config."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    device: Any = None

    @property
    def config(self) -> Any:
        return self

    def identity(self) -> dict[str, Any]:
        return {"weights": "none"}

    def reload(self, source: object, *, before_change: Callable[[], None]) -> None:
        before_change()

    def save_cache(self, path: Path, weights_version: int, *, progress: bool) -> Saved:
        raise NotImplementedError

    def load_cache(self, path: Path, weights_version: int, *, progress: bool) -> Loaded:
        raise NotImplementedError


def simulated_engine(
    runner: Runner, limits: RunLimits, context_length: int, policy: SchedulePolicy = SchedulePolicy.LPM
) -> Engine:
    """An engine whose passes are those of a run within these limits."""
    of_pass = limits.of_pass
    rows, slots = ReqToTokenPool(of_pass.num_rows, context_length), SlotAllocator(limits.pool_tokens + 1)
    cache = PrefixCache(rows, slots, states=states_of(limits.num_states, rows.max_requests))
    config = SchedulerConfig(limits.max_running_requests, limits.chunked_prefill_size, of_pass.max_samples, policy)
    return Engine(Scheduler(cache, config), runner)


def simulated_parts(
    runner: Runner,
    limits: RunLimits,
    context_length: int,
    *,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
) -> Parts:
    """The parts of a Runtime without a model; its prompts are token ids unless there is a tokenizer."""
    engine, model = simulated_engine(runner, limits, context_length), NoWeights(vocab_size)
    return Parts(
        config=RuntimeConfig(),
        limits=limits,
        engine=engine,
        builder=RequestBuilder(
            model.config,
            tokenizer,
            context_length=context_length,
            seed=0,
            refusal=engine.scheduler.refusal,
            pool_tokens=limits.pool_tokens,
        ),
        model=model,
        output_of=partial(request_output, tokenizer=tokenizer),
    )
