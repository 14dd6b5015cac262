"""What prefix reuse brings: eight workloads, each with the cache and with misses forced on the same code path."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import radixrt
from radixrt.bench.comparison import Comparison, Run
from radixrt.bench.scales import SCALES, WORKLOADS
from radixrt.bench.shapes import SHAPES, write_shape
from radixrt.bounds import real, whole
from radixrt.builtin import MODEL_PATH
from radixrt.errors import ParameterError, RadixrtError
from radixrt.execution.device import choose_device
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.workloads.bound import KNOWN_DEVICES, DeviceSpeed, ModelShape, program_bound
from radixrt.workloads.lists import VOCAB_SIZE, Ask
from radixrt.workloads.programs import PROGRAMS, Answer, play, program_statistics

TEMPERATURE = 0.6
BUILT_IN = "built-in"
SEED_STEP = 100  # between the prompts of two repetitions

_WIDTH = 110  # of the table where there is no terminal
_CAPTION = (
    "cached, missed: median seconds with the cache and with misses forced. tokens/s: prompt and generated tokens "
    "with the cache. % of bound: 100 is as fast as the device's bandwidth and arithmetic allow."
)


@dataclass(frozen=True)
class Options:
    """What is measured, and with what. None is the scale's choice, and the Runtime's where it has none.

    Attributes:
        scale: one of SCALES.
        workloads: names, of WORKLOADS.
        model: folder or hub id, or "built-in".
        config: one of SHAPES, with random weights, instead of a model.
        seed: repetition r makes its prompts from the workload's own seed + SEED_STEP (seed + r).
        repeat: repetitions; each has fresh prompts and an empty cache.
        host_memory_gb: of a host tier, with which everything is run once more; None or 0 leaves that out.
        bandwidth, flops: of the device, in bytes/s and operations/s; both or, for a device that is known, neither.
        dtype, device, chunked_prefill_size, max_total_tokens, schedule_policy: those of Runtime.
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
        _one_of("scale", self.scale, SCALES)
        for name in self.workloads:
            _one_of("workload", name, WORKLOADS)
        if self.config is not None:
            _one_of("config", self.config, SHAPES)
        if self.model is not None and self.config is not None:
            raise ParameterError("model and config are both given; give one")
        whole("seed", self.seed, 0, 2**32)
        whole("repeat", self.repeat, 1, 1000)
        if (self.bandwidth is None) != (self.flops is None):
            raise ParameterError("bandwidth and flops are given together, or not at all")
        for name, figure in (("bandwidth", self.bandwidth), ("flops", self.flops)):
            if figure is not None:
                real(name, figure, 0.0, 1e18, above=True)


def _one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ParameterError(f"{name} is {value!r}; it must be one of: {', '.join(known)}")


def compare(options: Options, *, progress: bool = False) -> list[Comparison]:
    """Run every workload with the cache, then with a host tier too if there is to be one, then with misses forced.

    `progress` shows a bar on stderr.

    Raises:
        ParameterError, ModelError: the Runtime cannot be made.
        PromptError: a prompt does not fit into the model's context or the pool.
    """
    modes: dict[str, dict[str, Any]] = {"cached": {}, "misses forced": {"force_miss": True}}
    if options.host_memory_gb:
        modes["host tier"] = {"host_memory_gb": options.host_memory_gb}
    runs: dict[str, dict[str, tuple[Run, ...]]] = {}
    steps = len(modes) * len(options.workloads) * options.repeat
    with (
        tqdm(total=steps, unit=" runs", disable=not progress, file=sys.stderr) as bar,
        model_of(options.model, options.config or SCALES[options.scale].shape) as (model, load_format),
    ):
        for mode, own in modes.items():
            # Not all at once: on a GPU each takes all the memory.
            with _runtime(options, model, load_format, own) as runtime:
                _warm_up(runtime)
                runs[mode] = {}
                for name in options.workloads:
                    bar.set_postfix_str(f"{name}, {mode}")
                    repetitions = []
                    for repetition in range(options.repeat):
                        repetitions.append(_run(runtime, name, options, repetition))
                        bar.update()
                    runs[mode][name] = tuple(repetitions)
    cached, missed, tiered = (runs.get(mode, {}) for mode in ("cached", "misses forced", "host tier"))
    return [Comparison(name, cached[name], missed[name], tiered.get(name, ())) for name in options.workloads]


def print_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print the figures as a table, a workload a line."""
    table = Table(caption=_CAPTION, caption_justify="left")
    table.add_column("workload", no_wrap=True)
    for header in (
        "requests",
        "prompt\ntokens",
        "cached\ns",
        "missed\ns",
        "speed-\nup",
        "tokens/s",
        "hit\nrate",
        "best\npossible",
        "% of\nbound",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for comparison in comparisons:
        first, percent = comparison.cached[0], comparison.percent_of_bound
        table.add_row(
            comparison.workload,
            f"{first.requests:,}",
            f"{first.prompt_tokens:,}",
            f"{comparison.seconds_cached:.2f}",
            f"{comparison.seconds_missed:.2f}",
            f"{comparison.speed_up:.2f}x",
            f"{comparison.tokens_per_second:,.0f}",
            f"{comparison.hit_rate:.2%}",
            f"{comparison.best_hit_rate:.2%}",
            "-" if percent is None else f"{percent:.0f}",
        )
    console.print(table)
    tiered = [comparison for comparison in comparisons if comparison.tiered]
    if tiered:
        _print_tiers(tiered, console)


def _print_tiers(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print what a host tier changes."""
    table = Table(caption="median seconds with the cache, without and with a host tier", caption_justify="left")
    table.add_column("workload", no_wrap=True)
    for header in ("without\ns", "with\ns", "speed-\nup", "hit rate\nwithout", "hit rate\nwith", "best\npossible"):
        table.add_column(header, justify="right", no_wrap=True)
    for comparison in comparisons:
        seconds, hit_rate = comparison.seconds_tiered, comparison.hit_rate_tiered
        assert seconds is not None  # it has such runs
        table.add_row(
            comparison.workload,
            f"{comparison.seconds_cached:.2f}",
            f"{seconds:.2f}",
            f"{comparison.seconds_cached / seconds:.2f}x",
            f"{comparison.hit_rate:.2%}",
            f"{hit_rate:.2%}",
            f"{comparison.best_hit_rate:.2%}",
        )
    console.print(table)


def run_benchmark(options: Options, *, json_file: Path | None = None, plot_file: Path | None = None) -> int:
    """Run, print, and write what is asked for. Returns 0.

    Raises:
        RadixrtError: see `compare`; or a file cannot be written, which is found before anything runs.
    """
    for file in (json_file, plot_file):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ParameterError(f"{file} cannot be written: it is a folder, or there is none to hold it")
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise RadixrtError("a plot needs matplotlib: pip install 'radixrt[bench]'")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    shape = options.config or SCALES[options.scale].shape
    environment = environment_of(options.device, options.model or f"{shape} (random weights)")
    console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in environment.items()))
    comparisons = compare(options, progress=True)
    print_comparisons(comparisons, console)
    if json_file is not None:
        report = {
            "environment": environment,
            "options": asdict(options),
            "workloads": [comparison.to_dict() for comparison in comparisons],
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        from radixrt.bench.plot import plot_comparisons  # matplotlib is an extra

        plot_comparisons(comparisons, plot_file, title=f"{environment['model']} on {environment['device']}")
    return 0


def environment_of(device: str | None, model: str) -> dict[str, str]:
    """What figures depend on besides their options."""
    chosen = choose_device(device)
    return {
        "radixrt": radixrt.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(chosen)
        if chosen.type == "cuda"
        else f"CPU ({platform.machine()}, {os.cpu_count()} cores, torch threads {torch.get_num_threads()})",
        "model": model,
    }


@contextlib.contextmanager
def model_of(model: str | None, config: str | None) -> Iterator[tuple[Path | str, Any]]:
    """A model's folder or id and its load format: of `model`, or of the shape `config` ("tiny" if None)."""
    if model is not None:
        yield (MODEL_PATH if model == BUILT_IN else model), "auto"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_shape(config or "tiny", Path(folder)), "dummy"


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
    """Whatever is made on first use is made here."""
    program = PROGRAMS["system_prompt"](
        0,
        requests=4,
        system_len=64,
        user_len=(8, 8),
        new_tokens=(8, 8),
        vocab_size=min(VOCAB_SIZE, runtime.config.vocab_size),
    )
    for _ in play(program, lambda asks: _answer(runtime, asks)):
        pass


def _run(runtime: Runtime, name: str, options: Options, repetition: int) -> Run:
    """Play one workload once, from an empty cache."""
    # The workloads' own seeds are 0 to 7, in this order.
    program = PROGRAMS[name](
        WORKLOADS.index(name) + SEED_STEP * (options.seed + repetition),
        vocab_size=min(VOCAB_SIZE, runtime.config.vocab_size),
        **SCALES[options.scale].sizes.get(name, {}),
    )
    seconds = 0.0

    def timed(asks: Sequence[Ask]) -> list[Answer]:
        nonlocal seconds
        began = time.perf_counter()
        answers = _answer(runtime, asks)
        seconds += time.perf_counter() - began
        return answers

    runtime.flush_cache()
    before = runtime.cache_stats()
    rounds = list(play(program, timed))
    after = runtime.cache_stats()
    speed = _speed(options, runtime)
    return Run(
        seconds=seconds,
        requests=sum(len(played.asks) for played in rounds),
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        generated_tokens=sum(len(answer) for played in rounds for answer in played.answers),
        recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
        best_cached_tokens=program_statistics(rounds).best_cached_tokens,
        bound_seconds=None if speed is None else program_bound(rounds, _shape(options, runtime), speed),
    )


def _answer(runtime: Runtime, asks: Sequence[Ask]) -> list[Answer]:
    """Run a round: all of it in one call. A round asks for answers, or for likelihoods."""
    if asks[0].continuation_ids is not None:
        return _score(runtime, asks)
    params = [
        SamplingParams(max_new_tokens=ask.max_new_tokens, temperature=TEMPERATURE, ignore_eos=True) for ask in asks
    ]
    outputs = runtime.generate([ask.prompt_ids for ask in asks], params)
    for ask, output in zip(asks, outputs, strict=True):
        if len(output.token_ids) != ask.max_new_tokens:
            why = output.error or f"the context is {runtime.context_length}"
            raise RadixrtError(
                f"a prompt of {len(ask.prompt_ids)} tokens got {len(output.token_ids)} of {ask.max_new_tokens} "
                f"new ones ({why}): nothing can be compared"
            )
    return [output.token_ids for output in outputs]


def _score(runtime: Runtime, asks: Sequence[Ask]) -> list[Answer]:
    """Compute the likelihood of each continuation; the figures of it are of no interest here."""
    continuations = [ask.continuation_ids.tolist() for ask in asks if ask.continuation_ids is not None]
    runtime.score([ask.prompt_ids for ask in asks], continuations)
    return [()] * len(asks)


def _speed(options: Options, runtime: Runtime) -> DeviceSpeed | None:
    """The device's, as far as it is given or known."""
    if options.bandwidth is not None and options.flops is not None:
        return DeviceSpeed(options.bandwidth, options.flops)
    if runtime.device.type != "cuda":
        return None
    return KNOWN_DEVICES.get(torch.cuda.get_device_name(runtime.device))


def _shape(options: Options, runtime: Runtime) -> ModelShape:
    config = runtime.config
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        bytes_per_value=value_bytes(runtime, options.dtype),
    )


def value_bytes(runtime: Runtime, dtype: str) -> int:
    """Of a weight, or an element of KV, of a Runtime that was made with this `dtype`."""
    auto = torch.float32 if runtime.device.type == "cpu" else runtime.config.dtype
    chosen = auto if dtype == "auto" else getattr(torch, dtype)
    return int(chosen.itemsize)
