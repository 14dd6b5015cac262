"""What a runtime does while it answers a batch: tokens, passes, seconds, and a timeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from radixrt.batch.tally import Tally, output_tally
from radixrt.cache.prefix_cache import CacheStats
from radixrt.output import RequestOutput
from radixrt.report.batch_report import RunFigures
from radixrt.report.timeline import Sample, Timeline
from radixrt.schedule.activity import Activity


class MeteredRuntime(Protocol):
    """What a `Meter` asks a Runtime for."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def activity(self) -> Activity: ...

    def cache_stats(self) -> CacheStats: ...


class Meter:
    """Watches one run, from `begin` to `end`.

    Attributes:
        tally: of the requests that have ended.

    Args:
        runtime: what it did before `begin` does not count.
        clock: seconds.
    """

    def __init__(self, runtime: MeteredRuntime, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runtime = runtime
        self._clock = clock
        self._started = time.time()
        self._began = self._seconds = 0.0
        self._activity = Activity()  # of this run, as it was last seen
        self._activity_before = Activity()
        self._prompt_tokens_before = self._cached_tokens_before = 0
        self._most_running = 0
        self.tally = Tally()
        self._timeline = Timeline()

    def begin(self, finished: int) -> None:
        """The run begins now, with so many records from earlier ones."""
        stats = self._runtime.cache_stats()
        self._activity_before = self._runtime.activity()
        self._prompt_tokens_before, self._cached_tokens_before = stats.prompt_tokens, stats.cached_tokens
        self._started, self._began = time.time(), self._clock()
        self._timeline.add(self._sample(finished))

    def count(self, output: RequestOutput) -> None:
        """A request has ended."""
        self.tally += output_tally(output)

    def look(self, finished: int, ended: int) -> None:
        """A pass has ended with so many requests, and there are so many records."""
        self._seconds = self._clock() - self._began
        self._most_running = max(self._most_running, self._runtime.num_running, ended)
        if self._timeline.is_due(self._seconds):
            self._timeline.add(self._sample(finished))

    def end(self, finished: int) -> None:
        """The run ends now."""
        self._seconds = self._clock() - self._began
        self._timeline.add(self._sample(finished))

    @property
    def rates(self) -> str:
        """How it goes, for a bar."""
        generated = self.tally.completion_tokens / max(self._seconds, 1e-9)
        return f"{generated:,.0f} tokens/s, hit rate {self.tally.hit_rate:.1%}"

    @property
    def timeline(self) -> tuple[Sample, ...]:
        return self._timeline.samples

    def figures(self, *, best_hit_rate: float | None, predicted_hit_rate: float | None) -> RunFigures:
        """What it came to, once it has ended."""
        activity = self._activity
        return RunFigures(
            started=self._started,
            answered=self.tally.records,
            prompt_tokens=self.tally.prompt_tokens,
            cached_tokens=self.tally.cached_tokens,
            completion_tokens=self.tally.completion_tokens,
            best_hit_rate=best_hit_rate,
            predicted_hit_rate=predicted_hit_rate,
            seconds=self._seconds,
            prefill_seconds=activity.prefill_seconds,
            decode_seconds=activity.decode_seconds,
            scheduling_seconds=activity.scheduling_seconds,
            passes=activity.passes,
            most_running=self._most_running,
        )

    def _sample(self, finished: int) -> Sample:
        stats = self._runtime.cache_stats()
        self._activity = self._runtime.activity() - self._activity_before
        return Sample(
            seconds=self._seconds,
            finished=finished,
            prompt_tokens=stats.prompt_tokens - self._prompt_tokens_before,
            cached_tokens=stats.cached_tokens - self._cached_tokens_before,
            computed_tokens=self._activity.extended_tokens,
            sampled_tokens=self._activity.decoded_tokens,
            running=self._runtime.num_running,
            waiting=self._runtime.num_waiting,
            pool_tokens=stats.capacity - stats.free,
            pool_evictable=stats.evictable,
            pool_capacity=stats.capacity,
        )
