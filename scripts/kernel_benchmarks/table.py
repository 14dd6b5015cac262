"""Prints the figures of the kernel benchmark, one table for each group."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixrt.bench.report import figure_table
from scripts.kernel_benchmarks.case import MAX_SLOWER
from scripts.kernel_benchmarks.measurement import Measurement, Result

_CAPTION = (
    "eager: do_bench, L2 flushed. graph: captured, through as many sets of inputs as exceed twice the L2. us, "
    "medians. %: the share of the limit that the better time reaches. error: of the worst row, "
    "relative. vs: their better time over ours."
)
_PLAN_CAPTION = (
    "bytes: % of the time that the distinct bytes alone allow. read: tokens that the plan's items read, over the "
    "distinct ones. plan: us of the host to make it. vs of flat: the speed-up, (!) where ours is more than "
    f"{100 * (MAX_SLOWER - 1):.0f} % slower."
)
_HEADERS = ("eager", "graph", "rate", "%", "limit", "error", "vs")
_PLAN_HEADERS = ("eager", "graph", "%", "limit", "bytes", "read", "plan", "error", "vs")


class Report:
    """Prints a table for every group as soon as it is measured, and notes on the tables at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._notes: dict[str, int] = {}  # each reason is printed once
        self._slower: list[bool] = []  # for each case with a limit
        self._has_plans = False

    def print_group(self, results: Sequence[Result]) -> None:
        """Print the results of one group, a block of lines for each case."""
        self._console.print(_table(results, self._notes))
        self._slower += [result.is_slower for result in results if result.is_slower is not None]
        self._has_plans |= _have_plans(results)

    def print_end(self) -> None:
        """Print the meaning of the columns, and the reasons for missing times."""
        self._console.print(_CAPTION, style="dim")
        if self._has_plans:
            self._console.print(_PLAN_CAPTION, style="dim")
        for reason, number in self._notes.items():
            self._console.print(f"[{number}] {reason}", markup=False)
        if self._slower:
            self._console.print(
                f"Tree is more than {100 * (MAX_SLOWER - 1):.0f} % slower than flat in {sum(self._slower)} of "
                f"{len(self._slower)} cases."
            )


def _have_plans(results: Sequence[Result]) -> bool:
    return any(measurement.plan is not None for result in results for measurement in result.measurements)


def _table(results: Sequence[Result], notes: dict[str, int]) -> Table:
    headers = _PLAN_HEADERS if _have_plans(results) else _HEADERS
    table = figure_table(results[0].case.group, "", *headers)
    for result in results:
        for measurement in result.measurements:
            name, cells = _cells(result, measurement, notes)
            table.add_row(name, *(cells[header] for header in headers))
        table.add_section()
    return table


def _cells(result: Result, measurement: Measurement, notes: dict[str, int]) -> tuple[str, dict[str, str]]:
    """The name of a line, and its cells."""
    is_ours = measurement is result.ours
    name = f"[bold]{escape(result.case.name)}[/]" if is_ours else f"  {escape(measurement.name)}"
    if is_ours and result.in_l2:
        name += f" {_note('its inputs stay in L2 under the graph, however many sets there are', notes)}"
    seconds, ours = measurement.best_seconds, result.ours.best_seconds
    eager, graph = _microseconds(measurement.eager_seconds), _microseconds(measurement.graph_seconds)
    if measurement.reason is not None:
        eager, graph = f"- {_note(measurement.reason, notes)}", "-"
    versus = "" if is_ours or seconds is None or ours is None else f"{seconds / ours:.2f}x"
    if result.is_slower and measurement.name == result.case.never_slower_than:
        versus = f"[red]{versus} (!)[/]"
    plan = measurement.plan
    return name, {
        "eager": eager,
        "graph": graph,
        "rate": "" if seconds is None else _rate(result, seconds),
        "%": "" if seconds is None else f"{result.percent_of_bound(seconds):.0f}",
        "limit": result.bound.limit if is_ours else "",
        "bytes": "" if seconds is None else f"{result.percent_of_bandwidth(seconds):.0f}",
        "read": "" if plan is None else f"{plan.read_factor:.2f}x",
        "plan": "" if plan is None else f"{1e6 * plan.seconds:.0f}",
        "error": "" if measurement.error is None else f"{measurement.error:.1e}",
        "vs": versus,
    }


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
