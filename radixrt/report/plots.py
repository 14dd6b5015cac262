"""The timeline of a run as SVG plots. Needs matplotlib, which is in the extra `report`.

Colours are variables of the page's style sheet, so that the plots follow the page, light or dark.
"""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from radixrt.arrays import Float64Array
from radixrt.report.batch_report import BatchReport
from radixrt.report.timeline import columns

MAX_BARS = 80  # intervals of time in the plot of a rate
_SIZE = (4.8, 2.2)  # inches
_INK, _LINE, _STRONG, _SOFT, _WARM = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {
    _INK: "var(--dim)",
    _LINE: "var(--line)",
    _STRONG: "var(--strong)",
    _SOFT: "var(--soft)",
    _WARM: "var(--warm)",
}
_CAPACITY_SHOWN = 0.25  # used share of the pool from which on its capacity is drawn


@dataclass(frozen=True)
class Plot:
    """A plot.

    Attributes:
        title: its subject.
        told: its content in a sentence, for screen readers.
        svg: an element for an HTML page.
    """

    title: str
    told: str
    svg: str


def timeline_plots(report: BatchReport) -> list[Plot]:
    """Plots of tokens a second, requests, pool and hit rate over time; none if the run took no time."""
    samples = report.timeline
    series = {name: np.array(values, dtype=np.float64) for name, values in columns(samples).items()}
    if len(samples) < 2 or samples[-1].seconds <= 0:
        return []
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "radixrt"}):
        return [
            _prompt_rate(series),
            _generated_rate(series, report),
            _level(series, "running", "Running requests"),
            _level(series, "waiting", "Waiting requests"),
            _pool(series, "Tokens in the KV pool", "pool_tokens", "pool_evictable", "pool_capacity"),
            *([_pool(series, "States", "states", "states_kept", "state_capacity")] if "states" in series else []),
            _hit_rate(series, report.run.best_hit_rate),
        ]


def _prompt_rate(series: dict[str, Float64Array]) -> Plot:
    edges, asked = rate_bars(series, "prompt_tokens")
    _, computed = rate_bars(series, "computed_tokens")
    seconds = series["seconds"][-1]

    def draw(axes: Any) -> None:
        axes.stairs(asked, edges, fill=True, color=_SOFT, label="of requests that begin")
        axes.stairs(computed, edges, fill=True, color=_STRONG, label="computed")

    told = (
        f"{series['prompt_tokens'][-1] / seconds:,.0f} on average, of which "
        f"{series['computed_tokens'][-1] / seconds:,.0f} were computed"
    )
    return _plot("Prompt tokens a second", told, series, draw)


def _generated_rate(series: dict[str, Float64Array], report: BatchReport) -> Plot:
    edges, rate = rate_bars(series, "sampled_tokens")
    sampled = generated = series["sampled_tokens"][-1]
    if report.is_complete:  # otherwise some tokens belong to requests that go on
        generated = report.run.completion_tokens
        rate = rate * (generated / max(1, sampled))  # as if the discarded ones were spread evenly
    average = generated / series["seconds"][-1]
    told = f"{average:,.0f} on average, {rate.max():,.0f} at most"
    return _plot(
        "Generated tokens a second",
        told,
        series,
        lambda axes: axes.stairs(rate, edges, fill=True, color=_STRONG),
    )


def _level(series: dict[str, Float64Array], name: str, title: str) -> Plot:
    values = series[name]
    return _plot(title, f"{values.max():,.0f} at most", series, _filled(series, values))


def _pool(series: dict[str, Float64Array], title: str, all_held: str, kept: str, all_there: str) -> Plot:
    held, capacity = series[all_held], series[all_there][-1]
    needed = held - series[kept]

    def draw(axes: Any) -> None:
        axes.fill_between(series["seconds"], held, step="post", color=_SOFT, label="kept for later", linewidth=0)
        axes.fill_between(series["seconds"], needed, step="post", color=_STRONG, label="in use", linewidth=0)
        if held.max() >= _CAPACITY_SHOWN * capacity:
            axes.axhline(capacity, color=_WARM, linestyle="--", label="capacity")

    told = f"{held.max():,.0f} of {capacity:,.0f} held at most, {needed.max():,.0f} in use at most"
    return _plot(title, told, series, draw)


def _hit_rate(series: dict[str, Float64Array], best: float | None) -> Plot:
    begun = series["prompt_tokens"] > 0
    rate = 100 * series["cached_tokens"][begun] / series["prompt_tokens"][begun]

    def draw(axes: Any) -> None:
        if best is not None:
            axes.axhline(100 * best, color=_WARM, linestyle="--", label="best possible")
        axes.plot(series["seconds"][begun], rate, color=_STRONG, label="so far")
        axes.set_ylim(0, 104)
        axes.set_yticks(range(0, 101, 25), [f"{share}%" for share in range(0, 101, 25)])

    reached = f"{rate[-1]:.1f}" if len(rate) else "0.0"
    told = f"{reached}% in the end" + ("" if best is None else f", best possible {100 * best:.1f}%")
    return _plot("Hit rate", told, series, draw)


def _filled(series: dict[str, Float64Array], values: Float64Array) -> Callable[[Any], object]:
    def draw(axes: Any) -> None:
        axes.fill_between(series["seconds"], values, step="post", color=_SOFT, linewidth=0)
        axes.step(series["seconds"], values, where="post", color=_STRONG)

    return draw


def rate_bars(series: dict[str, Float64Array], name: str) -> tuple[Float64Array, Float64Array]:
    """Edges of intervals of time `[B + 1]`, and the growth of a count a second in each, `[B]`."""
    seconds = series["seconds"]
    bars = min(MAX_BARS, max(1, (len(seconds) - 1) // 2))
    edges = np.linspace(0, seconds[-1], bars + 1)
    return edges, np.diff(np.interp(edges, seconds, series[name])) / np.diff(edges)


def _plot(title: str, told: str, series: dict[str, Float64Array], draw: Callable[[Any], object]) -> Plot:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    end = series["seconds"][-1]
    unit, name = (1, "seconds") if end < 120 else (60, "minutes") if end < 7200 else (3600, "hours")
    axes.set_xlim(0, end)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    draw(axes)
    axes.set_ylim(0, max(1, axes.get_ylim()[1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g}"))
    axes.xaxis.set_major_locator(_Steps(unit))
    axes.set_xlabel(name, color=_INK, fontsize=8.5)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    axes.grid(axis="y", color=_LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1),
            ncols=3,
            frameon=False,
            fontsize=8.5,
            labelcolor=_INK,
            handlelength=1.2,
            columnspacing=1.4,
            borderaxespad=0.2,
        )
    return Plot(title, told, _svg(figure, title, told))


class _Steps(MaxNLocator):
    """Round numbers of a unit."""

    def __init__(self, unit: int) -> None:
        super().__init__(6, steps=[1, 2, 2.5, 5, 10])
        self._unit = unit

    def tick_values(self, low: float, high: float) -> Any:
        return np.asarray(super().tick_values(low / self._unit, high / self._unit)) * self._unit


def _svg(figure: Figure, title: str, told: str) -> str:
    """The figure as an element with unique ids, without the header and metadata of a file."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = text[text.index(">") + 1 :]
    width, height = (72 * inches for inches in _SIZE)
    own = re.sub(r"\W+", "-", title.lower()).strip("-")
    text = re.sub(r'\bid="', f'id="{own}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{own}-", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    label = escape(f"{title}: {told}")
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">{text}'


_METADATA = ("Creator", "Date", "Format", "Type")  # each is left out


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
