"""`radixrt bench throughput`: its options. Nothing heavy is imported before it runs."""

# Tests: tests/bench/test_throughput.py

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from radixrt.bench.catalogue import ABLATIONS, BASELINES, CONFIGS, LISTS, SCALES, SHAPES

_FILES = ("json", "plot")

_DESCRIPTION = """\
Time one Runtime.generate call over each of five lists of prompts, from an empty cache. Printed with each time: the
time that no engine can beat on the device and, on an NVIDIA H200, the goal. On request also, in the same run: the
engine with parts switched off, transformers' continuous batching, the device's idle time, the CPU's work in a
decode step, a fresh process to its first token, and profiles.
"""


def add_throughput(benchmarks: Any) -> None:
    """Add `throughput` to the subparsers of `radixrt bench`."""
    parser = benchmarks.add_parser(
        "throughput",
        help="five lists of prompts, compared with the bound, goals, ablations and transformers",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # options not given keep the defaults of Options
    )
    parser.set_defaults(run=_throughput)

    option = parser.add_argument_group("workloads").add_argument
    option(
        "--config",
        dest="configs",
        action="append",
        choices=tuple(SHAPES),
        help=f"random weights of this shape; may be repeated ({', '.join(CONFIGS['full'])})",
    )
    option(
        "--model", metavar="FOLDER_OR_ID", help="Hugging Face folder or hub id, or: built-in; instead of shapes"
    )
    option(
        "--workload",
        dest="workloads",
        action="append",
        choices=LISTS,
        metavar="NAME",
        help=f"only this one, of {', '.join(LISTS)}; may be repeated (all)",
    )
    option("--scale", choices=tuple(SCALES), help="cpu: small sizes and a tiny shape, for a laptop (full)")
    option("--repeat", type=int, metavar="N", help="repetitions with fresh prompts; times are medians (2)")
    option("--seed", type=int, metavar="N", help="of the prompts, the draws and the random weights (0)")
    option("--device", metavar="DEVICE", help="such as cpu, cuda or cuda:1")

    option = parser.add_argument_group("further measurements in the same run").add_argument
    option("--no-prefix-cache", action="store_true", help="again without the prefix cache")
    option("--no-overlap", action="store_true", help="again with passes that wait for one another's results")
    option("--no-graphs", action="store_true", help="again without captured graphs")
    option("--flat", action="store_true", help="again with attention that reads shared KV once for each request")
    option("--baseline", choices=BASELINES, help="again with this engine, each list once")
    option(
        "--baseline-limit", type=float, metavar="SECONDS", help="time limit of the baseline for each list (120)"
    )
    option("--idle", action="store_true", help="the GPU's idle share of the time, in one more run")
    option("--step", action="store_true", help="the CPU's work in a decode step of 512 requests")
    option("--start-up", action="store_true", help="a fresh process from its start to its first token")

    option = parser.add_argument_group("bound: for an unknown device").add_argument
    option("--bandwidth", type=float, metavar="BYTES/S", help="of its memory, such as 4.26e12")
    option("--flops", type=float, metavar="OPS/S", help="dense products of the dtype, such as 790e12")

    option = parser.add_argument_group("files").add_argument
    option("--json", type=Path, default=None, metavar="FILE", help="write every run's figures")
    option("--plot", type=Path, default=None, metavar="FILE.png", help="draw a picture (needs radixrt[bench])")
    option("--trace", type=Path, metavar="FOLDER", help="write profiles of a prefill pass and of decode steps")


def _epilog() -> str:
    return """\
examples:
  radixrt bench throughput --scale cpu
  radixrt bench throughput --config qwen3-0.6b --workload docqa --no-overlap --idle
  radixrt bench throughput --flat --no-prefix-cache --no-overlap --no-graphs --baseline transformers --idle \\
      --step --start-up --json out.json --plot out.png --trace traces

Answers have fixed lengths and are drawn at temperature 0.6. A baseline that fails is shown as -, with the reason
below the table. Traces are for chrome://tracing or ui.perfetto.dev.

exit status: 0 done; 1 a pass failed; 2 the options, the model or a file cannot be used; 130 stopped by Ctrl-C.
"""


def _throughput(arguments: argparse.Namespace) -> int:
    # Before torch is imported: idle OpenMP threads that spin would slow other processes on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from radixrt.bench.throughput.benchmark import run_benchmark
    from radixrt.bench.throughput.options import Options

    given = {name: value for name, value in vars(arguments).items() if name not in ("run", *_FILES)}
    given["ablations"] = tuple(name for name in ABLATIONS if given.pop(name.replace("-", "_"), False))
    for name in ("configs", "workloads"):
        if name in given:
            given[name] = tuple(dict.fromkeys(given[name]))
    return run_benchmark(Options(**given), json_file=arguments.json, plot_file=arguments.plot)
