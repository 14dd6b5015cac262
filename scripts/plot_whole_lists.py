"""Draw docs/whole-lists.png, the picture of the README, from docs/whole-lists.csv. Needs matplotlib.

python scripts/plot_whole_lists.py [OUTPUT.png]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
OURS, PEER, TEXT = "#2f81f7", "#9ba1a8", "#767c84"  # legible on white and on GitHub's dark page
BAR = 0.4  # of the space of a list


def draw(rows: Sequence[Sequence[str]], output: Path) -> None:
    """Write a transparent PNG: a panel for each shape, two bars for each list, and how many times as fast.

    `rows` are those of the file without its header: shape, list, the peer's seconds, ours, times as fast.
    """
    shapes = {shape: list(lists) for shape, lists in groupby(rows, key=lambda row: row[0])}
    most = max(map(len, shapes.values()))
    figure = Figure(figsize=(9.6, 0.9 + 0.36 * most), layout="constrained")
    for axes, (shape, lists) in zip(
        figure.subplots(1, len(shapes), squeeze=False)[0], shapes.items(), strict=True
    ):
        lines = range(len(lists))
        peer, ours = ([float(row[column]) for row in lists] for column in (2, 3))
        axes.barh([line - BAR / 2 for line in lines], peer, BAR, color=PEER, label="vLLM 0.26.0")
        bars = axes.barh([line + BAR / 2 for line in lines], ours, BAR, color=OURS, label="radixrt")
        labels = [f"{row[3]} s, {row[4]}x" for row in lists]
        axes.bar_label(bars, labels, padding=3, fontsize=8, color=OURS, fontweight="bold")
        axes.set_yticks(lines, [row[1].replace("_", " ") for row in lists])
        axes.set_ylim(most - 0.4, -0.6)
        axes.margins(x=0.1)
        axes.set_title(f"{shape}: seconds for the list", fontsize=10, color=TEXT, fontweight="bold")
        axes.tick_params(colors=TEXT, labelsize=9, length=0)
        axes.spines[:].set_visible(False)
        axes.legend(loc="lower right", frameon=False, labelcolor=TEXT, fontsize=9)
    figure.savefig(output, format="png", dpi=110, transparent=True)


def read(file: Path) -> list[list[str]]:
    """The rows without the header."""
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.reader(lines))[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", default=DOCS / "whole-lists.png", metavar="OUTPUT.png")
    draw(read(DOCS / "whole-lists.csv"), parser.parse_args().output)
