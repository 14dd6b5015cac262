"""Times every Triton kernel on an NVIDIA GPU at typical shapes, beside its roofline and torch's own kernels.

python scripts/bench_kernels.py --json out.json
python scripts/bench_kernels.py --only decode --only 'extend/B=8*' --quick
python scripts/bench_kernels.py --only 'elementwise/*rms_norm*' --sweep

Each kernel is timed twice: called one by one with the L2 cache flushed, and in a captured graph. Its result is
first compared with a reference. Printed with each time: the share of this card's bandwidth and arithmetic, both
measured in the same run, and times of torch's SDPA, FlexAttention and torch.compile on the same inputs. Tree
attention, with the engine's plans, is compared with flat attention; its plan's reads and cost are printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from radixrt.bench.report import check_files, told, wide_console, write_json
from radixrt.errors import ParameterError, RadixrtError
from radixrt.version import __version__
from scripts.kernel_benchmarks.attention import attention_cases, attention_sweep
from scripts.kernel_benchmarks.backward import backward_cases
from scripts.kernel_benchmarks.case import Case
from scripts.kernel_benchmarks.elementwise import elementwise_cases, elementwise_sweep
from scripts.kernel_benchmarks.experts import experts_cases
from scripts.kernel_benchmarks.kv_copy import kv_copy_cases
from scripts.kernel_benchmarks.linear import linear_cases, linear_sweep
from scripts.kernel_benchmarks.linear_fp8 import e4m3_cases
from scripts.kernel_benchmarks.measurement import CudaTimer, Result, measure, measure_machine
from scripts.kernel_benchmarks.roofline import Machine
from scripts.kernel_benchmarks.sampling import sampling_cases, sampling_sweep
from scripts.kernel_benchmarks.table import Report
from scripts.kernel_benchmarks.tree import tree_cases, tree_sweep
from triton_ops.implementation import triton

GROUPS = {
    "decode": "one new token a request over its KV, slots scattered and consecutive (bound by bytes)",
    "decode-fp8": "the same over KV in e4m3, compared with bf16 (bound by bytes)",
    "tree": "decode over shared prefixes, read once, compared with flat attention (bound by bytes or products)",
    "extend": "causal attention of new tokens over a prefix and themselves (bound by products, or by exp)",
    "short-extend": "16 new tokens on a prefix of 32,768 (bound by bytes)",
    "same-bits": "deterministic attention beside the other one: decode and extend (bound as these)",
    "backward": "attention for training, forward and backward pass together (bound by products, or by exp)",
    "elementwise": "norms, gated activations, rotary embedding and KV store (bound by bytes)",
    "sampling": "draws, greedy choices and log-probabilities (bound by the bytes of the logits, once)",
    "linear": "output projections of small batches, with the norm that follows (bound by bytes, or by products)",
    "linear-fp8": "projections of weights in e4m3, with the quantisation of x (bound by bytes, or by products)",
    "experts": "experts of gpt-oss 20b in MXFP4, compared with bf16 (bound by bytes, or by products)",
    "kv_copy": "KV to and from pinned host memory (bound by the link) and within the pool",
}
"""By name: a description, in running order."""
USUAL: Sequence[Callable[[], Iterable[Case[Any]]]] = (
    attention_cases,
    tree_cases,
    backward_cases,
    elementwise_cases,
    sampling_cases,
    linear_cases,
    e4m3_cases,
    experts_cases,
    kv_copy_cases,
)
SWEEPS: Sequence[Callable[[], Iterable[Case[Any]]]] = (
    attention_sweep,
    tree_sweep,
    elementwise_sweep,
    sampling_sweep,
    linear_sweep,
)
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
    named = {(case.group, case.name): case for make in USUAL for case in make()}
    if options.sweep:
        for case in chain.from_iterable(make() for make in SWEEPS):  # which have some of the usual ones
            named.setdefault((case.group, case.name), _without_compiled(case))
    cases = sorted(named.values(), key=lambda case: list(GROUPS).index(case.group))
    if not options.only:
        return cases
    found = [_matching(pattern, cases) for pattern in options.only]
    return [case for case in cases if any(case in matching for matching in found)]


def _matching(pattern: str, cases: Sequence[Case[Any]]) -> list[Case[Any]]:
    group, _, name = pattern.partition("/")
    if group not in GROUPS:
        raise ParameterError(f"only is {pattern!r}; its group must be one of: {', '.join(GROUPS)}")
    members = [case for case in cases if case.group == group]
    matching = [case for case in members if fnmatchcase(case.name, name or "*")]
    if not matching:
        names = ", ".join(repr(case.name) for case in members)
        raise ParameterError(f"only is {pattern!r}, which is none of {group}'s: {names}")
    return matching


def _without_compiled(case: Case[Any]) -> Case[Any]:
    """The case without torch.compile, which takes too long for a sweep."""
    return replace(case, contenders=tuple(c for c in case.contenders if not c.compiles))


def run_benchmark(options: Options, json_file: Path | None = None) -> int:
    """Measure, print, and write the requested file. Returns 0, or 1 if a kernel of ours failed or was wrong.

    Raises:
        ParameterError: a pattern matches nothing, or a file cannot be written; found before anything runs.
        RadixrtError: there is no GPU, or no Triton.
    """
    check_files(json_file)
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
    return int(any(result.ours.reason is not None for result in results))


def describe(machine: Machine) -> str:
    """The machine's measured speeds, in a line."""
    e4m3 = "" if machine.e4m3_flops is None else f", of e4m3 {machine.e4m3_flops / 1e12:.0f}"
    return (
        f"{machine.name}: copies {machine.bandwidth / 1e12:.2f} TB/s (read and written), bf16 products of "
        f"8192 x 8192 {machine.flops / 1e12:.0f} TFLOP/s{e4m3}, L2 {machine.l2_bytes / 2**20:.0f} MiB, link "
        f"{machine.host_to_device / 1e9:.1f} GB/s to the device and {machine.device_to_host / 1e9:.1f} from it; "
        f"not measured: exponentials {machine.exps / 1e12:.1f} T/s"
    )


_EPILOG = """\
groups:
{groups}

A case's name has its shape: B requests, L tokens each, or prefix+new ones; H=query/KV heads and D=head dimension
where they are not 32/8 and 128. A pattern that matches nothing prints the names. An implementation that cannot run
is shown as -, with the reason below the tables. plot_tree_attention.py draws what a sweep of tree has written.

exit status: 0 done; 1 one of our kernels failed or was wrong; 2 there is no GPU, or the options or a file cannot
be used.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EPILOG.format(groups="\n".join(f"  {name:<13} {words}" for name, words in GROUPS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GROUP[/PATTERN]",
        help="only these cases; * matches any text, ? any letter; may be repeated (all)",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="also other batches, lengths, head dimensions and sizes, without torch.compile (longer)",
    )
    parser.add_argument("--quick", action="store_true", help="shorter, and without torch.compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    given = parser.parse_args(argv)
    try:
        return run_benchmark(Options(tuple(given.only), given.sweep, given.quick), given.json)
    except RadixrtError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
