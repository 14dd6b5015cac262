"""`radixrt compile`: compile a model's kernels before the first run of it."""

from __future__ import annotations

import argparse
import time
from typing import Any

import radixrt
from radixrt.cli.exit_status import DONE
from radixrt.cli.options import MODEL, SCHEDULE, add_command, add_options, runtime_options
from radixrt.errors import ParameterError

_EXAMPLES = """\
examples:
  radixrt compile --model Qwen/Qwen3-0.6B
  radixrt compile --model FOLDER --deterministic --max-running-requests 2048

Weights are not read: random ones of the same shapes stand in. What is compiled lies in Triton's cache
($TRITON_CACHE_DIR, or ~/.triton/cache), for this kind of GPU, these options, and these versions of Triton and
radixrt; a folder that several machines share is filled once. A Runtime compiles what it lacks by itself, so this
is for images and clusters.

exit status: 0 done; 2 there is no GPU, or the options or the model cannot be used; 75 the GPU failed; 130 stopped
by Ctrl-C.
"""


def add_compile_command(commands: Any) -> None:
    """Add `compile` to the subparsers of `radixrt`."""
    parser = add_command(
        commands,
        "compile",
        usage="[options]",
        help="compile a model's kernels before its first run",
        description="Compile a model's kernels for this machine's GPU, as a Runtime with these options would.",
        epilog=_EXAMPLES,
        run=_compile,
    )
    add_options(parser, "model", [option for option in MODEL if option.name != "load_format"])
    add_options(parser, "memory and schedule", SCHEDULE)
    parser.add_argument("--verbose", action="store_true", help="tell on stderr what starting up takes")


def _compile(arguments: argparse.Namespace) -> int:
    from radixrt.config import RuntimeConfig
    from radixrt.ranks.rank import check_config

    options = {**runtime_options(arguments), "load_format": "dummy"}
    device, runs_kernels, _ = check_config(RuntimeConfig(**options))
    if not runs_kernels:
        raise ParameterError(f"nothing is compiled for {device}: kernels run on an NVIDIA GPU, with Triton")
    with radixrt.Runtime(**options) as runtime:
        began, seconds = time.perf_counter(), dict(runtime.start_up)
        runtime.capture_graphs()  # smaller passes have kernels of their own
        took = time.perf_counter() - began
    seconds["graphs"] += took
    total = seconds.pop("total") + took
    print(f"compiled in {total:.1f} s: " + ", ".join(f"{name} {took:.1f}" for name, took in seconds.items()))
    return DONE
