"""A Runtime without a model or torch: real driver, engine, scheduler and cache, and always the same token."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.prefix_cache import CacheStats, PrefixCache
from radixrt.engine.driver import Call, Driver
from radixrt.engine.engine import Engine
from radixrt.limits import RunLimits
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import Pass, PassResult
from radixrt.schedule.policy import SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from radixrt.text.tokenizer import Tokenizer

TOKEN = 7  # that is always sampled


class Watchable:
    """What tells of a Runtime, of one with `scheduler` and `engine`."""

    scheduler: Scheduler
    engine: Engine
    reuses_prefixes = True

    @property
    def limits(self) -> RunLimits:
        scheduler = self.scheduler
        capacity = scheduler.cache.slots.capacity
        config = scheduler.config
        return RunLimits(capacity, config.max_running_requests, config.chunked_prefill_size)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def activity(self) -> Activity:
        return self.engine.activity

    def cache_stats(self) -> CacheStats:
        return self.scheduler.cache.stats()


class ScheduledRuntime(Watchable):
    """What a batch needs of a Runtime. Prompts are token ids."""

    def __init__(self, *, pool_tokens: int, context_length: int, max_running_requests: int = 512) -> None:
        rows = max_running_requests + max_running_requests // 2 + 1
        self.cache = PrefixCache(ReqToTokenPool(rows, context_length), SlotAllocator(pool_tokens + 1))
        self.scheduler = Scheduler(self.cache, SchedulerConfig(max_running_requests, 16_384))
        self.engine = Engine(self.scheduler, _NoModel())
        self._driver = Driver(self.engine, _output)
        self._call = Call()
        self._next_id = 0
        self.tokenizer: Tokenizer | None = None
        self.seed = 0

    @property
    def has_work(self) -> bool:
        return self._driver.has_work

    def identity(self) -> dict[str, str]:
        return {"weights": "none"}

    def prepare(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.int32] | Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> Request:
        params = sampling_params or SamplingParams()
        self._next_id += 1
        return Request(
            index=index,
            id=self._next_id,
            prompt_ids=np.array(prompt, dtype=np.int32),
            params=params,
            max_new_tokens=params.max_new_tokens,
            seed=0,
            reusable_len=keep,
        )

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        self._driver.submit(requests, self._call, in_order=in_order)

    def step(self) -> list[RequestOutput]:
        self._driver.step()
        ready = list(self._call.ready)
        self._call.ready.clear()
        return ready

    def abort(self, request: Request) -> None:
        self._driver.abort(request.id)

    def has_begun(self, request: Request) -> bool:
        return self._driver.has_begun(request.id)


class _NoModel:
    def check_device(self, error: Exception) -> None:
        raise AssertionError from error

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        transfers.clear()

    def launch(self, batch: Pass) -> Pass:
        return batch

    def collect(self, handle: object) -> PassResult:
        assert isinstance(handle, Pass)
        tokens = np.full(int(handle.num_samples.sum()), TOKEN, dtype=np.int32)
        return PassResult(tokens, handle.num_samples, np.ones(handle.num_rows, dtype=bool))


def _output(answer: Answer) -> RequestOutput:
    request, num_output = answer.request, answer.num_output
    completion = CompletionOutput(0, "x" * num_output, (TOKEN,) * num_output, FinishReason.LENGTH)
    timings = Timings(0.0, 0.0, 0.0)
    return RequestOutput(request.index, request.id, (completion,), answer.usage(), timings, request.prompt_ids)
