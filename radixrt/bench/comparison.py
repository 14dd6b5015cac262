"""Figures of a workload with the cache, with a host tier below it, and with misses forced."""

# Tests: tests/bench/test_prefix_reuse.py

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from radixrt.bench.run import Run, best_hit_rate, hit_rate


@dataclass(frozen=True)
class Comparison:
    """One workload with the cache and with misses forced, one run each for every repetition.

    `tiered` has the runs with the cache and a host tier, if there are any.
    """

    workload: str
    cached: tuple[Run, ...]
    missed: tuple[Run, ...]
    tiered: tuple[Run, ...] = ()

    @property
    def seconds_cached(self) -> float:
        """Median of the runs with the cache."""
        return median(run.seconds for run in self.cached)

    @property
    def seconds_missed(self) -> float:
        """Median of the runs with misses forced."""
        return median(run.seconds for run in self.missed)

    @property
    def seconds_tiered(self) -> float | None:
        """Median of the runs with a host tier."""
        return median(run.seconds for run in self.tiered) if self.tiered else None

    @property
    def speed_up(self) -> float:
        return self.seconds_missed / self.seconds_cached

    @property
    def tokens_per_second(self) -> float:
        """Prompt and generated tokens a second with the cache; median."""
        return median((run.prompt_tokens + run.generated_tokens) / run.seconds for run in self.cached)

    @property
    def generated_tokens_per_second(self) -> float:
        """Generated tokens a second with the cache; median."""
        return median(run.generated_tokens / run.seconds for run in self.cached)

    @property
    def hit_rate(self) -> float:
        """cached_tokens over prompt_tokens of all repetitions, 0 to 1."""
        return hit_rate(self.cached)

    @property
    def hit_rate_tiered(self) -> float | None:
        """The hit rate with the host tier."""
        return hit_rate(self.tiered) if self.tiered else None

    @property
    def best_hit_rate(self) -> float:
        """The best possible one: see `program_statistics`."""
        return best_hit_rate(self.cached)

    @property
    def percent_of_bound(self) -> float | None:
        """100 bound_seconds / seconds with the cache, median: 100 is the device's limit."""
        shares = [100 * run.bound_seconds / run.seconds for run in self.cached if run.bound_seconds is not None]
        return median(shares) if shares else None

    def to_dict(self) -> dict[str, Any]:
        """Medians and each run as JSON values."""
        names = (
            "workload",
            "seconds_cached",
            "seconds_missed",
            "speed_up",
            "tokens_per_second",
            "generated_tokens_per_second",
            "hit_rate",
            "best_hit_rate",
            "percent_of_bound",
        )
        figures = {
            **{name: getattr(self, name) for name in names},
            "runs_cached": [asdict(run) for run in self.cached],
            "runs_missed": [asdict(run) for run in self.missed],
        }
        if self.tiered:
            figures |= {name: getattr(self, name) for name in ("seconds_tiered", "hit_rate_tiered")}
            figures["runs_tiered"] = [asdict(run) for run in self.tiered]
        return figures
