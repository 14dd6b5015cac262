"""Options of the throughput benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from radixrt.bench.catalogue import ABLATIONS, BASELINES, CONFIGS, LISTS, SCALES, SHAPES, check_speed, one_of
from radixrt.checks import check_float, check_int
from radixrt.errors import ParameterError


@dataclass(frozen=True)
class Options:
    """Options of the throughput benchmark.

    Attributes:
        scale: one of SCALES.
        configs: shapes with random weights, of SHAPES; empty: the scale's CONFIGS.
        model: folder or hub id, or "built-in", instead of shapes.
        workloads: names, of LISTS.
        repeat: repetitions, each with fresh prompts and an empty cache; times are medians.
        seed: repetition r makes its prompts from the workload's own seed + run.SEED_STEP (seed + r).
        device, quantization, kv_dtype: as in `Runtime`; a baseline is not quantised.
        tp, pp: `tensor_parallel_size` and `pipeline_parallel_size` of the Runtime.
        text: prompts are texts of English words in the lists' shape, beside which their ids are measured.
        tokenizer: of the texts, for shapes, as `tokenizer_folder` takes it; None: the `usual_tokenizer`.
        max_running_requests: at once, in every engine; None: of each engine its own.
        ablations: names, of ABLATIONS; everything is measured again with each.
        baseline: one of BASELINES, or None.
        baseline_limit: seconds after which a workload of the baseline is stopped.
        idle: run each workload once more under the profiler, for the device's idle share.
        step: measure the CPU's work in a decode step.
        start_up: measure a fresh process to its first token.
        trace: folder for traces of a prefill pass and of decode steps; None: no traces.
        bandwidth, flops: of one device, in bytes/s and operations/s; both or, for a known device, neither.
    """

    scale: str = "full"
    configs: tuple[str, ...] = ()
    model: str | None = None
    workloads: tuple[str, ...] = LISTS
    repeat: int = 2
    seed: int = 0
    device: str | None = None
    quantization: str | None = None
    kv_dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    text: bool = False
    tokenizer: str | None = None
    max_running_requests: int | None = None
    ablations: tuple[str, ...] = ()
    baseline: str | None = None
    baseline_limit: float = 120.0
    idle: bool = False
    step: bool = False
    start_up: bool = False
    trace: Path | None = None
    bandwidth: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        one_of("scale", self.scale, SCALES)
        for name, values, known in (
            ("config", self.configs, tuple(SHAPES)),
            ("workload", self.workloads, LISTS),
            ("ablation", self.ablations, tuple(ABLATIONS)),
            ("baseline", (self.baseline,) if self.baseline else (), BASELINES),
        ):
            for value in values:
                one_of(name, value, known)
        if self.quantization is not None:
            one_of("quantization", self.quantization, ("fp8",))
        one_of("kv_dtype", self.kv_dtype, ("auto", "fp8"))
        if self.model is not None and self.configs:
            raise ParameterError("model and config are both given; give one")
        if self.tokenizer is not None and not self.text:
            raise ParameterError("tokenizer is given, and text is not: without texts none is needed")
        if self.tokenizer is not None and self.model is not None:
            raise ParameterError("tokenizer is for shapes: a model has its own")
        if self.max_running_requests is not None:
            check_int("max_running_requests", self.max_running_requests, 1, 2**16)
        check_int("repeat", self.repeat, 1, 1000)
        check_int("seed", self.seed, 0, 2**32)
        check_int("tp", self.tp, 1, 64)
        check_int("pp", self.pp, 1, 64)
        check_float("baseline_limit", self.baseline_limit, 0.0, 1e6, above=True)
        check_speed(self.bandwidth, self.flops)
        if self.trace is not None and not self.trace.is_dir():
            raise ParameterError(f"{self.trace} is no folder")

    @property
    def num_cards(self) -> int:
        return self.tp * self.pp

    @property
    def subjects(self) -> tuple[str | None, ...]:
        """The shapes; (None,) for a model."""
        return (None,) if self.model is not None else self.configs or CONFIGS[self.scale]
