"""The figures of the throughput benchmark as a picture. Needs matplotlib, which is in the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from radixrt.bench.pictures import BOUND, GOAL, OURS, THEIRS, Bar, draw_blocks, mark
from radixrt.bench.throughput.figures import ShapeFigures, WorkloadFigures

ABLATED = ("#5f9fca", "#86b8d9", "#a9cbe3", "#cfe2ef", "#e4eef6")
BAR = 0.28  # inches


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
    for i, (name, runs) in enumerate(workload.ablated.items()):
        bars.append((name.replace("-", " "), runs.seconds, ABLATED[i]))
    if workload.baseline is not None and workload.baseline.seconds is not None:
        bars.append((baseline, workload.baseline.seconds, THEIRS))
    return bars


def _plot_shape(axes: Any, shape: ShapeFigures) -> None:
    firsts = draw_blocks(axes, [_bars(workload, shape.baseline_name) for workload in shape.workloads], ".2f")
    for workload, line in zip(shape.workloads, firsts, strict=True):
        for seconds, colour in ((workload.runs.bound_seconds, BOUND), (workload.goal_seconds, GOAL)):
            if seconds is not None:
                mark(axes, seconds, line, colour)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(shape.name, fontsize=10)
