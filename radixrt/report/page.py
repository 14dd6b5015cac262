"""A report as a self-contained HTML page: figures, time by activity, plots, and the shared prefixes."""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from radixrt.planning.batch_plan import BatchPlan
from radixrt.report.batch_report import (
    BatchReport,
    bounds,
    file_figures,
    money,
    run_figures,
    seconds_by_activity,
    time_figures,
)
from radixrt.report.figures import seconds as duration
from radixrt.report.html import html_page, prefix_branches
from radixrt.report.outline import Show
from radixrt.report.plots import timeline_plots

MAX_PREFIXES = 500


def report_page(report: BatchReport, *, title: str, plan: BatchPlan | None, show: Show) -> str:
    """The page as HTML.

    Args:
        title: such as the input's name.
        plan: its largest shared prefixes are shown, if there is one.
        show: token ids to text.
    """
    own = run_figures(report.run) if report.kept else {}
    return html_page(
        "report.html",
        title=f"Report of {title}",
        summary=_summary(report),
        tiles=_tiles(report),
        file_figures=file_figures(report),
        run_figures=own | time_figures(report),
        bars=_bars(report),
        plots=timeline_plots(report),
        branches=prefix_branches(plan, show, MAX_PREFIXES) if plan else None,
    )


def _summary(report: BatchReport) -> str:
    when = datetime.fromtimestamp(report.run.started, timezone.utc)
    state = "complete" if report.is_complete else "incomplete"
    kept = f", {report.kept:,} of them from earlier runs" if report.kept else ""
    return (
        f"{state}: {report.records}{kept}, {report.errors:,} with an error; "
        f"begun {when:%Y-%m-%d %H:%M} UTC"
    )


def _tiles(report: BatchReport) -> list[tuple[str, str, str]]:
    """Names, values and what else is to be said of them."""
    run, cost = report.run, report.cost
    again = f"{run.recomputed_tokens:,} tokens computed again" if run.recomputed_tokens else ""
    stateless = f"{run.stateless_tokens:,} lacked a state" if run.stateless_tokens else ""
    tiles = [
        ("hit rate", f"{run.hit_rate:.2%}", ", ".join(filter(None, (bounds(run), again, stateless)))),
        ("generated tokens a second", f"{run.tokens_per_second:,.0f}", f"{run.completion_tokens:,} in all"),
        ("time", _clock(run.seconds), f"{run.passes:,} passes"),
    ]
    if cost is not None and cost.per_million_tokens is not None:
        tiles.append(("a million tokens", money(cost.per_million_tokens), f"{money(cost.run)} in all"))
    return tiles


def _bars(report: BatchReport) -> list[dict[str, Any]]:
    """Where the time of the device and of the host went; nothing if the run took none."""
    run = report.run
    if not run.seconds:
        return []
    whole = run.device_seconds
    host = {"scheduling": run.scheduling_seconds, "all else": max(0.0, whole - run.scheduling_seconds)}
    return [_bar("The device", seconds_by_activity(run), whole), _bar("The host", host, whole)]


def _bar(what: str, parts: dict[str, float], whole: float) -> dict[str, Any]:
    """A bar and its parts. The first word of a part's name is its class in the style sheet."""
    # The parts are measured by other clocks than the whole, and may exceed it a little.
    scale = 100 / max(whole, sum(parts.values()))
    shown = [
        {
            "kind": name.split()[0],
            "text": f"{name} {_clock(value)} ({value / whole:.0%})",
            "width": f"{scale * value:.2f}",
        }
        for name, value in parts.items()
    ]
    return {"what": what, "parts": shown}


def _clock(value: float) -> str:
    """A duration in two units."""
    if value < 120:
        return duration(value)
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
