"""The throughput benchmark: shape after shape, as tables, JSON and a picture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radixrt.bench.report import check_files, wide_console, write_json
from radixrt.bench.subject import environment_of, model_of
from radixrt.bench.throughput.figures import ShapeFigures, WorkloadFigures
from radixrt.bench.throughput.goals import goal_of
from radixrt.bench.throughput.measurement import ShapeMeasurement, Step
from radixrt.bench.throughput.options import Options
from radixrt.bench.throughput.table import print_comparison, print_details, print_start_up, print_workloads
from radixrt.execution.device import choose_device

_WIDTH = 125  # of the tables where there is no terminal


def run_benchmark(options: Options, *, json_file: Path | None = None, plot_file: Path | None = None) -> int:
    """Measure, print, and write what is asked for. Returns 0, whatever becomes of the baseline.

    Raises:
        RadixrtError: a Runtime cannot be made, or a list does not fit; or a file cannot be written, which is found
            before anything runs.
    """
    check_files(json_file, plot_file)
    console = wide_console(_WIDTH)
    named = ", ".join(f"{name} (random weights)" for name in options.subjects if name is not None)
    environment = environment_of(options.device, options.model or named)
    console.print(", ".join(f"{name} {value}" for name, value in environment.items()))
    shapes = [_shape_figures(config, options, environment["device"]) for config in options.subjects]
    with tqdm(total=_parts(options), unit=" runs", file=sys.stderr) as bar:

        def done(part: str) -> None:
            bar.set_postfix_str(part)
            bar.update()
            if json_file is not None:  # after each part: a run that is cut short loses little
                write_json(json_file, _report(options, environment, shapes))

        for figures in shapes:
            with _measurement(figures, options, done) as measurement:
                measurement.measure_engine()
                with tqdm.external_write_mode():
                    print_workloads(figures, console)
                    print_details(figures, console, environment["device"])
                for ablation in options.ablations:
                    measurement.measure_ablation(ablation)
                if options.start_up:
                    measurement.measure_start_up()
                    with tqdm.external_write_mode():
                        print_start_up(figures, console, environment["device"])
        if options.baseline is not None:
            for figures in shapes:  # when all of ours is done: nothing that goes wrong there can touch it
                with _measurement(figures, options, done) as measurement:
                    measurement.measure_baseline()
    for figures in shapes:
        print_comparison(figures, console)
    if plot_file is not None:
        from radixrt.bench.throughput.plot import plot_figures  # matplotlib is an extra

        plot_figures(shapes, plot_file, title=f"Throughput on {environment['device']}")
    return 0


def _shape_figures(config: str | None, options: Options, device_name: str) -> ShapeFigures:
    return ShapeFigures(
        config,
        options.model or f"{config} (random weights)",
        [WorkloadFigures(name, goal_of(config, name, device_name)) for name in options.workloads],
    )


@contextlib.contextmanager
def _measurement(figures: ShapeFigures, options: Options, done: Step) -> Iterator[ShapeMeasurement]:
    with model_of(options.model, figures.config) as (model, load_format):
        yield ShapeMeasurement(figures, options, model, load_format, done)


def _parts(options: Options) -> int:
    """How often `done` is called."""
    lists = len(options.workloads)
    a_shape = lists * options.repeat * (1 + len(options.ablations)) + lists * (options.baseline is not None)
    if choose_device(options.device).type == "cuda":
        a_shape += lists * options.idle
    a_shape += options.step + options.start_up + (options.trace is not None)
    return len(options.subjects) * a_shape


def _report(options: Options, environment: dict[str, str], shapes: Sequence[ShapeFigures]) -> dict[str, Any]:
    return {
        "environment": environment,
        "options": asdict(options) | {"trace": None if options.trace is None else str(options.trace)},
        "shapes": [figures.to_dict() for figures in shapes],
    }
