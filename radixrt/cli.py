"""The command `radixrt`. Nothing here imports torch before a model is wanted: help answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import radixrt
from radixrt.bench.command import add_bench_command
from radixrt.errors import PassError, RadixrtError, SchedulerError
from radixrt.sampling_params import SamplingParams

INTERRUPTED = 130  # the shell's number for a process that Ctrl-C ended

_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
_RUNTIME = (
    "model",
    "dtype",
    "device",
    "load_format",
    "context_length",
    "seed",
    "memory_fraction",
    "max_total_tokens",
    "max_running_requests",
    "chunked_prefill_size",
    "schedule_policy",
    "enable_prefix_cache",
    "force_miss",
)

_EXAMPLE = """\
example:
  $ cat questions.jsonl
  {"prompt": "Mira likes Oslo.\\nQ: Mira likes?\\nA:", "custom_id": "a", "sampling_params": {"max_new_tokens": 8}}
  {"token_ids": [5, 8, 13], "metadata": {"source": "page 7"}}

  $ radixrt batch --input questions.jsonl --output answers.jsonl --temperature 0

Each line gives one record in answers.jsonl, in the same order: custom_id, index (the line's place in the
input, from 0), text, token_ids, finish_reason, usage, timings, metadata and error. A bad line gets a record
with its error; the others go on. Ctrl-C stops after the current pass and keeps what is done in
answers.jsonl.partial.

exit status: 0 every line has its record; 1 the run failed; 2 the options, the model or a file cannot be used;
130 stopped by Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (sys.argv without the program's name if None); returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except RadixrtError as error:
        print(f"radixrt: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, (PassError, SchedulerError)) else 2
    except KeyboardInterrupt as error:
        print(f"radixrt: {str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED


def _batch(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from radixrt.batch.job import check_paths, run_batch
    from radixrt.batch.report import print_report

    given = vars(arguments)
    # before the model is loaded: a mistake shows at once
    default_params = SamplingParams(**{name: given[name] for name in _SAMPLING if name in given})
    check_paths(arguments.input, arguments.output, overwrite=arguments.overwrite)
    with radixrt.Runtime(**{name: given[name] for name in _RUNTIME if name in given}) as runtime:
        report = run_batch(
            runtime,
            arguments.input,
            arguments.output,
            default_params=default_params,
            overwrite=arguments.overwrite,
            progress=arguments.progress,
        )
    if report.requests:
        print_report(report, Console(highlight=False), output=str(report.output_path))
    else:
        print(f"{arguments.input} holds no prompts: {report.output_path} is empty")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixrt",
        description="Text generation for prompts that share prefixes: every distinct prefix is computed once.",
        epilog="example: radixrt batch --input questions.jsonl --output answers.jsonl",
    )
    parser.add_argument("--version", action="version", version=f"radixrt {radixrt.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_bench_command(commands)
    batch = commands.add_parser(
        "batch",
        help="answer a file of prompts",
        description="Answer a file of prompts (JSON lines) with a file of records, in the same order.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given keeps the default of the API
    )
    batch.set_defaults(run=_batch)

    files = batch.add_argument_group("files")
    option = files.add_argument
    option("--input", type=Path, required=True, metavar="FILE", help="JSON lines, one prompt each")
    option("--output", type=Path, required=True, metavar="FILE", help="gets one record a line")
    option("--overwrite", action="store_true", default=False, help="replace an output that exists")
    option("--no-progress", dest="progress", action="store_false", default=True, help="no bar on stderr")

    default = SamplingParams()
    option = batch.add_argument_group("sampling parameters of lines that give none").add_argument
    option("--max-new-tokens", type=int, metavar="N", help=f"most tokens to generate ({default.max_new_tokens})")
    option("--temperature", type=float, metavar="T", help=f"0 is greedy ({default.temperature})")
    option(
        "--top-k", type=int, metavar="K", help=f"draw from the K most likely tokens; 0 is all ({default.top_k})"
    )
    option(
        "--top-p", type=float, metavar="P", help=f"draw from the fewest that reach probability P ({default.top_p})"
    )
    option(
        "--min-p", type=float, metavar="P", help=f"none less likely than P times the likeliest ({default.min_p})"
    )

    option = batch.add_argument_group("model").add_argument
    option("--model", metavar="FOLDER_OR_ID", help="Hugging Face folder or hub id (the small built-in model)")
    option("--dtype", metavar="DTYPE", help="of weights and KV, such as bfloat16")
    option("--device", metavar="DEVICE", help="such as cpu, cuda or cuda:1")
    option("--load-format", choices=("auto", "dummy"), help="dummy: random weights from config.json alone")
    option("--context-length", type=int, metavar="N", help="most tokens of a prompt with its answer")
    option("--seed", type=int, metavar="N", help="of the run: what lines without a seed of their own draw")

    option = batch.add_argument_group("memory and schedule").add_argument
    option("--memory-fraction", type=float, metavar="X", help="share of the memory left beside the weights for KV")
    option("--max-total-tokens", type=int, metavar="N", help="slots of the KV pool, whatever is free")
    option("--max-running-requests", type=int, metavar="N", help="most requests in a pass")
    option("--chunked-prefill-size", type=int, metavar="N", help="most prompt tokens in a pass")
    option("--schedule-policy", choices=("lpm", "fcfs"), help="longest prefix, or first come, first served")
    option(
        "--no-prefix-cache",
        dest="enable_prefix_cache",
        action="store_const",
        const=False,
        help="reuse nothing, keep nothing",
    )
    option(
        "--force-miss",
        action="store_const",
        const=True,
        help="find nothing in the cache, on the same code path: for measurements",
    )
    return parser
