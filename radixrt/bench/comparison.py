"""Figures of a workload with the cache, with a host tier below it, and with misses forced."""

# Tests: tests/bench/test_prefix_reuse.py

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radixrt.bench.run import Runs


@dataclass(frozen=True)
class Comparison:
    """One workload with the cache and with misses forced, the same repetitions of each.

    `tiered` has the runs with the cache and a host tier, if there are any.
    """

    workload: str
    cached: Runs
    missed: Runs
    tiered: Runs = field(default_factory=Runs)

    @property
    def speed_up(self) -> float:
        return self.missed.seconds / self.cached.seconds

    @property
    def percent_of_bound(self) -> float | None:
        """Of the runs with the cache: 100 is the device's limit."""
        times = self.cached.times_bound
        return None if times is None else 100 / times

    def to_dict(self) -> dict[str, Any]:
        """Medians and each run as JSON values."""
        cached, tiered = self.cached, self.tiered
        figures = {
            "workload": self.workload,
            "seconds_cached": cached.seconds,
            "seconds_missed": self.missed.seconds,
            "speed_up": self.speed_up,
            "tokens_per_second": cached.tokens_per_second,
            "generated_tokens_per_second": cached.output_tokens_per_second,
            "hit_rate": cached.hit_rate,
            "best_hit_rate": cached.best_hit_rate,
            "percent_of_bound": self.percent_of_bound,
            "runs_cached": cached.to_json(),
            "runs_missed": self.missed.to_json(),
        }
        if tiered:
            figures |= {"seconds_tiered": tiered.seconds, "hit_rate_tiered": tiered.hit_rate}
            figures["runs_tiered"] = tiered.to_json()
        return figures
