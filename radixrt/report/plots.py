"""The timeline of a run as SVG plots. Their colours are classes of the page's style sheet, so that they follow the
page, light or dark.
"""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, log10

import numpy as np

from radixrt.arrays import Float64Array
from radixrt.report.batch_report import BatchReport
from radixrt.report.html import html_page
from radixrt.report.timeline import columns

MAX_BARS = 80  # intervals of time in the plot of a rate
_LEFT, _RIGHT, _TOP, _BOTTOM = 36.0, 338.0, 6.0, 126.0  # of the axes in a drawing of 346 x 154
_CAPACITY_SHOWN = 0.25  # used share of the pool from which on its capacity is drawn


@dataclass(frozen=True)
class Plot:
    """A plot.

    Attributes:
        title: its subject.
        told: its content in a sentence, for screen readers.
        svg: an element for an HTML page.
        keys: colours and what they stand for.
    """

    title: str
    told: str
    svg: str
    keys: list[tuple[str, str]]


@dataclass(frozen=True)
class _Layer:
    """A part of a plot: of kind "area", "line" or "dashed line", over seconds `[N]`."""

    kind: str
    colour: str
    label: str
    seconds: Float64Array
    values: Float64Array


def timeline_plots(report: BatchReport) -> list[Plot]:
    """Plots of tokens a second, requests, pool and hit rate over time; none if the run took no time."""
    samples = report.timeline
    series = {name: np.array(values, dtype=np.float64) for name, values in columns(samples).items()}
    if len(samples) < 2 or samples[-1].seconds <= 0:
        return []
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
    told = (
        f"{series['prompt_tokens'][-1] / seconds:,.0f} on average, of which "
        f"{series['computed_tokens'][-1] / seconds:,.0f} were computed"
    )
    layers = [
        _steps("area", "soft", "of requests that begin", edges, asked),
        _steps("area", "strong", "computed", edges, computed),
    ]
    return _plot("Prompt tokens a second", told, seconds, layers)


def _generated_rate(series: dict[str, Float64Array], report: BatchReport) -> Plot:
    edges, rate = rate_bars(series, "sampled_tokens")
    sampled = generated = series["sampled_tokens"][-1]
    if report.is_complete:  # otherwise some tokens belong to requests that go on
        generated = report.run.completion_tokens
        rate = rate * (generated / max(1, sampled))  # as if the discarded ones were spread evenly
    average = generated / series["seconds"][-1]
    told = f"{average:,.0f} on average, {rate.max():,.0f} at most"
    return _plot("Generated tokens a second", told, edges[-1], [_steps("area", "strong", "", edges, rate)])


def _level(series: dict[str, Float64Array], name: str, title: str) -> Plot:
    seconds, values = series["seconds"], series[name]
    layers = [_steps(kind, colour, "", seconds, values) for kind, colour in (("area", "soft"), ("line", "strong"))]
    return _plot(title, f"{values.max():,.0f} at most", seconds[-1], layers)


def _pool(series: dict[str, Float64Array], title: str, all_held: str, kept: str, all_there: str) -> Plot:
    seconds, held, capacity = series["seconds"], series[all_held], series[all_there][-1]
    needed = held - series[kept]
    layers = [
        _steps("area", "soft", "kept for later", seconds, held),
        _steps("area", "strong", "in use", seconds, needed),
    ]
    if held.max() >= _CAPACITY_SHOWN * capacity:
        layers.append(_level_line("capacity", capacity, seconds[-1]))
    told = f"{held.max():,.0f} of {capacity:,.0f} held at most, {needed.max():,.0f} in use at most"
    return _plot(title, told, seconds[-1], layers)


def _hit_rate(series: dict[str, Float64Array], best: float | None) -> Plot:
    begun, end = series["prompt_tokens"] > 0, series["seconds"][-1]
    rate = 100 * series["cached_tokens"][begun] / series["prompt_tokens"][begun]
    layers = [] if best is None else [_level_line("best possible", 100 * best, end)]
    layers.append(_Layer("line", "strong", "so far", series["seconds"][begun], rate))
    reached = f"{rate[-1]:.1f}" if len(rate) else "0.0"
    told = f"{reached}% in the end" + ("" if best is None else f", best possible {100 * best:.1f}%")
    return _plot("Hit rate", told, end, layers, is_share=True)


def rate_bars(series: dict[str, Float64Array], name: str) -> tuple[Float64Array, Float64Array]:
    """Edges of intervals of time `[B + 1]`, and the growth of a count a second in each, `[B]`."""
    seconds = series["seconds"]
    bars = min(MAX_BARS, max(1, (len(seconds) - 1) // 2))
    edges = np.linspace(0, seconds[-1], bars + 1)
    return edges, np.diff(np.interp(edges, seconds, series[name])) / np.diff(edges)


def _steps(kind: str, colour: str, label: str, edges: Float64Array, values: Float64Array) -> _Layer:
    """Each value from its edge to the next one."""
    return _Layer(kind, colour, label, np.repeat(edges, 2)[1:-1], np.repeat(values[: len(edges) - 1], 2))


def _level_line(label: str, value: float, end: float) -> _Layer:
    return _Layer("dashed line", "warm", label, np.array([0.0, end]), np.array([value, value]))


def _plot(title: str, told: str, end: float, layers: Sequence[_Layer], *, is_share: bool = False) -> Plot:
    unit, name = (1, "seconds") if end < 120 else (60, "minutes") if end < 7200 else (3600, "hours")
    top = 104.0 if is_share else max(1.0, 1.05 * max(float(layer.values.max(initial=0)) for layer in layers))

    def x(seconds: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * seconds / end

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * value / top

    def path(layer: _Layer) -> str:
        points = [f"{x(at):.1f},{y(value):.1f}" for at, value in zip(layer.seconds, layer.values, strict=True)]
        if layer.kind == "area":
            points = [f"{x(layer.seconds[0]):.1f},{_BOTTOM}", *points, f"{x(layer.seconds[-1]):.1f},{_BOTTOM}"]
        return " ".join(point for point, _ in groupby(points))

    ticks = _ticks(top, 5) if is_share else _ticks(top, 4, whole=True)
    svg = html_page(
        "plot.html",
        label=f"{title}: {told}",
        unit=name,
        rows=[(f"{y(tick):.1f}", f"{tick:g}%" if is_share else _short(tick)) for tick in ticks],
        columns=[(f"{x(tick * unit):.1f}", f"{tick:g}") for tick in _ticks(end / unit, 6)],
        paths=[(layer.kind, layer.colour, path(layer)) for layer in layers if len(layer.values)],
    )
    keys = [(layer.colour, layer.label) for layer in layers]
    return Plot(title, told, svg, keys if len(keys) > 1 and keys[0][1] else [])


def _ticks(span: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers from 0 to `span`, in at most so many equal steps."""
    size = 10.0 ** floor(log10(span / most))
    if whole:
        size = max(1.0, size)
    steps = (size * factor for factor in (1, 2, 2.5, 5, 10))
    step = next(step for step in steps if span <= most * step and not (whole and step % 1))
    return [step * number for number in range(int(span / step) + 1)]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
