"""A report as a self-contained HTML page: figures, time by activity, plots, and the shared prefixes."""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

from datetime import datetime, timezone
from html import escape

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
from radixrt.report.html import figure_table, html_page, prefix_branches
from radixrt.report.outline import Show, outline
from radixrt.report.plots import timeline_plots

MAX_PREFIXES = 500

_STYLE = """
.tiles { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .9rem; }
.tiles b { display: block; font-size: 1.6rem; font-weight: 600; line-height: 1.3; }
.tables { display: grid; gap: 0 3rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.tables table { width: 100%; } .tables th { width: 10.5rem; }
.stack { background: var(--rest); border-radius: 3px; display: flex; height: 1.5rem; overflow: hidden; }
.stack i { display: block; }
.spent p { margin: .9rem 0 .25rem; }
.prefill { background: var(--strong); } .decode { background: var(--soft); }
.scheduling { background: var(--warm); } .idle, .all { background: var(--rest); }
.key { border-radius: 2px; display: inline-block; height: .75em; margin-right: .4em; width: .75em; }
.keys { font-size: .92em; margin-top: .2rem; } .keys span { display: inline-block; margin-right: 1.4rem; }
.plots { display: grid; gap: 1.6rem 2.5rem; }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } figure .dim { font-size: .88em; }
svg { display: block; height: auto; margin-top: .3rem; width: 100%; } svg text { font-family: inherit; }
"""


def report_page(report: BatchReport, *, title: str, plan: BatchPlan | None, show: Show) -> str:
    """The page as HTML.

    Args:
        title: such as the input's name.
        plan: its largest shared prefixes are shown, if there is one.
        show: token ids to text.
    """
    body = "".join(
        (
            f'<p class="dim">{escape(_summary(report))}</p>\n',
            _tiles(report),
            _tables(report),
            _time(report),
            _plots(report),
            _prefixes(plan, show) if plan else "",
        )
    )
    return html_page(f"Report of {title}", body, style=_STYLE)


def _prefixes(plan: BatchPlan, show: Show) -> str:
    branches = prefix_branches(outline(plan, MAX_PREFIXES), show, int(plan.tree.saved_tokens.sum()))
    return f"<h2>Shared prefixes</h2>\n{branches}"


def _summary(report: BatchReport) -> str:
    when = datetime.fromtimestamp(report.run.started, timezone.utc)
    state = "complete" if report.is_complete else "incomplete"
    kept = f", {report.kept:,} of them from earlier runs" if report.kept else ""
    return (
        f"{state}: {report.records}{kept}, {report.errors:,} with an error; "
        f"begun {when:%Y-%m-%d %H:%M} UTC"
    )


def _tiles(report: BatchReport) -> str:
    run, cost = report.run, report.cost
    again = f"{run.recomputed_tokens:,} tokens computed again" if run.recomputed_tokens else ""
    stateless = f"{run.stateless_tokens:,} lacked a state" if run.stateless_tokens else ""
    tiles = {
        "hit rate": (f"{run.hit_rate:.2%}", ", ".join(filter(None, (bounds(run), again, stateless)))),
        "generated tokens a second": (f"{run.tokens_per_second:,.0f}", f"{run.completion_tokens:,} in all"),
        "time": (_clock(run.seconds), f"{run.passes:,} passes"),
    }
    if cost is not None and cost.per_million_tokens is not None:
        tiles["a million tokens"] = (money(cost.per_million_tokens), f"{money(cost.run)} in all")
    cells = (
        f'<div><span class="dim">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="dim">{escape(more)}</span></div>\n'
        for name, (value, more) in tiles.items()
    )
    return f'<div class="tiles">\n{"".join(cells)}</div>\n'


def _tables(report: BatchReport) -> str:
    own = run_figures(report.run) if report.kept else {}
    return (
        '<div class="tables">\n'
        f"<section>\n<h2>The whole file</h2>\n{figure_table(file_figures(report))}</section>\n"
        f"<section>\n<h2>This run</h2>\n{figure_table(own | time_figures(report))}</section>\n</div>\n"
    )


def _time(report: BatchReport) -> str:
    run = report.run
    if not run.seconds:
        return ""
    host = {
        "scheduling": run.scheduling_seconds,
        "all else": max(0.0, run.device_seconds - run.scheduling_seconds),
    }
    device = _bar("The device", seconds_by_activity(run), run.device_seconds)
    return (
        '<section class="spent">\n<h2>Where the time went</h2>\n'
        f"{device}{_bar('The host', host, run.device_seconds)}</section>\n"
    )


def _bar(what: str, parts: dict[str, float], whole: float) -> str:
    """A bar and its key. The first word of a part's name is its class in the style sheet."""
    texts = {name: f"{name} {_clock(value)} ({value / whole:.0%})" for name, value in parts.items()}
    # The parts are measured by other clocks than the whole, and may exceed it a little.
    scale = 100 / max(whole, sum(parts.values()))
    blocks = "".join(
        f'<i class="{name.split()[0]}" style="width: {scale * value:.2f}%"></i>' for name, value in parts.items()
    )
    keys = "".join(
        f'<span><i class="key {name.split()[0]}"></i>{escape(text)}</span>' for name, text in texts.items()
    )
    label = escape(f"{what}: {', '.join(texts.values())}")
    return (
        f'<p>{escape(what)}</p>\n<div class="stack" role="img" aria-label="{label}">{blocks}</div>\n'
        f'<div class="keys dim">{keys}</div>\n'
    )


def _plots(report: BatchReport) -> str:
    plots = timeline_plots(report)
    figures = (
        f'<figure><figcaption>{escape(plot.title)}</figcaption><span class="dim">{escape(plot.told)}</span>'
        f"{plot.svg}</figure>\n"
        for plot in plots
    )
    return f'<h2>Over time</h2>\n<div class="plots">\n{"".join(figures)}</div>\n' if plots else ""


def _clock(value: float) -> str:
    """A duration in two units."""
    if value < 120:
        return duration(value)
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
