"""What pictures of benchmarks have in common. They need matplotlib, which is in the extra `bench`."""

# Tests: tests/bench/test_kernels.py, tests/bench/test_throughput.py

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OURS, THEIRS, BOUND, GOAL = "#1b6ca8", "#c9c9c9", "#2b2b2b", "#d1495b"
TEXT = "#767c84"  # of transparent pictures: legible on white and on GitHub's dark page

Bar = tuple[str, float, str]
"""Its name, length and colour."""


def draw_blocks(axes: Any, blocks: Sequence[Sequence[Bar]], form: str) -> list[int]:
    """Draw blocks of bars below one another, each bar with its name before it and its length, in this form, behind
    it. Returns the line of the first bar of each block.
    """
    lines, firsts = 0, []
    ticks: dict[int, str] = {}
    for block in blocks:
        names, lengths, colours = zip(*block, strict=True)
        at = range(lines, lines + len(block))
        ticks |= dict(zip(at, names, strict=True))
        bars = axes.barh(at, lengths, 0.8, color=list(colours))  # a tuple of two is a colour with its alpha
        axes.bar_label(bars, [format(length, form) if length else "" for length in lengths], padding=4, fontsize=8)
        firsts.append(lines)
        lines += len(block) + 1  # a line between two blocks
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    plain(axes)
    return firsts


def mark(axes: Any, length: float, line: int, colour: str, size: int = 16) -> None:
    """Mark a length on a bar."""
    axes.plot(length, line, "|", color=colour, markersize=size, markeredgewidth=2)


def plain(axes: Any) -> None:
    """A frame at two sides, and a grid behind the bars."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def label_counts(axes: Any, counts: Sequence[int], name: str, figure: str, *, legend: str) -> None:
    """Label the axes of a transparent picture of a figure over counts that double; `legend` is its place."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, list(map(str, counts)))
    axes.set_xlabel(name, color=TEXT)
    axes.set_ylabel(figure, color=TEXT)
    axes.tick_params(colors=TEXT)
    axes.spines[:].set_color(TEXT)
    axes.legend(loc=legend, frameon=False, labelcolor=TEXT, fontsize=8)
