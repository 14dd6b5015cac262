"""Tree attention as a picture: time against batch size, behind shared prefixes of several lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy import linspace

MIN_POINTS = 3  # of a line

Point = tuple[int, float, float]
"""Batch size, and seconds of tree and flat attention."""


def is_tree_sweep(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these are results, as JSON has them, of tree attention alone, and make a line."""
    return {result["group"] for result in results} == {"tree"} and bool(_lines(results)[1])


def plot_tree_sweep(results: Sequence[Mapping[str, Any]], file: Path, *, card: str) -> None:
    """Write a PNG: a colour a shared length, tree solid and flat dashed, both axes logarithmic. A time is the
    better of the eager and the captured one.
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
    """The private length that most results have; and of these, by shared length, what makes a line."""
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
    """Of tree and flat attention; None where one has none, or the shape is not a prefix that all share."""
    if not result["sizes"]:
        return None
    tree, flat = (
        min((m[name] for name in ("eager_seconds", "graph_seconds") if m[name] is not None), default=None)
        for m in result["measurements"][:2]
    )
    return None if tree is None or flat is None else (tree, flat)
