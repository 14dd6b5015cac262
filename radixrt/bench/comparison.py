"""What a workload costs with the cache, with a host tier below it, and with misses forced, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Run:
    """One repetition of one workload. Tokens are counted over all of its requests.

    Attributes:
        seconds: in `Runtime.generate`, over all rounds.
        requests: of all rounds.
        prompt_tokens, cached_tokens: of the prompts, and those of them that were found in the cache.
        generated_tokens: of the answers.
        recomputed_tokens: computed again after a retraction, because the pool was full.
        best_cached_tokens: what an unlimited cache that is empty at first could have served.
        bound_seconds: that no engine can beat on this device; None if its speed is not known.
    """

    seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    best_cached_tokens: int
    bound_seconds: float | None


@dataclass(frozen=True)
class Comparison:
    """One workload with the cache and with misses forced, a run each for every repetition.

    `tiered` has the runs with the cache and a host tier, if they were asked for.
    """

    workload: str
    cached: tuple[Run, ...]
    missed: tuple[Run, ...]
    tiered: tuple[Run, ...] = ()

    @property
    def seconds_cached(self) -> float:
        """Median."""
        return median(run.seconds for run in self.cached)

    @property
    def seconds_missed(self) -> float:
        """Median."""
        return median(run.seconds for run in self.missed)

    @property
    def seconds_tiered(self) -> float | None:
        """Median."""
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
        """With the cache; median."""
        return median(run.generated_tokens / run.seconds for run in self.cached)

    @property
    def hit_rate(self) -> float:
        """cached_tokens over prompt_tokens of all repetitions, 0 to 1."""
        return sum(run.cached_tokens for run in self.cached) / sum(run.prompt_tokens for run in self.cached)

    @property
    def hit_rate_tiered(self) -> float | None:
        """The same with the host tier."""
        if not self.tiered:
            return None
        return sum(run.cached_tokens for run in self.tiered) / sum(run.prompt_tokens for run in self.tiered)

    @property
    def best_hit_rate(self) -> float:
        """The best possible one: see `program_statistics`."""
        return sum(run.best_cached_tokens for run in self.cached) / sum(run.prompt_tokens for run in self.cached)

    @property
    def percent_of_bound(self) -> float | None:
        """100 bound_seconds / seconds with the cache, median: 100 is as fast as the device can be."""
        shares = [100 * run.bound_seconds / run.seconds for run in self.cached if run.bound_seconds is not None]
        return median(shares) if shares else None

    def to_dict(self) -> dict[str, Any]:
        """Medians, and each run, of JSON's types."""
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
