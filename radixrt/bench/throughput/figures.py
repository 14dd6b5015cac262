"""Figures of a shape: times of its workloads, and optional measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from radixrt.bench.run import Runs
from radixrt.workloads.lists import VOCAB_SIZE


@dataclass(frozen=True)
class BaselineRun:
    """Another engine on the list of the first repetition.

    Attributes:
        seconds: from the first request to the last answer; None if it did not end, or failed.
        stopped_after: seconds at which it was stopped; None if it was not.
        reason: why there is no time; None where there is.
    """

    seconds: float | None = None
    stopped_after: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class BaselineEngine:
    """Name and version of another engine, and the settings that it ran with, by name, as JSON values."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class StepTime:
    """A decode step of `requests` requests: medians over `steps` of them, in seconds.

    Attributes:
        planning: in `Engine.step`, before the launch and after the result is there.
        launching: in the runner's `launch`. Where there is no GPU, the pass is computed in it.
        waiting: in the runner's `collect`, mostly for the device.
    """

    requests: int
    steps: int
    planning: float
    launching: float
    waiting: float

    @property
    def cpu_seconds(self) -> float:
        """Seconds of CPU work in a step."""
        return self.planning + self.launching


@dataclass(frozen=True)
class StartUp:
    """A process from its start to its first token, in seconds.

    Attributes:
        imports: of the interpreter and all modules.
        runtime: of making the Runtime.
        parts: of that, by name: `Runtime.start_up`.
        first_token: of one token for one prompt.
        total: all of it.
    """

    imports: float
    runtime: float
    parts: dict[str, float]
    first_token: float
    total: float


@dataclass(frozen=True)
class KernelCost:
    """A kernel, or an operator without a GPU: seconds and calls in one step."""

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """Steps of one kind under the profiler.

    Attributes:
        name: "prefill" or "decode".
        steps: how many.
        costs: of all kernels, the most expensive first.
        file: the trace's.
    """

    name: str
    steps: int
    costs: tuple[KernelCost, ...]
    file: str


@dataclass
class WorkloadFigures:
    """One workload at one shape. Figures not measured are empty or None.

    Attributes:
        runs: a run for each repetition.
        ablated: by name, the same with a part of the engine switched off.
        idle_share: 0 to 1, of the seconds of one more run, in which the device did nothing.
        from_ids: where the prompts are texts, the same once more from their ids.
        list_tokens: where the prompts are texts, the tokens of the first repetition's list of ids.
    """

    workload: str
    runs: Runs = field(default_factory=Runs)
    ablated: dict[str, Runs] = field(default_factory=dict)
    idle_share: float | None = None
    baseline: BaselineRun | None = None
    from_ids: Runs = field(default_factory=Runs)
    list_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Medians and each run as JSON values."""
        names = (
            "seconds",
            "output_tokens_per_second",
            "tokens_per_second",
            "hit_rate",
            "best_hit_rate",
            "bound_seconds",
            "times_bound",
        )
        return {
            "workload": self.workload,
            **{name: getattr(self.runs, name) for name in names},
            "idle_share": self.idle_share,
            "runs": self.runs.to_json(),
            "ablations": {
                name: {"seconds": runs.seconds, "runs": runs.to_json()} for name, runs in self.ablated.items()
            },
            "baseline": None if self.baseline is None else asdict(self.baseline),
            "from_ids": {
                "seconds": self.from_ids.seconds,
                "list_tokens": self.list_tokens,
                "runs": self.from_ids.to_json(),
            }
            if self.from_ids
            else None,
        }


@dataclass
class ShapeFigures:
    """One shape or model. Figures that were not requested are None.

    Attributes:
        config: of SHAPES; None for a model.
        name: for people.
        workloads: in the order in which they were asked for.
        cold, warm: start-ups without and with compiled kernels on the disk.
        vocab_size: the model's, once it has been seen: ids of prompts are below it.
        baseline: name and version of the other engine, and the settings that it ran with.
        tokenizer: whose texts the prompts are; None: they are ids.
    """

    config: str | None
    name: str
    workloads: list[WorkloadFigures]
    step: StepTime | None = None
    cold: StartUp | None = None
    warm: StartUp | None = None
    profiles: list[Profile] = field(default_factory=list)
    vocab_size: int = VOCAB_SIZE
    baseline: BaselineEngine | None = None
    tokenizer: str | None = None

    @property
    def baseline_name(self) -> str:
        """Of the other engine; "baseline" if it is not known."""
        return "baseline" if self.baseline is None else self.baseline.name

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values, without workloads that have not run."""
        return {
            "config": self.config,
            "name": self.name,
            "tokenizer": self.tokenizer,
            "workloads": [figures.to_dict() for figures in self.workloads if figures.runs],
            "step": None if self.step is None else {**asdict(self.step), "cpu_seconds": self.step.cpu_seconds},
            "start_up": {
                name: asdict(start)
                for name, start in (("cold", self.cold), ("warm", self.warm))
                if start is not None
            },
            "profiles": [asdict(profile) for profile in self.profiles],
            "baseline": None if self.baseline is None else asdict(self.baseline),
        }
