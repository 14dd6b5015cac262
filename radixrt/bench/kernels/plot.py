"""The figures of the kernel benchmark as a picture. Needs matplotlib, which is in the extra `bench`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy import linspace

from radixrt.bench.pictures import GOAL, OURS, THEIRS, Bar, draw_blocks, mark

PUBLISHED = "#ececec"
BAR = 0.26  # inches

Figures = Mapping[str, Any]
"""Figures of a case: `Result.to_dict`."""


def plot(results: Sequence[Figures], file: Path, *, card: str) -> None:
    """Write a PNG of bars, or, for a sweep of tree attention alone, of time against batch size."""
    if is_tree_sweep(results):
        plot_tree_sweep(results, file, card=card)
    else:
        _plot_bars(results, file, title=f"Kernels on {card}, bf16")


def _plot_bars(results: Sequence[Figures], file: Path, *, title: str) -> None:
    """Draw percent of the roofline as bars for each case: ours, then the others'; goals are marked."""
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


def _bars(result: Figures) -> list[Bar]:
    """In percent; ours first, though it may have no time."""
    ours, *theirs = result["measurements"]
    name = f"{result['group']}  {result['shape']} {result['variant']}".strip()
    bars = [(name, ours["percent_of_bound"] or 0.0, OURS)]
    bars += [(m["name"], m["percent_of_bound"], THEIRS) for m in theirs if m["percent_of_bound"] is not None]
    for published in result["published"]:
        share = _percent(result, published["eager_seconds"])
        bars.append((f"{published['name']}, published", share, PUBLISHED))
    return bars


def _percent(result: Figures, seconds: float) -> float:
    return 100 * float(result["bound_seconds"]) / seconds


def _middle(heights: Sequence[int]) -> int:
    """The index that divides a list into parts of about the same height."""
    total, above = sum(heights), 0
    for i, height in enumerate(heights):
        above += height
        if 2 * above >= total:
            return i + 1
    return len(heights)


def _plot_column(axes: Any, results: Sequence[Figures], blocks: Sequence[list[Bar]], height: int) -> None:
    for result, line in zip(results, draw_blocks(axes, blocks, ".0f"), strict=True):
        if result["goal_seconds"] is not None:
            goal = _percent(result, result["goal_seconds"])
            mark(axes, goal, line, GOAL, 14)
            axes.annotate("goal", (goal, line - 0.5), color=GOAL, fontsize=7, ha="center", va="bottom")
    axes.set_ylim(height - 0.5, -1.5)


MIN_POINTS = 3  # of a line

Point = tuple[int, float, float]
"""Batch size, and seconds of tree and flat attention."""


def is_tree_sweep(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these JSON results are of tree attention alone, and make a line."""
    return {result["group"] for result in results} == {"tree"} and bool(_lines(results)[1])


def plot_tree_sweep(results: Sequence[Mapping[str, Any]], file: Path, *, card: str) -> None:
    """Write a PNG with one colour for each shared length, tree solid and flat dashed, on logarithmic axes. A time
    is the better of the eager and the captured one.
    """
    private, lines = _lines(results)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    batches = sorted({batch for points in lines.values() for batch, _, _ in points})
    shades = colormaps["plasma"](linspace(0.8, 0.05, len(lines)))
    colours = dict(zip(lines, shades, strict=True))
    for shared, points in lines.items():
        x, tree, flat = zip(*points, strict=True)
        axes.plot(x, [1e6 * s for s in flat], "--", color=colours[shared], linewidth=1.3, marker="o", markersize=3)
        axes.plot(x, [1e6 * s for s in tree], "-", color=colours[shared], linewidth=2.2, marker="o", markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("us, decode attention of a layer")
    axes.yaxis.set_major_formatter(lambda us, _: f"{us:,.0f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    keys = [Line2D([], [], color=colours[shared], linewidth=2.2) for shared in reversed(lines)]
    names = [f"{shared:,} tokens shared" for shared in reversed(lines)]
    styles = [Line2D([], [], color="#2b2b2b", linestyle=style) for style in ("-", "--")]
    axes.legend([*styles, *keys], ["tree", "flat", *names], frameon=False, loc="upper left")
    axes.set_title(f"One prefix, and {private:,} tokens of each request's own, on {card}", fontweight="bold")
    figure.savefig(file, format="png", dpi=120)


def _lines(results: Sequence[Mapping[str, Any]]) -> tuple[int, dict[int, list[Point]]]:
    """The most frequent private length, and lines of its results by shared length."""
    timed = [(result["sizes"], times) for result in results if (times := _times(result)) is not None]
    if not timed:
        return 0, {}
    ((private, _),) = Counter(sizes["private"] for sizes, _ in timed).most_common(1)
    lines: dict[int, list[Point]] = {}
    for sizes, (tree, flat) in timed:
        if sizes["private"] == private:
            lines.setdefault(sizes["shared"], []).append((sizes["batch"], tree, flat))
    return private, {shared: sorted(lines[shared]) for shared in sorted(lines) if len(lines[shared]) >= MIN_POINTS}


def _times(result: Mapping[str, Any]) -> tuple[float, float] | None:
    """Times of tree and flat attention; None if one is missing, or the requests do not share one prefix."""
    if not result["sizes"]:
        return None
    tree, flat = (
        min((m[name] for name in ("eager_seconds", "graph_seconds") if m[name] is not None), default=None)
        for m in result["measurements"][:2]
    )
    return None if tree is None or flat is None else (tree, flat)
