"""The figures of the kernel benchmark as a picture. Needs matplotlib, which is in the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from radixrt.bench.kernels.goals import published_times
from radixrt.bench.kernels.measurement import Result

OURS, THEIRS, PUBLISHED, GOAL = "#1b6ca8", "#c9c9c9", "#ececec", "#d1495b"
BAR = 0.26  # inches

Bar = tuple[str, float, str]
"""Its name, length in percent, and colour."""


def plot_results(results: Sequence[Result], file: Path, *, title: str) -> None:
    """Write a PNG: percent of the roofline, a block of bars a case: ours, then the others'; goals are marked."""
    blocks = [_bars(result) for result in results]
    middle = _middle([len(block) + 1 for block in blocks])
    columns = [part for part in (slice(None, middle), slice(middle, None)) if blocks[part]]
    height = max(sum(len(block) + 1 for block in blocks[part]) for part in columns)
    figure = Figure(figsize=(9 * len(columns), 1.4 + BAR * height), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        _plot_column(axes, results[part], blocks[part], height)
    figure.supxlabel("% of what bandwidth and arithmetic allow, by the better of the eager and the captured time")
    figure.suptitle(title, fontweight="bold")
    figure.savefig(file, format="png", dpi=100)


def _bars(result: Result) -> list[Bar]:
    """Ours first, though it may have no time."""
    case = result.case
    names = [f"{case.group}  {case.name}", *(m.name for m in result.measurements[1:])]
    times = [(name, m.best_seconds) for name, m in zip(names, result.measurements, strict=True)]
    bars = [(name, seconds, THEIRS) for name, seconds in times[1:]]
    bars += [
        (f"{p.name}, published", p.seconds, PUBLISHED)
        for p in published_times(case.group, case.shape, result.machine)
    ]
    name, ours = times[0]
    return [
        (name, 0.0 if ours is None else result.percent_of_bound(ours), OURS),
        *(
            (name, result.percent_of_bound(seconds), colour)
            for name, seconds, colour in bars
            if seconds is not None
        ),
    ]


def _middle(heights: Sequence[int]) -> int:
    """Where to part a list so that both parts are about as high."""
    total, above = sum(heights), 0
    for i, height in enumerate(heights):
        above += height
        if 2 * above >= total:
            return i + 1
    return len(heights)


def _plot_column(axes: Any, results: Sequence[Result], blocks: Sequence[list[Bar]], height: int) -> None:
    line = 0
    ticks: dict[int, str] = {}
    for result, block in zip(results, blocks, strict=True):
        lines = range(line, line + len(block))
        ticks |= dict(zip(lines, (name for name, _, _ in block), strict=True))
        bars = axes.barh(lines, [share for _, share, _ in block], 0.8, color=[colour for _, _, colour in block])
        axes.bar_label(bars, [f"{share:.0f}" if share else "" for _, share, _ in block], padding=4, fontsize=8)
        if result.goal_seconds is not None:
            goal = result.percent_of_bound(result.goal_seconds)
            axes.plot(goal, line, "|", color=GOAL, markersize=14, markeredgewidth=2)
            axes.annotate("goal", (goal, line - 0.5), color=GOAL, fontsize=7, ha="center", va="bottom")
        line += len(block) + 1  # a line between two cases
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_ylim(height - 0.5, -1.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
