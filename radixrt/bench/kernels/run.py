"""The kernel benchmark: selected cases, as tables, JSON and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from radixrt.bench.catalogue import GROUPS
from radixrt.bench.kernels.attention import attention_cases, attention_sweep
from radixrt.bench.kernels.backward import backward_cases
from radixrt.bench.kernels.case import Case
from radixrt.bench.kernels.elementwise import elementwise_cases, elementwise_sweep
from radixrt.bench.kernels.experts import experts_cases
from radixrt.bench.kernels.kv_copy import kv_copy_cases
from radixrt.bench.kernels.linear import linear_cases, linear_sweep
from radixrt.bench.kernels.linear_fp8 import e4m3_cases
from radixrt.bench.kernels.measurement import CudaTimer, Result, measure, measure_machine
from radixrt.bench.kernels.roofline import Machine
from radixrt.bench.kernels.sampling import sampling_cases, sampling_sweep
from radixrt.bench.kernels.table import Report
from radixrt.bench.kernels.tree import tree_cases, tree_sweep
from radixrt.bench.report import check_files, told, wide_console, write_json
from radixrt.errors import ParameterError, RadixrtError
from radixrt.version import __version__
from triton_ops.implementation import triton

MEASURE_SECONDS, QUICK_SECONDS = 0.1, 0.02  # of calls, for each time
_WIDTH = 140  # of the tables without a terminal


@dataclass(frozen=True)
class Options:
    """Options of the kernel benchmark.

    Attributes:
        only: patterns of cases, GROUP or GROUP/NAME with * and ?; empty: all.
        sweep: also other shapes than the usual ones, without torch.compile.
        quick: shorter, and without torch.compile.
    """

    only: tuple[str, ...] = ()
    sweep: bool = False
    quick: bool = False


def choose_cases(options: Options) -> list[Case[Any]]:
    """The selected cases, in the groups' order. Raises ParameterError if a pattern matches none."""
    cases: list[Case[Any]] = [
        *attention_cases(),
        *tree_cases(),
        *backward_cases(),
        *elementwise_cases(),
        *sampling_cases(),
        *linear_cases(),
        *e4m3_cases(),
        *experts_cases(),
        *kv_copy_cases(),
    ]
    if options.sweep:
        swept: list[Case[Any]] = [
            *attention_sweep(),
            *tree_sweep(),
            *elementwise_sweep(),
            *sampling_sweep(),
            *linear_sweep(),
        ]
        cases += map(_without_compiled, swept)
    named = {(case.group, case.name): case for case in reversed(cases)}  # a sweep has some of the usual ones
    cases = list(reversed(named.values()))
    cases.sort(key=lambda case: list(GROUPS).index(case.group))
    return [cases[i] for i in matching_cases(options.only, [(case.group, case.name) for case in cases])]


def matching_cases(only: Sequence[str], cases: Sequence[tuple[str, str]]) -> list[int]:
    """Indices of the cases (group, name) that match a pattern, in order; without patterns, of all.

    A pattern is GROUP or GROUP/NAME with * and ?. Raises ParameterError if one matches no case.
    """
    if not only:
        return list(range(len(cases)))
    found: set[int] = set()
    for pattern in only:
        group, _, name = pattern.partition("/")
        if group not in GROUPS:
            raise ParameterError(f"only is {pattern!r}; its group must be one of: {', '.join(GROUPS)}")
        members = [i for i, case in enumerate(cases) if case[0] == group]
        matching = [i for i in members if fnmatchcase(cases[i][1], name or "*")]
        if not matching:
            names = ", ".join(repr(cases[i][1]) for i in members)
            raise ParameterError(f"only is {pattern!r}, which is none of {group}'s: {names}")
        found.update(matching)
    return sorted(found)


def _without_compiled(case: Case[Any]) -> Case[Any]:
    """The case without torch.compile, which takes too long for a sweep."""
    return replace(case, contenders=tuple(c for c in case.contenders if not c.compiles))


def run_benchmark(options: Options, *, json_file: Path | None = None, plot_file: Path | None = None) -> int:
    """Measure, print, and write the requested files. Returns 0, or 1 if a kernel of ours failed or was wrong.

    Raises:
        ParameterError: a pattern matches nothing, or a file cannot be written; found before anything runs.
        RadixrtError: there is no GPU, no Triton or, for a picture, no matplotlib.
    """
    check_files(json_file, plot_file)
    cases = choose_cases(options)
    if not torch.cuda.is_available() or torch.version.cuda is None or not triton.__version__:
        raise RadixrtError("this benchmark needs an NVIDIA GPU, a torch made for CUDA, and Triton")
    console = wide_console(_WIDTH)
    timer = CudaTimer(QUICK_SECONDS if options.quick else MEASURE_SECONDS)
    device = torch.device("cuda", torch.cuda.current_device())
    machine = measure_machine(timer, device)
    environment = {"radixrt": __version__, "torch": torch.__version__, "triton": triton.__version__}
    console.print(told(environment))
    console.print(describe(machine))
    report = Report(console)
    results: list[Result] = []
    with tqdm(total=len(cases), unit=" cases", file=sys.stderr) as bar:
        for group, members in groupby(cases, lambda case: case.group):
            measured = []
            for case in members:
                bar.set_postfix_str(f"{group}/{case.name}")
                measured.append(measure(case, machine, timer, device, compiled=not options.quick))
                bar.update()
            with tqdm.external_write_mode():
                report.print_group(measured)
            results += measured
            if json_file is not None:  # after each group, so that an aborted run loses little
                written = {
                    "environment": environment,
                    "machine": asdict(machine),
                    "options": asdict(options),
                    "results": [result.to_dict() for result in results],
                }
                write_json(json_file, written)
    report.print_end()
    if plot_file is not None:
        from radixrt.bench.kernels.plot import plot  # matplotlib is an extra

        plot([result.to_dict() for result in results], plot_file, card=machine.name)
    return int(any(result.ours.reason is not None for result in results))


def draw_records(records_file: Path, plot_file: Path, only: Sequence[str] = ()) -> None:
    """Draw the results of an earlier run, on this machine or another; `only`: see `matching_cases`.

    Raises:
        ParameterError: the file holds no such records, a pattern matches none, or the picture cannot be written.
        RadixrtError: there is no matplotlib.
    """
    check_files(None, plot_file)
    try:
        report = json.loads(records_file.read_text(encoding="utf-8"))
        card, results = report["machine"]["name"], report["results"]
        cases = [(result["group"], f"{result['shape']} {result['variant']}".strip()) for result in results]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ParameterError(
            f"{records_file} is not what radixrt bench kernels --json has written: {type(error).__name__}: {error}"
        ) from error
    from radixrt.bench.kernels.plot import plot  # matplotlib is an extra

    plot([results[i] for i in matching_cases(only, cases)], plot_file, card=card)


def describe(machine: Machine) -> str:
    """The machine's measured speeds, in a line."""
    e4m3 = "" if machine.e4m3_flops is None else f", of e4m3 {machine.e4m3_flops / 1e12:.0f}"
    return (
        f"{machine.name}: copies {machine.bandwidth / 1e12:.2f} TB/s (read and written), bf16 products of "
        f"8192 x 8192 {machine.flops / 1e12:.0f} TFLOP/s{e4m3}, L2 {machine.l2_bytes / 2**20:.0f} MiB, link "
        f"{machine.host_to_device / 1e9:.1f} GB/s to the device and {machine.device_to_host / 1e9:.1f} from it; "
        f"not measured: exponentials {machine.exps / 1e12:.1f} T/s"
    )
