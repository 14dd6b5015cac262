"""Measures a batch while it runs: tokens, passes, seconds, a timeline; and shows bars."""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm  # not tqdm.auto: a notebook's bar needs more packages

from radixrt.batch.tally import Tally, output_tally
from radixrt.cache.cache_stats import CacheStats
from radixrt.files.standard import STANDARD, standard_error
from radixrt.output import RequestOutput
from radixrt.report.batch_report import RunFigures
from radixrt.report.timeline import Sample, Timeline
from radixrt.schedule.activity import Activity

LOG_INTERVAL = 30.0  # seconds between two states of a bar where stderr is not a terminal


class MeteredRuntime(Protocol):
    """The part of a Runtime that a `Meter` reads."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def activity(self) -> Activity: ...

    def cache_stats(self) -> CacheStats: ...


class Meter:
    """Measures one run, from `begin` to `end`.

    Attributes:
        tally: of the requests that have ended.

    Args:
        runtime: its activity before `begin` does not count.
        clock: seconds.
    """

    def __init__(self, runtime: MeteredRuntime, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runtime = runtime
        self._clock = clock
        self._started = time.time()
        self._began = self._seconds = 0.0
        self._activity = Activity()  # of this run, up to the last sample
        self._activity_before = Activity()
        self._prompt_tokens_before = self._cached_tokens_before = 0
        self._recomputed_tokens_before = self._recomputed_tokens = 0
        self._stateless_tokens_before = 0
        self._stateless_tokens: int | None = None  # None: the model keeps no states
        self._max_running = 0
        self.tally = Tally()
        self._timeline = Timeline()

    def begin(self, finished: int) -> None:
        """Begin the run, with `finished` records from earlier ones."""
        stats = self._runtime.cache_stats()
        self._activity_before = self._runtime.activity()
        self._prompt_tokens_before, self._cached_tokens_before = stats.prompt_tokens, stats.cached_tokens
        self._recomputed_tokens_before = stats.recomputed_tokens
        self._stateless_tokens_before = stats.stateless_tokens
        self._started, self._began = time.time(), self._clock()
        self._timeline.add(self._sample(finished))

    def count(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        self.tally += output_tally(output)

    def end_pass(self, finished: int, ended: int) -> None:
        """Note a pass that ended `ended` requests; there are `finished` records now."""
        self._seconds = self._clock() - self._began
        self._max_running = max(self._max_running, self._runtime.num_running, ended)
        if self._timeline.is_due(self._seconds):
            self._timeline.add(self._sample(finished))

    def end(self, finished: int) -> None:
        """End the run."""
        self._seconds = self._clock() - self._began
        self._timeline.add(self._sample(finished))

    @property
    def rates(self) -> str:
        """Generated tokens a second and hit rate, for a bar."""
        generated = self.tally.completion_tokens / max(self._seconds, 1e-9)
        return f"{generated:,.0f} tokens/s, hit rate {self.tally.hit_rate:.1%}"

    @property
    def timeline(self) -> tuple[Sample, ...]:
        return self._timeline.samples

    def figures(
        self,
        *,
        best_hit_rate: float | None,
        predicted_hit_rate: float | None,
        products: tuple[Mapping[str, Any], ...] = (),
        replicas: tuple[Mapping[str, Any], ...] = (),
        repeated_tokens: int | None = None,
    ) -> RunFigures:
        """Figures of the ended run."""
        activity = self._activity
        return RunFigures(
            started=self._started,
            answered=self.tally.records,
            prompt_tokens=self.tally.prompt_tokens,
            cached_tokens=self.tally.cached_tokens,
            completion_tokens=self.tally.completion_tokens,
            recomputed_tokens=self._recomputed_tokens,
            stateless_tokens=self._stateless_tokens,
            best_hit_rate=best_hit_rate,
            predicted_hit_rate=predicted_hit_rate,
            seconds=self._seconds,
            prefill_seconds=activity.prefill_seconds,
            decode_seconds=activity.decode_seconds,
            scheduling_seconds=activity.scheduling_seconds,
            passes=activity.passes,
            most_running=self._max_running,
            products=products,
            replicas=replicas,
            repeated_tokens=repeated_tokens,
        )

    def _sample(self, finished: int) -> Sample:
        stats = self._runtime.cache_stats()
        self._activity = self._runtime.activity() - self._activity_before
        self._recomputed_tokens = stats.recomputed_tokens - self._recomputed_tokens_before
        if stats.state_capacity:
            self._stateless_tokens = stats.stateless_tokens - self._stateless_tokens_before
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
            states=stats.state_capacity - stats.state_free,
            states_kept=stats.state_kept,
            state_capacity=stats.state_capacity,
        )


def reading_bar(source: str | Path, shown: bool) -> tqdm:
    """A bar on stderr for the bytes read from an input. It appears after a second, and goes at its end."""
    total = os.path.getsize(source) if source != STANDARD and os.path.isfile(source) else None
    return progress_bar("reading", "B", total, shown, passing=True)


def progress_bar(
    what: str, unit: str, total: int | None, shown: bool, *, done: int = 0, passing: bool = False
) -> tqdm:
    """A bar on stderr that begins at `done`. One that is `passing` appears after a second, and goes at its end."""
    file = standard_error()
    interval = 0.1 if file.isatty() else LOG_INTERVAL
    return tqdm(
        file=file,
        desc=what,
        unit=unit,
        total=total,
        initial=done,
        disable=not shown,
        mininterval=interval,
        maxinterval=max(10.0, interval),
        unit_scale=unit == "B",
        delay=1.0 if passing else 0.0,
        leave=not passing,
    )
