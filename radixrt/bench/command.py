"""`radixrt bench`: its options. Nothing heavy is imported before a benchmark runs."""

# Tests: tests/bench/test_prefix_reuse.py, tests/bench/test_throughput.py

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from radixrt.bench.catalogue import (
    ABLATIONS,
    BASELINES,
    CONFIGS,
    LISTS,
    SCALES,
    SHAPES,
    WORKLOADS,
    size_table,
)

_OF_THE_COMMAND = ("run", "prints", "json", "plot", "verbose")  # not of the benchmarks


def add_bench_command(commands: Any) -> None:
    """Add `bench` to the subparsers of a command. `arguments.run(arguments)` runs it and returns the status."""
    bench = commands.add_parser(
        "bench",
        help="measure prefix reuse and throughput",
        description="Reproducible benchmarks.",
        epilog="example: radixrt bench prefix-reuse --scale cpu",
    )
    benchmarks = bench.add_subparsers(metavar="BENCHMARK", required=True)
    _add_prefix_reuse(benchmarks)
    _add_throughput(benchmarks)


# -- what several benchmarks have -----------------------------------------------------------------------

_STATUS = """
exit status: 0 done; 1 a pass failed; 2 the options, the model or a file cannot be used; 130 stopped by Ctrl-C,
143 by SIGTERM.
"""
_JSON: dict[str, Any] = {"type": Path, "default": None, "metavar": "FILE"}
_PLOT: dict[str, Any] = {"type": Path, "default": None, "metavar": "FILE.png"}
_PICTURE = "draw a picture (needs matplotlib)"
_MODEL = "Hugging Face folder or hub id, or: built-in"
_DEVICE = "such as cpu, cuda or cuda:1"


def _add_benchmark(
    benchmarks: Any, name: str, run: Callable[[argparse.Namespace], int], **texts: Any
) -> argparse.ArgumentParser:
    """Add a benchmark whose options, if not given, keep the defaults of its `Options`."""
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        **texts,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--verbose", action="store_true", help="tell on stderr what starting up takes")
    return parser


def _add_model(parser: argparse.ArgumentParser, usual: str) -> None:
    """`usual`: shapes where none is given."""
    option = parser.add_argument_group("model").add_argument
    option("--model", metavar="FOLDER_OR_ID", help=_MODEL)
    option("--config", choices=tuple(SHAPES), help=f"random weights of a known shape ({usual})")
    option("--dtype", metavar="DTYPE", help="of weights and KV, such as bfloat16")
    option("--device", metavar="DEVICE", help=_DEVICE)


def _add_bound(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("bound: for an unknown device, of one card").add_argument
    option("--bandwidth", type=float, metavar="BYTES/S", help="of its memory, such as 4.26e12")
    option("--flops", type=float, metavar="OPS/S", help="dense products of the dtype, such as 790e12")


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options given for `Options`, without repeated names."""
    given = {name: value for name, value in vars(arguments).items() if name not in _OF_THE_COMMAND}
    return {
        name: tuple(dict.fromkeys(value)) if isinstance(value, list) else value for name, value in given.items()
    }


def _lines(rows: Iterable[tuple[str, str]]) -> str:
    """Names and words, a name a line."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {words}" for name, words in rows)


# -- prefix-reuse ---------------------------------------------------------------------------------------

_PREFIX_REUSE = """\
Run workloads that share prefixes with the cache and with misses forced on the same code path. Prints time,
speed-up, tokens a second, hit rate beside the best possible one (from the token lists alone), and the share of the
device's bandwidth and arithmetic that the time reaches.
"""
_PREFIX_REUSE_EXAMPLES = """\
examples:
  radixrt bench prefix-reuse
  radixrt bench prefix-reuse --workload docqa --workload samples --model built-in --json out.json
  radixrt bench prefix-reuse --scale full --config llama-3.1-8b --dtype bfloat16 --plot out.png
  radixrt bench prefix-reuse --workload chat --max-total-tokens 4000 --host-memory-gb 1

sizes at --scale cpu, in tokens (for --scale full see docs/workloads.md):
{sizes}

All requests of a round are submitted at once, and answers have fixed lengths. unshared to samples are lists known
beforehand; the prompts of chat and tree_search depend on earlier answers; choices scores continuations.
"""


def _add_prefix_reuse(benchmarks: Any) -> None:
    parser = _add_benchmark(
        benchmarks,
        "prefix-reuse",
        _prefix_reuse,
        help="workloads that share prefixes, with the cache and with misses forced",
        description=_PREFIX_REUSE,
        epilog=_PREFIX_REUSE_EXAMPLES.format(sizes=_lines(size_table("cpu", WORKLOADS))) + _STATUS,
    )
    option = parser.add_argument_group("workloads").add_argument
    scales = "; ".join(f"{name}: {scale.description}" for name, scale in SCALES.items())
    option("--scale", choices=tuple(SCALES), help=f"{scales} (cpu)")
    option(
        "--workload",
        dest="workloads",
        action="append",
        choices=WORKLOADS,
        metavar="NAME",
        help="only this one; may be repeated (all)",
    )
    option("--repeat", type=int, metavar="N", help="repetitions with fresh prompts; times are medians (3)")
    option("--seed", type=int, metavar="N", help="of the prompts, the draws and the random weights (0)")

    _add_model(parser, ", ".join(f"{name}: {scale.shape}" for name, scale in SCALES.items()))

    option = parser.add_argument_group("memory and schedule").add_argument
    option("--chunked-prefill-size", type=int, metavar="N", help="maximum prompt tokens in a pass (cpu: 128)")
    option("--max-total-tokens", type=int, metavar="N", help="slots of the KV pool (cpu: 65536)")
    option(
        "--host-memory-gb",
        type=float,
        metavar="GB",
        help="run everything once more with a host tier; useful where prefixes exceed --max-total-tokens",
    )
    option("--schedule-policy", choices=("lpm", "fcfs"), help="longest prefix, or first come, first served")

    _add_bound(parser)

    option = parser.add_argument_group("files").add_argument
    option("--json", help="write every run's figures", **_JSON)
    option("--plot", help=_PICTURE, **_PLOT)


def _prefix_reuse(arguments: argparse.Namespace) -> int:
    from radixrt.bench.prefix_reuse import Options, run_benchmark

    return run_benchmark(Options(**_given(arguments)), json_file=arguments.json, plot_file=arguments.plot)


# -- throughput -----------------------------------------------------------------------------------------

_THROUGHPUT = """\
Time one Runtime.generate call over each of sixteen lists of prompts, as ids or as texts, from an empty cache.
Printed with each time: the roofline lower bound of the device. On request also, in the same run: the engine with
parts switched off; vLLM, SGLang or transformers' continuous batching on the same lists; the device's idle time;
the CPU's work in a decode step; a fresh process to its first token; and profiles.
"""
_THROUGHPUT_EXAMPLES = f"""\
examples:
  radixrt bench throughput --scale cpu
  radixrt bench throughput --config qwen3-0.6b --workload docqa --no-overlap --idle
  radixrt bench throughput --text --workload evaluation --baseline vllm --max-running-requests 512
  radixrt bench throughput --flat --no-prefix-cache --no-overlap --no-graphs --baseline transformers --idle \\
      --step --start-up --json out.json --trace traces

Answers have fixed lengths and are drawn at temperature 0.6. A baseline runs in a process of its own, with random
weights for the same shape; vLLM and SGLang with prefix caching and captured graphs. Its settings are printed. One
that fails is shown as -, with the reason below the table. Traces are for chrome://tracing or ui.perfetto.dev.

Texts are of English words, one for each node of the prefix tree of the list's prompts: they share what the list
shares, and have its number of tokens within 2 %. The tokenizer is the model's own; for shapes that of --tokenizer,
or else SmolLM2's if it is there and the shape has as many tokens, or else the built-in model's.
{_STATUS}"""


def _add_throughput(benchmarks: Any) -> None:
    parser = _add_benchmark(
        benchmarks,
        "throughput",
        _throughput,
        help="sixteen lists of prompts, compared with the bound, ablations and other engines",
        description=_THROUGHPUT,
        epilog=_THROUGHPUT_EXAMPLES,
    )
    option = parser.add_argument_group("workloads").add_argument
    option(
        "--config",
        dest="configs",
        action="append",
        choices=tuple(SHAPES),
        help=f"random weights of this shape; may be repeated ({', '.join(CONFIGS['full'])})",
    )
    option("--model", metavar="FOLDER_OR_ID", help=f"{_MODEL}; instead of shapes")
    option(
        "--workload",
        dest="workloads",
        action="append",
        choices=LISTS,
        metavar="NAME",
        help=f"only this one, of {', '.join(LISTS)}; may be repeated (all)",
    )
    option(
        "--scale",
        choices=tuple(SCALES),
        help="cpu: small sizes and a tiny shape, for a laptop; full: for a GPU (full)",
    )
    option("--repeat", type=int, metavar="N", help="repetitions with fresh prompts; times are medians (2)")
    option("--seed", type=int, metavar="N", help="of the prompts, the draws and the random weights (0)")
    option(
        "--text",
        action="store_true",
        help="prompts as texts of English words of the list's lengths and sharing, and from their ids beside that",
    )
    option(
        "--tokenizer",
        metavar="FOLDER_OR_ID",
        help="of the texts, for shapes; or: built-in, smollm2 (smollm2 if it is there and fits, or else built-in)",
    )
    option("--device", metavar="DEVICE", help=_DEVICE)
    option("--quantization", choices=("fp8",), help="of weights, as they are loaded; not of a baseline's (none)")
    option("--kv-dtype", choices=("auto", "fp8"), help="of KV; not of a baseline's (that of the weights)")
    option(
        "--max-running-requests",
        type=int,
        metavar="N",
        help="requests at once, of a baseline too (radixrt up to 2048, vLLM and SGLang 512, transformers its own)",
    )
    option("--tp", type=int, metavar="N", help="cards that hold the model together; not a baseline's (1)")
    option("--pp", type=int, metavar="N", help="stages of its layers, each on so many cards (1)")

    option = parser.add_argument_group("further measurements in the same run").add_argument
    for name, (words, _) in ABLATIONS.items():
        option(f"--{name}", dest="ablations", action="append_const", const=name, help=words)
    option("--baseline", choices=BASELINES, help="again with this engine, which must be installed; each list once")
    option(
        "--baseline-limit", type=float, metavar="SECONDS", help="time limit of the baseline for each list (120)"
    )
    option("--idle", action="store_true", help="the GPU's idle share of the time, in one more run")
    option("--step", action="store_true", help="the CPU's work in a decode step of 512 requests")
    option("--start-up", action="store_true", help="a fresh process from its start to its first token")

    _add_bound(parser)

    option = parser.add_argument_group("files").add_argument
    option("--json", help="write every run's figures", **_JSON)
    option("--trace", type=Path, metavar="FOLDER", help="write profiles of a prefill pass and of decode steps")


def _throughput(arguments: argparse.Namespace) -> int:
    from radixrt.bench.throughput.benchmark import run_benchmark
    from radixrt.bench.throughput.options import Options

    given = _given(arguments)
    given["ablations"] = tuple(name for name in ABLATIONS if name in given.get("ablations", ()))
    return run_benchmark(Options(**given), json_file=arguments.json)
