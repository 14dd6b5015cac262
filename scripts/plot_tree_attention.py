"""Draw docs/tree-attention.png: time against batch size, tree and flat, for shared prefixes. Needs matplotlib.

python scripts/bench_kernels.py --only tree --sweep --json tree.json    # needs an NVIDIA GPU
python scripts/plot_tree_attention.py tree.json [OUTPUT.png]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy import linspace

DOCS = Path(__file__).resolve().parents[1] / "docs"
PRIVATE = 128  # tokens of each request's own
MIN_POINTS = 3  # of a line

Lines = Mapping[int, Sequence[tuple[int, float, float]]]
"""By shared length: batch sizes, and seconds of tree and of flat attention."""


def lines_of(results: Sequence[Mapping[str, Any]]) -> Lines:
    """The better of the eager and the captured time of each result of a sweep; what has no time is left out."""
    lines: dict[int, list[tuple[int, float, float]]] = {}
    for result in results:
        sizes = result["sizes"]
        if result["group"] != "tree" or sizes.get("private") != PRIVATE:
            continue
        times = [
            min((m[name] for name in ("eager_seconds", "graph_seconds") if m[name] is not None), default=None)
            for m in result["measurements"][:2]
        ]
        if None not in times:
            lines.setdefault(sizes["shared"], []).append((sizes["batch"], *times))
    return {shared: sorted(lines[shared]) for shared in sorted(lines) if len(lines[shared]) >= MIN_POINTS}


def draw(lines: Lines, output: Path, *, card: str) -> None:
    """Write a PNG with one colour for each shared length, tree solid and flat dashed, on logarithmic axes."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    batches = sorted({batch for points in lines.values() for batch, _, _ in points})
    colours = colormaps["plasma"](linspace(0.8, 0.05, len(lines)))
    for points, colour in zip(lines.values(), colours, strict=True):
        x, tree, flat = zip(*points, strict=True)
        axes.plot(x, [1e6 * s for s in flat], "--", color=colour, linewidth=1.3, marker="o", markersize=3)
        axes.plot(x, [1e6 * s for s in tree], "-", color=colour, linewidth=2.2, marker="o", markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("us, decode attention of a layer")
    axes.yaxis.set_major_formatter(lambda us, _: f"{us:,.0f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    keys = [Line2D([], [], color=colour, linewidth=2.2) for colour in colours[::-1]]
    names = [f"{shared:,} tokens shared" for shared in reversed(lines)]
    styles = [Line2D([], [], color="#2b2b2b", linestyle=style) for style in ("-", "--")]
    axes.legend([*styles, *keys], ["tree", "flat", *names], frameon=False, loc="upper left")
    axes.set_title(f"One prefix, and {PRIVATE} tokens of each request's own, on {card}", fontweight="bold")
    figure.savefig(output, format="png", dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, metavar="TREE.json", help="what bench_kernels.py --json has written")
    parser.add_argument("output", type=Path, nargs="?", default=DOCS / "tree-attention.png", metavar="OUTPUT.png")
    given = parser.parse_args(argv)
    report = json.loads(given.records.read_text(encoding="utf-8"))
    draw(lines_of(report["results"]), given.output, card=report["machine"]["name"])


if __name__ == "__main__":
    main()
