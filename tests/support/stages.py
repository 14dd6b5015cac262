"""Ranks in stages that are threads of this process: a whole Runtime without the start of processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import radixrt.assembly
import radixrt.ranks.rank
from radixrt.arrays import Int32Array
from radixrt.config import RuntimeConfig
from radixrt.execution.model_runner import ModelRunner, Tuning
from radixrt.limits import NO_PASSES, PassLimits
from radixrt.models.decoder import Decoder
from radixrt.ranks import group, leading_runner
from radixrt.ranks.follower import Follower
from radixrt.ranks.group import RankGroup, Shape, joined
from radixrt.ranks.kept_parts import OwnParts
from radixrt.ranks.rank import RankParts, assemble_rank, folder_of
from radixrt.runtime import Runtime
from radixrt.workers.channel import Message, decode, encode
from tests.support.recomputing import Recomputing, planner_on_cpu

T = TypeVar("T")
CPU = torch.device("cpu")
PATIENCE = 20  # seconds that a thread waits for another one


def on_stages(shape: Shape, work: Callable[[RankGroup], T]) -> list[T]:
    """What `work` gives on each rank of `shape`, in their order. An error on one of them is raised, at the latest
    when the others have waited long enough for it.
    """
    store = HashStore()

    def run(rank: int) -> T:
        with torch.inference_mode():
            return work(joined(store, rank, shape, CPU))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(shape.size) as threads:
        patch.setattr(group, "START_SECONDS", PATIENCE)
        return list(threads.map(run, range(shape.size)))


class ThreadFollowers:
    """As `Followers`; all ranks compare each pass."""

    def __init__(self, config: RuntimeConfig, device: torch.device) -> None:
        self.shape, self._config = Shape(config.num_ranks, config.pipeline_parallel_size), config
        self._store, size = HashStore(), self.shape.size
        self._queues: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._loaded = [threading.Event() for _ in self._queues]
        self._answers: dict[int, Message] = {}
        self._num_asked, self.kept_file = 0, os.memfd_create("kept")
        self.parts: dict[int, RankParts] = {}
        self.digests: dict[int, set[int]] = {}
        self.num_told = [0] * size
        self.gives_up = False  # whether threads that wait for a lost rank are left behind
        self._ends: list[Future[None]] = [Future() for _ in self._queues]
        for rank in range(1, size):
            threading.Thread(target=self._run, args=(rank,), daemon=True).start()

    def _run(self, rank: int) -> None:
        try:
            self._follow(rank)
            self._ends[rank - 1].set_result(None)
        except BaseException as error:
            self._ends[rank - 1].set_exception(error)

    def _follow(self, rank: int) -> None:
        try:
            own = joined(self._store, rank, self.shape, CPU)
            parts = assemble_rank(self._config, folder_of(self._config), own, self._loaded[rank - 1].set)
        finally:
            self._loaded[rank - 1].set()
        self.parts[rank] = parts
        follower = Follower(parts, OwnParts(parts.kept_parts, self.kept_file))
        while (encoded := self._queues[rank - 1].get()) is not None:
            (message,) = decode(bytearray(encoded))
            told = follower.handle(message)
            if told is not None and "answers" in told.body:
                self._answers[rank] = told
            elif told is not None:
                self.compare(rank, *told.body["digest"])

    def join(self) -> RankGroup:
        return joined(self._store, 0, self.shape, CPU)

    def wait_until_loaded(self) -> None:
        for loaded in self._loaded:
            loaded.wait()
        self.check()

    def send(self, message: Message, *, draws: bool = False, meanwhile: Callable[[], bool] | None = None) -> None:
        self.check()
        told = self.shape.stage_size - 1 if draws else len(self._queues)
        for rank, queue in enumerate(self._queues[:told]):
            self.num_told[rank + 1] += 1
            queue.put(encode(message))

    def ask(self, body: dict[str, Any], numbers: Int32Array | None = None) -> int:
        self._num_asked += 1
        body = {**body, "asked": self._num_asked}
        self.send(Message(body) if numbers is None else Message(body, numbers))
        return self._num_asked

    def wait_for(self, asked: int) -> list[Message]:
        ranks, end = range(1, self.shape.size), time.monotonic() + PATIENCE
        while any(rank not in self._answers or self._answers[rank].body["answers"] < asked for rank in ranks):
            self.check()
            assert time.monotonic() < end
            time.sleep(0.001)
        return [self._answers[rank] for rank in ranks]

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        yield

    def check(self) -> None:
        for end in self._ends:
            if end.done():
                end.result()

    def why_lost(self, error: Exception) -> str:
        return f"a pass has failed: {error!r}"

    def reason_of(self, error: BaseException) -> None:
        return None

    def compare(self, rank: int, number: int, digest: int) -> None:
        self.digests.setdefault(number, set()).add(digest)
        assert len(self.digests[number]) == 1, f"rank {rank} computes another pass {number}"

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for end in () if self.gives_up else self._ends:
            end.result(PATIENCE)
        os.close(self.kept_file)


@contextmanager
def staged(stages: int, ranks: int = 1, *, captured: bool = False, **options: Any) -> Iterator[Runtime]:
    """A Runtime in float32 on a CPU, of `stages` of `ranks` each: threads. With `captured`, passes are padded as
    if graphs computed them.
    """

    def runner(
        model: Decoder, rows: Any, kv_pool: Any, *places: Any, captured: PassLimits = NO_PASSES, tree: bool = False
    ) -> ModelRunner:
        del captured
        planner = planner_on_cpu(model.config, rows.req_to_token, kv_pool.dtype, tree=tree)
        tuning = Tuning(token_sizes=(16, 64), recorder=Recomputing, planner=planner)
        most = PassLimits(told["max_running_requests"], told["chunked_prefill_size"])
        return ModelRunner(model, rows, kv_pool, *places, captured=most, tree=tree, tuning=tuning)

    told = {"max_total_tokens": 800, "chunked_prefill_size": 24, "max_running_requests": 9, **options}
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    with pytest.MonkeyPatch.context() as while_it_runs:
        while_it_runs.setattr(leading_runner, "COMPARE_EVERY", 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "START_SECONDS", PATIENCE)
            patch.setattr(radixrt.assembly, "start_followers", ThreadFollowers)
            if captured:
                patch.setattr(radixrt.ranks.rank, "ModelRunner", runner)
            runtime = Runtime(device="cpu", dtype="float32", threads=1, **sizes, **told)  # type: ignore[arg-type]
        with runtime:
            yield runtime


def followers_of(runtime: Runtime) -> ThreadFollowers:
    followers: Any = runtime.parts.engine.runner
    found = followers._followers
    assert isinstance(found, ThreadFollowers)
    return found
