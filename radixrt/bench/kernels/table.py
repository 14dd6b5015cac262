"""The figures as tables, one a group."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixrt.bench.kernels.goals import published_times
from radixrt.bench.kernels.measurement import Measurement, Result

_CAPTION = (
    "eager: do_bench, L2 flushed. graph: captured, through as many sets of inputs as exceed twice the L2. us, "
    "medians. %: of the time that the limit beside it allows, by the better time. error: of the worst row, "
    "relative. goal: us, met by either time (floor: missed, but not by far; stretch: more than met). vs: their "
    "better time over ours. Published times are eager ones."
)
_VERDICTS = {"yes": "green", "stretch": "green", "floor": "yellow", "no": "red", "": "dim"}


class Report:
    """Prints a table for every group as soon as it is measured, and at the end what the tables need said."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._notes: dict[str, int] = {}  # the same reason is said once
        self._verdicts: list[str] = []

    def print_group(self, results: Sequence[Result]) -> None:
        """The results of one group, a block of lines a case."""
        self._console.print(_table(results, self._notes))
        self._verdicts += [result.verdict for result in results if result.goal_seconds is not None]

    def print_end(self) -> None:
        """What the columns mean, why there is no time where there is none, and how many goals are met."""
        self._console.print(_CAPTION, style="dim")
        for reason, number in self._notes.items():
            self._console.print(f"[{number}] {reason}", markup=False)
        if self._verdicts:
            met = sum(verdict in ("yes", "stretch") for verdict in self._verdicts)
            self._console.print(f"{met} of {len(self._verdicts)} goals are met.")


def _table(results: Sequence[Result], notes: dict[str, int]) -> Table:
    table = Table(title=results[0].case.group, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for header in ("eager", "graph", "rate", "%", "limit", "error", "goal", "met", "vs"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        for measurement in result.measurements:
            table.add_row(*_row(result, measurement, notes))
        for published in published_times(result.case.group, result.case.shape, result.machine):
            row = _row(result, Measurement(published.name, eager_seconds=published.seconds), notes)
            table.add_row(f"{row[0]}, published", *row[1:], style="dim")
        table.add_section()
    return table


def _row(result: Result, measurement: Measurement, notes: dict[str, int]) -> list[str]:
    is_ours = measurement is result.ours
    name = f"[bold]{escape(result.case.name)}[/]" if is_ours else f"  {escape(measurement.name)}"
    if is_ours and result.in_l2:
        name += f" {_note('its inputs stay in L2 under the graph, however many sets there are', notes)}"
    seconds, ours = measurement.best_seconds, result.ours.best_seconds
    eager, graph = _microseconds(measurement.eager_seconds), _microseconds(measurement.graph_seconds)
    if measurement.reason is not None:
        eager, graph = f"- {_note(measurement.reason, notes)}", "-"
    goal, met = "", ""
    if is_ours:
        goal = _microseconds(result.goal_seconds)
        met = f"[{_VERDICTS[result.verdict]}]{result.verdict}[/]"
    return [
        name,
        eager,
        graph,
        "" if seconds is None else _rate(result, seconds),
        "" if seconds is None else f"{result.percent_of_bound(seconds):.0f}",
        result.bound.limit if is_ours else "",
        "" if measurement.error is None else f"{measurement.error:.1e}",
        goal,
        met,
        "" if is_ours or seconds is None or ours is None else f"{seconds / ours:.2f}x",
    ]


def _note(reason: str, notes: dict[str, int]) -> str:
    return escape(f"[{notes.setdefault(reason, len(notes) + 1)}]")


def _microseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e6 * seconds:,.1f}" if seconds < 1e-3 else f"{1e6 * seconds:,.0f}"


def _rate(result: Result, seconds: float) -> str:
    """Of what limits the case; where that is exponentials, of products."""
    if result.bound.limit == "link":
        return f"{(result.case.work.host_to_device + result.case.work.device_to_host) / seconds / 1e9:.1f} GB/s"
    if result.bound.limit == "bytes":
        return f"{result.case.work.bytes / seconds / 1e12:.2f} TB/s"
    return f"{result.case.work.flops / seconds / 1e12:.0f} TF/s"
