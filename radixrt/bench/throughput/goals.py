"""What the engine is to reach on an NVIDIA H200 in bf16."""

from __future__ import annotations

from radixrt.bench.kernels.goals import CARD

# By shape and workload: multiples of the bound of the list at hand.
GOALS = {
    ("qwen3-0.6b", "unshared"): 1.25,
    ("qwen3-0.6b", "fewshot"): 2.0,
    ("qwen3-0.6b", "docqa"): 2.2,
    ("qwen3-0.6b", "system_prompt"): 2.0,
    ("qwen3-0.6b", "samples"): 1.55,
    ("llama-3.1-8b", "unshared"): 1.22,
    ("llama-3.1-8b", "fewshot"): 1.2,
    ("llama-3.1-8b", "docqa"): 1.35,
    ("llama-3.1-8b", "system_prompt"): 1.35,
    ("llama-3.1-8b", "samples"): 1.35,
}

START_UP_SHAPE = "qwen3-0.6b"
COLD_SECONDS, WARM_SECONDS, GRAPH_SECONDS = 60.0, 15.0, 6.0  # of a process to its first token, of graphs alone
STEP_SECONDS = 1e-3  # of the CPU in a decode step of STEP_REQUESTS
STEP_REQUESTS = 512


def holds_for(device_name: str) -> bool:
    """Whether the goals were set for this device."""
    return device_name.startswith(CARD)


def goal_of(config: str | None, workload: str, device_name: str) -> float | None:
    """How many times its bound a workload may take at a shape on a device; None where there is no goal."""
    return GOALS.get((config or "", workload)) if holds_for(device_name) else None
