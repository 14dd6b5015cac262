"""The throughput benchmark: shape after shape, as tables and JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radixrt.bench.catalogue import ABLATIONS, SCALES
from radixrt.bench.report import check_files, told, wide_console, write_json
from radixrt.bench.run import Run, Runs, answer, program_of, run_once
from radixrt.bench.subject import (
    check_tokenizer,
    device_speed,
    environment_of,
    model_of,
    model_shape,
    tokenizer_folder,
    usual_tokenizer,
)
from radixrt.bench.throughput.engine_process import EngineProcess, check_installed
from radixrt.bench.throughput.figures import BaselineEngine, ShapeFigures, WorkloadFigures
from radixrt.bench.throughput.options import Options
from radixrt.bench.throughput.passes import (
    busy_seconds,
    device_intervals,
    device_profiler,
    measure_step,
    profile_passes,
)
from radixrt.bench.throughput.start_up import cold_and_warm, measure_start_up
from radixrt.bench.throughput.table import (
    print_comparison,
    print_details,
    print_start_up,
    print_texts,
    print_workloads,
)
from radixrt.execution.device import choose_device
from radixrt.runtime import Runtime
from radixrt.text.tokenizer import load_tokenizer
from radixrt.workloads.bound import DeviceSpeed
from radixrt.workloads.lists import WorkloadPrompt
from radixrt.workloads.programs import one_round
from radixrt.workloads.texts import as_texts

_WIDTH = 125  # of the tables without a terminal


def run_benchmark(options: Options, *, json_file: Path | None = None) -> int:
    """Measure, print, and write the requested files. Returns 0, even if the baseline fails.

    Raises:
        RadixrtError: a Runtime cannot be made, or a list does not fit; or a file cannot be written or the baseline
            is not installed, which is found before anything runs.
    """
    check_files(json_file)
    check_installed(options.baseline)
    console = wide_console(_WIDTH)
    named = ", ".join(f"{name} (random weights)" for name in options.subjects if name is not None)
    environment = environment_of(options.device, options.model or named)
    if options.num_cards > 1:
        environment["cards"] = f"{options.num_cards} ({options.tp} ranks, {options.pp} stages)"
    if options.max_running_requests is not None:
        environment["requests at once"] = str(options.max_running_requests)
    console.print(told(environment))
    if options.scale == "full" and choose_device(options.device).type == "cpu":
        print("radixrt: these sizes are for a GPU; --scale cpu has sizes for a CPU", file=sys.stderr)
    shapes = [_shape_figures(config, options) for config in options.subjects]
    with tqdm(total=_parts(options), unit=" runs", file=sys.stderr) as bar:

        def done(part: str) -> None:
            bar.set_postfix_str(part)
            bar.update()
            if json_file is not None:  # after each part, so that an aborted run loses little
                write_json(json_file, _report(options, environment, shapes))

        for figures in shapes:
            with _measurement(figures, options, done) as measurement:
                measurement.measure_engine()
                with tqdm.external_write_mode():
                    print_workloads(figures, console)
                    print_texts(figures, console)
                    print_details(figures, console, environment["device"])
                for ablation in options.ablations:
                    measurement.measure_ablation(ablation)
                if options.start_up:
                    measurement.measure_start_up()
                    with tqdm.external_write_mode():
                        print_start_up(figures, console)
        if options.baseline is not None:
            for figures in shapes:  # after all our own measurements, which a failure there cannot touch
                with _measurement(figures, options, done) as measurement:
                    measurement.measure_baseline(options.baseline)
    for figures in shapes:
        print_comparison(figures, console)
    return 0


def _shape_figures(config: str | None, options: Options) -> ShapeFigures:
    name, workloads = options.model or f"{config} (random weights)", list(map(WorkloadFigures, options.workloads))
    return ShapeFigures(config, name, workloads, tokenizer=_tokenizer_of(config, options))


def _tokenizer_of(config: str | None, options: Options) -> str | None:
    """The name of what texts are encoded with; None without texts."""
    if not options.text:
        return None
    name = options.model or options.tokenizer or usual_tokenizer(config or "tiny")
    check_tokenizer(name, config)
    return name


@contextlib.contextmanager
def _measurement(figures: ShapeFigures, options: Options, done: Step) -> Iterator[ShapeMeasurement]:
    with model_of(options.model, figures.config, figures.tokenizer) as (model, load_format):
        yield ShapeMeasurement(figures, options, model, load_format, done)


def _parts(options: Options) -> int:
    """The number of calls of `done`."""
    lists = len(options.workloads)
    a_shape = lists * options.repeat * (1 + options.text + len(options.ablations))
    a_shape += lists * (options.baseline is not None)
    if choose_device(options.device).type == "cuda":
        a_shape += lists * options.idle
    a_shape += options.step + options.start_up + (options.trace is not None)
    return len(options.subjects) * a_shape


def _report(options: Options, environment: dict[str, str], shapes: Sequence[ShapeFigures]) -> dict[str, Any]:
    return {
        "environment": environment,
        "options": asdict(options),
        "shapes": [figures.to_dict() for figures in shapes],
    }


WARM_UP_TOKENS = 16  # of the longest answers of the warm-up; shorter ones give batches of many sizes

Step = Callable[[str], None]
"""Called after each part of the work, with its name."""


class ShapeMeasurement:
    """Measures one shape or model, part by part, and writes the results into `figures`.

    Args:
        figures: of this shape; it has its workloads.
        model, load_format: options of the Runtime.
        done: called after each repetition, and each other part.
    """

    def __init__(
        self, figures: ShapeFigures, options: Options, model: str | Path, load_format: str, done: Step
    ) -> None:
        self.figures = figures
        self.options = options
        self.device = choose_device(options.device)
        scale = SCALES[options.scale]
        self._runtime_options: dict[str, Any] = {
            "model": str(model),
            "load_format": load_format,
            "device": options.device,
            "quantization": options.quantization,
            "kv_dtype": options.kv_dtype,
            "tensor_parallel_size": options.tp,
            "pipeline_parallel_size": options.pp,
            "seed": options.seed,
            "chunked_prefill_size": scale.chunked_prefill_size,
            "max_total_tokens": scale.max_total_tokens,
            "max_running_requests": options.max_running_requests,
        }
        self._done = done
        name = figures.tokenizer
        self._tokenizer = None if name is None else load_tokenizer(tokenizer_folder(name))

    def measure_engine(self) -> None:
        """Measure the engine: all repetitions, then the optional measurements.

        Raises:
            ParameterError, ModelError: the Runtime cannot be made.
            PromptError: a prompt does not fit into the model's context or the pool.
        RadixrtError: a list's texts are not as long as it is (`as_texts`), or encoded otherwise than alone.
        """
        with Runtime(**self._runtime_options) as runtime:
            self.figures.vocab_size = runtime.config.vocab_size
            runtime.capture_graphs()  # as other engines do when they start
            for workload in self.figures.workloads:
                name = workload.workload
                for prompts in self._repetitions(runtime, name):
                    workload.runs.append(self._run(runtime, prompts))
                    self._done(name)
                    if self.options.text:
                        ids = [replace(prompt, text=None) for prompt in prompts]
                        workload.from_ids.append(self._run(runtime, ids))
                        self._done(f"{name}, from ids")
                if self.options.text:
                    workload.list_tokens = sum(len(one.prompt_ids) for one in self._ids(name, self.options.seed))
            if self.options.idle and self.device.type == "cuda":
                for workload in self.figures.workloads:
                    workload.idle_share = self._idle_share(runtime, workload.workload)
                    self._done(f"{workload.workload}, profiled")
            if self.options.step:
                self.figures.step = measure_step(runtime)
                self._done("decode steps")
            if self.options.trace is not None:
                prompts, name = self._prompts("unshared", self.options.seed), self.figures.config or "model"
                self.figures.profiles = profile_passes(runtime, prompts, self.options.trace, name)
                self._done("profiles")

    def measure_ablation(self, ablation: str) -> None:
        """Measure all repetitions with a part of the engine switched off."""
        _, options = ABLATIONS[ablation]
        with Runtime(**self._runtime_options, **options) as runtime:
            runtime.capture_graphs()
            for workload in self.figures.workloads:
                runs = workload.ablated[ablation] = Runs()
                for prompts in self._repetitions(runtime, workload.workload):
                    runs.append(self._run(runtime, prompts))
                    self._done(f"{workload.workload}, {ablation}")

    def measure_start_up(self) -> None:
        """Measure a fresh process; on a GPU, also one that compiles kernels. Raises RadixrtError if it fails."""
        if self.device.type == "cuda":
            self.figures.cold, self.figures.warm = cold_and_warm(self._runtime_options)
        else:
            self.figures.warm = measure_start_up(self._runtime_options)
        self._done("start-up")

    def measure_baseline(self, engine: str) -> None:
        """Run the lists of the first repetition through another engine. A failure becomes the reason."""
        with contextlib.closing(self._other_engine(engine)) as baseline:
            for workload in self.figures.workloads:
                prompts = self._prompts(workload.workload, self.options.seed)
                warm_up = self._warm_up_prompts(workload.workload)
                workload.baseline = baseline.run(prompts, warm_up, self.options.baseline_limit)
                self.figures.baseline = BaselineEngine(baseline.name, baseline.settings)
                self._done(f"{workload.workload}, {engine}")

    def _other_engine(self, engine: str) -> EngineProcess:
        options = {name: self._runtime_options[name] for name in ("model", "load_format", "seed")}
        options["max_requests"] = self.options.max_running_requests
        options["from_text"] = self.options.text
        if engine == "transformers":
            options["device"] = self.device.type
            options["max_total_tokens"] = self._runtime_options["max_total_tokens"]
            options["max_batch_tokens"] = self._runtime_options["chunked_prefill_size"]
        return EngineProcess(engine, options, self.device)

    def _repetitions(self, runtime: Runtime, name: str) -> Iterator[Sequence[WorkloadPrompt]]:
        """The prompts of each repetition, once the Runtime is warm."""
        first = self.options.seed
        answer(runtime, self._warm_up_prompts(name))
        for repetition in range(first, first + self.options.repeat):
            yield self._prompts(name, repetition)

    def _run(self, runtime: Runtime, prompts: Sequence[WorkloadPrompt]) -> Run:
        speed = device_speed(self.device, self.options.bandwidth, self.options.flops)
        if speed is not None:  # what goes from card to card takes no time in the bound
            cards = self.options.num_cards
            speed = DeviceSpeed(cards * speed.bandwidth, cards * speed.flops)
        return run_once(runtime, one_round(prompts), model_shape(runtime), speed)

    def _warm_up_prompts(self, name: str) -> list[WorkloadPrompt]:
        """Other prompts of the same kind, with few new tokens."""
        prompts = self._prompts(name, self.options.seed + self.options.repeat)
        return [replace(prompt, max_new_tokens=1 + i % WARM_UP_TOKENS) for i, prompt in enumerate(prompts)]

    def _idle_share(self, runtime: Runtime, name: str) -> float:
        """The idle share of one more repetition, which takes longer because of the profiler."""
        prompts = self._prompts(name, self.options.seed + self.options.repeat)
        with device_profiler() as profiler:
            run = self._run(runtime, prompts)
        return max(0.0, 1 - busy_seconds(device_intervals(profiler)) / run.seconds)

    def _prompts(self, name: str, repetition: int) -> Sequence[WorkloadPrompt]:
        ids = self._ids(name, repetition)
        return ids if self._tokenizer is None else as_texts(ids, self._tokenizer, repetition)

    def _ids(self, name: str, repetition: int) -> Sequence[WorkloadPrompt]:
        """The list of that name, whose tokens are random."""
        program = program_of(name, SCALES[self.options.scale], self.figures.vocab_size, repetition)
        return next(program)  # a list is a program of one round
