"""Figures of a workload with the cache, with a host tier below it, and with misses forced; and their picture."""

# Tests: tests/bench/test_prefix_reuse.py

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
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


OURS, THEIRS, BEST = "#1b6ca8", "#c9c9c9", "#d1495b"
HEIGHT = 0.38  # of a bar; two of them and a gap make a workload


def plot_comparisons(comparisons: Sequence[Comparison], file: Path, *, title: str = "") -> None:
    """Write a PNG: on the left the times with the cache and with misses forced, on the right the hit rates."""
    from matplotlib.figure import Figure  # an extra

    names = [comparison.workload for comparison in comparisons]
    lines = range(len(names))
    figure = Figure(figsize=(12, 1.8 + 0.62 * len(names)), layout="constrained")
    times, rates = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])

    for offset, colour, label, seconds in (
        (-HEIGHT / 2, OURS, "with the cache", [c.cached.seconds for c in comparisons]),
        (HEIGHT / 2, THEIRS, "misses forced", [c.missed.seconds for c in comparisons]),
    ):
        bars = times.barh([line + offset for line in lines], seconds, HEIGHT, color=colour, label=label)
        labels = [f"{value:.2f} s" for value in seconds]
        if colour == OURS:
            labels = [f"{text}, {c.speed_up:.1f}x" for text, c in zip(labels, comparisons, strict=True)]
        times.bar_label(bars, labels, padding=3, fontsize=9)
    times.set_yticks(lines, names)
    times.invert_yaxis()
    times.margins(x=0.18)
    times.set_xlabel("seconds (median)")

    hit_rates = [100 * comparison.cached.hit_rate for comparison in comparisons]
    bars = rates.barh(lines, hit_rates, 1.2 * HEIGHT, color=OURS, label="measured")
    rates.bar_label(bars, [f"{rate:.1f} %" for rate in hit_rates], padding=6, fontsize=9)
    best = [100 * comparison.cached.best_hit_rate for comparison in comparisons]
    rates.plot(best, lines, "|", color=BEST, markersize=20, markeredgewidth=2, label="best possible")
    rates.set_xlim(0, 119)
    rates.set_xticks(range(0, 101, 20))
    rates.set_xlabel("prompt tokens found in the cache, %")

    for axes in (times, rates):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1 + 0.1 / len(names)), ncols=2, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title or "Prefix reuse", fontweight="bold")
    figure.savefig(file, format="png", dpi=120)
