"""Prints the figures of the throughput benchmark as tables."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixrt.bench.report import figure_table
from radixrt.bench.throughput.figures import BaselineRun, Profile, ShapeFigures, StartUp

KERNELS_SHOWN = 16
_NAME_LEN = 70  # of a kernel
_CAPTION = (
    "s: medians of the seconds of one Runtime.generate call over the list. out/s: generated tokens a second; "
    "all/s: prompt tokens too. best: the best possible hit rate. bound: roofline lower bound of this device, in "
    "seconds. idle: share of one more run, under the profiler, in which the device did nothing."
)


def print_workloads(figures: ShapeFigures, console: Console) -> None:
    """Print one workload a line, with its bound."""
    columns = "requests", "s", "out/s", "all/s", "hit\nrate", "best", "bound\ns", "x bound", "% of\nbound", "idle"
    table = figure_table(figures.name, "workload", *columns)
    for workload in figures.workloads:
        runs, times = workload.runs, workload.runs.times_bound
        table.add_row(
            workload.workload,
            f"{runs[0].requests:,}",
            f"{runs.seconds:.2f}",
            f"{runs.output_tokens_per_second:,.0f}",
            f"{runs.tokens_per_second:,.0f}",
            f"{runs.hit_rate:.1%}",
            f"{runs.best_hit_rate:.1%}",
            "-" if runs.bound_seconds is None else f"{runs.bound_seconds:.2f}",
            "-" if times is None else f"x{times:.2f}",
            "-" if times is None else f"{100 / times:.0f}",
            "-" if workload.idle_share is None else f"{workload.idle_share:.1%}",
        )
    console.print(table)
    console.print(_CAPTION, style="dim")


def print_texts(figures: ShapeFigures, console: Console) -> None:
    """Print the lists from texts beside the same lists from ids, if prompts are texts."""
    if figures.tokenizer is None:
        return
    title = f"{figures.name}: texts, tokenizer {figures.tokenizer}"
    columns = "prompt\ntokens", "of the list's", "s\nfrom texts", "s\nfrom their ids", "texts / ids"
    table = figure_table(title, "workload", *columns)
    for workload in figures.workloads:
        tokens, text, ids = workload.runs[0].prompt_tokens, workload.runs.seconds, workload.from_ids.seconds
        table.add_row(
            workload.workload,
            f"{tokens:,}",
            f"{tokens / workload.list_tokens:.1%}",
            f"{text:.2f}",
            f"{ids:.2f}",
            f"x{text / ids:.2f}",
        )
    console.print(table)


def print_comparison(figures: ShapeFigures, console: Console) -> None:
    """Print the seconds of ablations and the baseline, also as multiples of ours."""
    ablations = list(figures.workloads[0].ablated)
    has_baseline = any(workload.baseline is not None for workload in figures.workloads)
    if not ablations and not has_baseline:
        return
    headers = [name.replace("-", " ") for name in ablations] + [figures.baseline_name] * has_baseline
    table = figure_table(f"{figures.name}: seconds, and how many times ours", "workload", "s", *headers)
    notes: dict[str, int] = {}
    for workload in figures.workloads:
        ours = workload.runs.seconds
        cells = [_times(workload.ablated[name].seconds, ours) for name in ablations]
        if has_baseline:
            cells.append(_baseline(workload.baseline, workload.runs[0].seconds, notes))
        table.add_row(workload.workload, f"{ours:.2f}", *cells)
    console.print(table)
    for reason, number in notes.items():
        console.print(f"[{number}] {reason}", markup=False)
    if figures.baseline is not None and figures.baseline.settings:
        settings = ", ".join(f"{name}={value!r}" for name, value in figures.baseline.settings.items())
        console.print(f"{figures.baseline.name}: {settings}", style="dim", markup=False)


def print_details(figures: ShapeFigures, console: Console, device_name: str) -> None:
    """Print the CPU's work in a step, and the profiles."""
    step = figures.step
    if step is not None:
        computed = ", the pass itself included" if device_name.startswith("CPU") else ""
        console.print(
            f"decode step of {step.requests} requests: CPU {1e3 * step.cpu_seconds:.2f} ms (planning "
            f"{1e3 * step.planning:.2f}, launching {1e3 * step.launching:.2f}{computed}), then waiting "
            f"{1e3 * step.waiting:.2f} ms"
        )
    for profile in figures.profiles:
        _print_profile(profile, console)


def print_start_up(figures: ShapeFigures, console: Console) -> None:
    """Print the start-up of a process, with and without compiled kernels on the disk."""
    if figures.cold is not None:
        console.print(f"start-up without compiled kernels: {_start_up(figures.cold)}")
    if figures.warm is not None:
        console.print(f"start-up with compiled kernels on the disk: {_start_up(figures.warm)}")


def _start_up(start: StartUp) -> str:
    # The Runtime's own total comes before its parts.
    parts = [f"{name} {seconds:.2f}" for name, seconds in start.parts.items() if name != "total"]
    return (
        f"{start.total:.2f} s to the first token: imports {start.imports:.2f}, "
        f"Runtime {start.runtime:.2f} ({', '.join(parts)}), token {start.first_token:.2f}"
    )


def _print_profile(profile: Profile, console: Console) -> None:
    total = sum(cost.seconds for cost in profile.costs)
    table = Table(
        title=f"{profile.name}: {1e6 * total:,.0f} us a step in all ({Path(profile.file).name})",
        title_justify="left",
    )
    for header in ("us/step", "calls/step", "us/call"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    for cost in profile.costs[:KERNELS_SHOWN]:
        table.add_row(
            f"{1e6 * cost.seconds:,.1f}",
            f"{cost.calls:,.1f}",
            f"{1e6 * cost.seconds / cost.calls:,.2f}",
            escape(cost.name[:_NAME_LEN]),
        )
    console.print(table)


def _times(seconds: float | None, ours: float) -> str:
    return "-" if seconds is None else f"{seconds:.2f} x{seconds / ours:.2f}"


def _baseline(run: BaselineRun | None, ours: float, notes: dict[str, int]) -> str:
    """Compare with our own first repetition, which ran the same list."""
    if run is None:
        return "-"
    if run.stopped_after is not None:
        return f"> {run.stopped_after:g}"
    if run.reason is not None:
        return escape(f"- [{notes.setdefault(run.reason, len(notes) + 1)}]")
    return _times(run.seconds, ours)
