"""The figures of the throughput benchmark as a picture. Needs matplotlib, which is in the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from radixrt.bench.throughput.figures import ShapeFigures, WorkloadFigures

OURS, BASELINE, BOUND, GOAL = "#1b6ca8", "#c9c9c9", "#2b2b2b", "#d1495b"
ABLATED = ("#5f9fca", "#86b8d9", "#a9cbe3", "#cfe2ef", "#e4eef6")
BAR = 0.28  # inches

Bar = tuple[str, float, str]
"""Its name, seconds, and colour."""


def plot_figures(shapes: Sequence[ShapeFigures], file: Path, *, title: str) -> None:
    """Write a PNG with a column for each shape and bars for each workload: ours, ablations, the baseline. Bound
    and goal are marked.
    """
    height = max(len(_bars(workload, "")) + 1 for shape in shapes for workload in shape.workloads)
    max_workloads = max(len(shape.workloads) for shape in shapes)
    figure = Figure(figsize=(8 * len(shapes), 1.6 + BAR * height * max_workloads), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        _plot_shape(axes, shape)
    figure.supxlabel("seconds of one call over the list (median); black: bound, red: goal")
    figure.suptitle(title, fontweight="bold")
    figure.savefig(file, format="png", dpi=110)


def _bars(workload: WorkloadFigures, baseline: str) -> list[Bar]:
    bars = [(workload.workload, workload.runs.seconds, OURS)]
    for (name, runs), colour in zip(workload.ablated.items(), ABLATED, strict=False):
        bars.append((name.replace("-", " "), runs.seconds, colour))
    if workload.baseline is not None and workload.baseline.seconds is not None:
        bars.append((baseline, workload.baseline.seconds, BASELINE))
    return bars


def _plot_shape(axes: Any, shape: ShapeFigures) -> None:
    line = 0
    ticks: dict[int, str] = {}
    for workload in shape.workloads:
        block = _bars(workload, shape.baseline_name)
        lines = range(line, line + len(block))
        ticks |= dict(zip(lines, (name for name, _, _ in block), strict=True))
        bars = axes.barh(
            lines, [seconds for _, seconds, _ in block], 0.8, color=[colour for _, _, colour in block]
        )
        axes.bar_label(bars, [f"{seconds:.2f}" for _, seconds, _ in block], padding=4, fontsize=8)
        for seconds, colour in ((workload.runs.bound_seconds, BOUND), (workload.goal_seconds, GOAL)):
            if seconds is not None:
                axes.plot(seconds, line, "|", color=colour, markersize=16, markeredgewidth=2)
        line += len(block) + 1  # a line between two workloads
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(shape.name, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
