"""The figures of the prefix-reuse benchmark as a picture. Needs matplotlib, which is in the extra `bench`."""

# Tests: tests/bench/test_prefix_reuse.py

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from radixrt.bench.comparison import Comparison
from radixrt.bench.pictures import GOAL, OURS, THEIRS, plain

HEIGHT = 0.38  # of a bar; two of them and a gap make a workload


def plot_comparisons(comparisons: Sequence[Comparison], file: Path, *, title: str = "") -> None:
    """Write a PNG: on the left the times with the cache and with misses forced, on the right the hit rates."""
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
    rates.plot(best, lines, "|", color=GOAL, markersize=20, markeredgewidth=2, label="best possible")
    rates.set_xlim(0, 119)
    rates.set_xticks(range(0, 101, 20))
    rates.set_xlabel("prompt tokens found in the cache, %")

    for axes in (times, rates):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1 + 0.1 / len(names)), ncols=2, frameon=False)
        plain(axes)
    figure.suptitle(title or "Prefix reuse", fontweight="bold")
    figure.savefig(file, format="png", dpi=120)
