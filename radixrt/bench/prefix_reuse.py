"""Measures prefix reuse: eight workloads, each with the cache and with misses forced on the same code path."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from radixrt.bench.catalogue import SCALES, SHAPES, WORKLOADS, check_speed, one_of
from radixrt.bench.comparison import Comparison, plot_comparisons
from radixrt.bench.report import check_files, figure_table, told, wide_console, write_json
from radixrt.bench.run import Run, Runs, answer, program_of, run_once
from radixrt.bench.subject import device_speed, environment_of, model_of, model_shape
from radixrt.checks import check_float, check_int
from radixrt.errors import ParameterError
from radixrt.runtime import Runtime
from radixrt.workloads.lists import VOCAB_SIZE
from radixrt.workloads.programs import PROGRAMS, play

_WIDTH = 110  # of the table without a terminal
_CAPTION = (
    "cached, missed: median seconds with the cache and with misses forced. tokens/s: prompt and generated tokens "
    "with the cache. % of bound: 100 is as fast as the device's bandwidth and arithmetic allow."
)


@dataclass(frozen=True)
class Options:
    """Options of the benchmark. None is the default of the scale or else of the Runtime.

    Attributes:
        scale: one of SCALES.
        workloads: names, of WORKLOADS.
        model: folder or hub id, or "built-in".
        config: one of SHAPES, with random weights, instead of a model.
        seed: repetition r makes its prompts from the workload's own seed + run.SEED_STEP (seed + r).
        repeat: repetitions; each has fresh prompts and an empty cache.
        host_memory_gb: of a host tier, with which everything is run once more; None or 0 leaves that out.
        bandwidth, flops: of the device, in bytes/s and operations/s; both or, for a device that is known, neither.
        dtype, device, chunked_prefill_size, max_total_tokens, schedule_policy: as in `Runtime`.
    """

    scale: str = "cpu"
    workloads: tuple[str, ...] = WORKLOADS
    model: str | None = None
    config: str | None = None
    seed: int = 0
    repeat: int = 3
    device: str | None = None
    dtype: str = "auto"
    chunked_prefill_size: int | None = None
    max_total_tokens: int | None = None
    host_memory_gb: float | None = None
    schedule_policy: str = "lpm"
    bandwidth: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        one_of("scale", self.scale, SCALES)
        for name in self.workloads:
            one_of("workload", name, WORKLOADS)
        if self.config is not None:
            one_of("config", self.config, SHAPES)
        if self.model is not None and self.config is not None:
            raise ParameterError("model and config are both given; give one")
        check_int("seed", self.seed, 0, 2**32)
        check_int("repeat", self.repeat, 1, 1000)
        check_speed(self.bandwidth, self.flops)
        if self.host_memory_gb is not None:
            check_float("host_memory_gb", self.host_memory_gb, 0.0, 1e6)


def compare(options: Options, *, progress: bool = False) -> list[Comparison]:
    """Run every workload with the cache, then with a host tier if one is given, then with misses forced.

    `progress` shows a bar on stderr.

    Raises:
        ParameterError, ModelError: the Runtime cannot be made.
        PromptError: a prompt does not fit into the model's context or the pool.
    """
    modes: dict[str, dict[str, Any]] = {"cached": {}, "misses forced": {"force_miss": True}}
    if options.host_memory_gb:
        modes["host tier"] = {"host_memory_gb": options.host_memory_gb}
    runs: dict[str, dict[str, Runs]] = {}
    steps = len(modes) * len(options.workloads) * options.repeat
    with (
        tqdm(total=steps, unit=" runs", disable=not progress, file=sys.stderr) as bar,
        model_of(options.model, options.config or SCALES[options.scale].shape) as (model, load_format),
    ):
        for mode, own in modes.items():
            # One after the other: on a GPU each takes all the memory.
            with _runtime(options, model, load_format, own) as runtime:
                _warm_up(runtime)
                runs[mode] = {}
                for name in options.workloads:
                    bar.set_postfix_str(f"{name}, {mode}")
                    repetitions = runs[mode][name] = Runs()
                    for repetition in range(options.repeat):
                        repetitions.append(_run(runtime, name, options, repetition))
                        bar.update()
    cached, missed, tiered = (runs.get(mode, {}) for mode in ("cached", "misses forced", "host tier"))
    return [Comparison(name, cached[name], missed[name], tiered.get(name, Runs())) for name in options.workloads]


def print_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print the figures as a table, one workload a line."""
    columns = "requests", "prompt\ntokens", "cached\ns", "missed\ns", "speed-\nup", "tokens/s"
    rates = "hit\nrate", "best\npossible", "% of\nbound"
    table = figure_table(None, "workload", *columns, *rates, caption=_CAPTION)
    for comparison in comparisons:
        cached, percent = comparison.cached, comparison.percent_of_bound
        table.add_row(
            comparison.workload,
            f"{cached[0].requests:,}",
            f"{cached[0].prompt_tokens:,}",
            f"{cached.seconds:.2f}",
            f"{comparison.missed.seconds:.2f}",
            f"{comparison.speed_up:.2f}x",
            f"{cached.tokens_per_second:,.0f}",
            f"{cached.hit_rate:.2%}",
            f"{cached.best_hit_rate:.2%}",
            "-" if percent is None else f"{percent:.0f}",
        )
    console.print(table)
    tiered = [comparison for comparison in comparisons if comparison.tiered]
    if tiered:
        _print_tiers(tiered, console)


def _print_tiers(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print the effect of a host tier."""
    columns = "without\ns", "with\ns", "speed-\nup", "hit rate\nwithout", "hit rate\nwith", "best\npossible"
    caption = "median seconds with the cache, without and with a host tier"
    table = figure_table(None, "workload", *columns, caption=caption)
    for comparison in comparisons:
        without, tiered = comparison.cached, comparison.tiered
        table.add_row(
            comparison.workload,
            f"{without.seconds:.2f}",
            f"{tiered.seconds:.2f}",
            f"{without.seconds / tiered.seconds:.2f}x",
            f"{without.hit_rate:.2%}",
            f"{tiered.hit_rate:.2%}",
            f"{without.best_hit_rate:.2%}",
        )
    console.print(table)


def run_benchmark(options: Options, *, json_file: Path | None = None, plot_file: Path | None = None) -> int:
    """Run, print, and write the requested files. Returns 0.

    Raises:
        RadixrtError: see `compare`; or a file cannot be written, which is found before anything runs.
    """
    check_files(json_file, plot_file)
    console = wide_console(_WIDTH)
    shape = options.config or SCALES[options.scale].shape
    environment = environment_of(options.device, options.model or f"{shape} (random weights)")
    console.print(told(environment))
    comparisons = compare(options, progress=True)
    print_comparisons(comparisons, console)
    if json_file is not None:
        report = {
            "environment": environment,
            "options": asdict(options),
            "workloads": [comparison.to_dict() for comparison in comparisons],
        }
        write_json(json_file, report)
    if plot_file is not None:
        plot_comparisons(comparisons, plot_file, title=f"{environment['model']} on {environment['device']}")
    return 0


def _runtime(options: Options, model: Path | str, load_format: Any, own: dict[str, Any]) -> Runtime:
    scale = SCALES[options.scale]
    return Runtime(
        model,
        load_format=load_format,
        dtype=options.dtype,
        device=options.device,
        schedule_policy=options.schedule_policy,
        seed=options.seed,
        chunked_prefill_size=_first(options.chunked_prefill_size, scale.chunked_prefill_size),
        max_total_tokens=_first(options.max_total_tokens, scale.max_total_tokens),
        **own,
    )


def _first(given: int | None, default: int | None) -> int | None:
    return default if given is None else given


def _warm_up(runtime: Runtime) -> None:
    """Run a few prompts, so that compiled kernels and graphs are ready."""
    program = PROGRAMS["system_prompt"](
        0,
        requests=4,
        system_len=64,
        user_len=(8, 8),
        new_tokens=(8, 8),
        vocab_size=min(VOCAB_SIZE, runtime.config.vocab_size),
    )
    for _ in play(program, lambda prompts: answer(runtime, prompts)):
        pass
    runtime.capture_graphs()


def _run(runtime: Runtime, name: str, options: Options, repetition: int) -> Run:
    program = program_of(name, SCALES[options.scale], runtime.config.vocab_size, options.seed + repetition)
    speed = device_speed(runtime.device, options.bandwidth, options.flops)
    return run_once(runtime, program, model_shape(runtime), speed)
