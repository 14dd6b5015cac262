"""Measuring a shape: the engine whole and with parts switched off, and what else was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from radixrt.bench.report import reason_of
from radixrt.bench.run import Run, answer, program_of, run_once
from radixrt.bench.scales import SCALES
from radixrt.bench.subject import device_speed, model_shape
from radixrt.bench.throughput.device_time import busy_seconds, device_intervals, device_profiler
from radixrt.bench.throughput.figures import BaselineRun, ShapeFigures
from radixrt.bench.throughput.names import ABLATIONS
from radixrt.bench.throughput.options import Options
from radixrt.bench.throughput.passes import measure_step, profile_passes
from radixrt.bench.throughput.start_up import cold_and_warm, measure_start_up
from radixrt.bench.throughput.transformers_batching import TransformersBatching
from radixrt.execution.device import choose_device
from radixrt.runtime import Runtime
from radixrt.workloads.lists import Ask
from radixrt.workloads.programs import Program

WARM_UP_TOKENS = 16  # in the longest answers of the warm-up; the others are shorter, for batches of many sizes

Step = Callable[[str], None]
"""Called after each part of the work, with what was done."""


class ShapeMeasurement:
    """Measures one shape or model, part by part, and writes what it finds into `figures`.

    Args:
        figures: of this shape; it has its workloads.
        model, load_format: what the Runtime is made of.
        done: called after each repetition, and each other part.
    """

    def __init__(
        self, figures: ShapeFigures, options: Options, model: str | Path, load_format: str, done: Step
    ) -> None:
        self.figures = figures
        self.options = options
        self.device = choose_device(options.device)
        self._load_format = load_format
        scale = SCALES[options.scale]
        self._runtime_options: dict[str, Any] = {
            "model": str(model),
            "load_format": load_format,
            "device": options.device,
            "seed": options.seed,
            "chunked_prefill_size": scale.chunked_prefill_size,
            "max_total_tokens": scale.max_total_tokens,
        }
        self._done = done

    def measure_engine(self) -> None:
        """The engine as it is: all repetitions, then what is asked for besides.

        Raises:
            ParameterError, ModelError: the Runtime cannot be made.
            PromptError: a prompt does not fit into the model's context or the pool.
        """
        with Runtime(**self._runtime_options) as runtime:
            self.figures.vocab_size = runtime.config.vocab_size
            for workload in self.figures.workloads:
                for run in self._repetitions(runtime, workload.workload):
                    workload.runs += (run,)
                    self._done(workload.workload)
            if self.options.idle and self.device.type == "cuda":
                for workload in self.figures.workloads:
                    workload.idle_share = self._idle_share(runtime, workload.workload)
                    self._done(f"{workload.workload}, profiled")
            if self.options.step:
                self.figures.step = measure_step(runtime)
                self._done("decode steps")
            if self.options.trace is not None:
                asks = self._asks("unshared", self.options.seed)
                self.figures.profiles = profile_passes(runtime, asks, self.options.trace, self.file_name)
                self._done("profiles")

    def measure_ablation(self, ablation: str) -> None:
        """All repetitions with a part of the engine switched off."""
        with Runtime(**self._runtime_options, **ABLATIONS[ablation]) as runtime:
            for workload in self.figures.workloads:
                workload.ablated[ablation] = ()
                for run in self._repetitions(runtime, workload.workload):
                    workload.ablated[ablation] += (run,)
                    self._done(f"{workload.workload}, {ablation}")

    def measure_start_up(self) -> None:
        """A fresh process; on a GPU first one that has to compile the kernels. Raises RadixrtError if it fails."""
        if self.device.type == "cuda":
            self.figures.cold, self.figures.warm = cold_and_warm(self._runtime_options)
        else:
            self.figures.warm = measure_start_up(self._runtime_options)
        self._done("start-up")

    def measure_baseline(self) -> None:
        """The lists of the first repetition through transformers. What it raises becomes the reason."""
        scale = SCALES[self.options.scale]
        failed: BaselineRun | None = None
        batching: TransformersBatching | None = None
        try:
            batching = TransformersBatching(
                self._runtime_options["model"],
                load_format=self._load_format,
                device=self.device,
                max_total_tokens=scale.max_total_tokens,
                max_batch_tokens=scale.chunked_prefill_size,
                seed=self.options.seed,
            )
        except Exception as error:  # of any kind: ours is not hidden by it
            failed = BaselineRun(reason=reason_of(error))
        for workload in self.figures.workloads:
            asks = self._asks(workload.workload, self.options.seed)
            workload.baseline = failed if batching is None else batching.run(asks, self.options.baseline_limit)
            self._done(f"{workload.workload}, transformers")
        if batching is not None:
            batching.close()

    @property
    def file_name(self) -> str:
        """Of the shape, for traces."""
        return self.figures.config or "model"

    def _repetitions(self, runtime: Runtime, name: str) -> Iterator[Run]:
        first = self.options.seed
        self._warm_up(runtime, name)
        for repetition in range(first, first + self.options.repeat):
            yield self._run(runtime, name, repetition)

    def _run(self, runtime: Runtime, name: str, repetition: int) -> Run:
        speed = device_speed(self.device, self.options.bandwidth, self.options.flops)
        return run_once(runtime, self._program(name, repetition), model_shape(runtime, "auto"), speed)

    def _warm_up(self, runtime: Runtime, name: str) -> None:
        """Whatever is made on first use is made here, by other prompts of the same kind, and few tokens each."""
        asks = self._asks(name, self.options.seed + self.options.repeat)
        answer(runtime, [replace(ask, max_new_tokens=1 + i % WARM_UP_TOKENS) for i, ask in enumerate(asks)])

    def _idle_share(self, runtime: Runtime, name: str) -> float:
        """Of one more repetition, which takes longer than the timed ones: the profiler costs time."""
        with device_profiler() as profiler:
            run = self._run(runtime, name, self.options.seed + self.options.repeat)
        return max(0.0, 1 - busy_seconds(device_intervals(profiler)) / run.seconds)

    def _asks(self, name: str, repetition: int) -> Sequence[Ask]:
        return next(self._program(name, repetition))  # a list is a program of one round

    def _program(self, name: str, repetition: int) -> Program:
        return program_of(
            name, SCALES[self.options.scale].sizes.get(name, {}), self.figures.vocab_size, repetition
        )
