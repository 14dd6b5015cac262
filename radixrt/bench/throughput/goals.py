"""What the engine is to reach on an NVIDIA H200 in bf16, with attention that reads shared KV once a request."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.bench.kernels.goals import CARD


@dataclass(frozen=True)
class Goal:
    """The most that a workload may take: multiples of its bound, or seconds."""

    times_bound: float | None = None
    seconds: float | None = None

    def limit(self, bound_seconds: float | None) -> float | None:
        """In seconds; None if it is a multiple of a bound that is not known."""
        if self.times_bound is None:
            return self.seconds
        return None if bound_seconds is None else self.times_bound * bound_seconds


# By shape and workload.
GOALS = {
    ("qwen3-0.6b", "unshared"): Goal(times_bound=1.25),
    ("qwen3-0.6b", "fewshot"): Goal(seconds=0.65),
    ("qwen3-0.6b", "docqa"): Goal(seconds=5.8),
    ("qwen3-0.6b", "system_prompt"): Goal(seconds=4.6),
    ("qwen3-0.6b", "samples"): Goal(seconds=8.75),
    ("llama-3.1-8b", "unshared"): Goal(times_bound=1.22),
    ("llama-3.1-8b", "fewshot"): Goal(seconds=3.6),
    ("llama-3.1-8b", "docqa"): Goal(seconds=7.6),
    ("llama-3.1-8b", "system_prompt"): Goal(seconds=8.9),
}

START_UP_SHAPE = "qwen3-0.6b"
COLD_SECONDS, WARM_SECONDS, GRAPH_SECONDS = 60.0, 15.0, 6.0  # of a process to its first token, of graphs alone
STEP_SECONDS = 1e-3  # of the CPU in a decode step of STEP_REQUESTS
STEP_REQUESTS = 512


def holds_for(device_name: str) -> bool:
    """Whether the goals were set for this device."""
    return device_name.startswith(CARD)


def goal_of(config: str | None, workload: str, device_name: str) -> Goal | None:
    """The goal of a workload at a shape on a device; None where there is none."""
    return GOALS.get((config or "", workload)) if holds_for(device_name) else None
