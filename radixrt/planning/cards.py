"""GPUs to plan for."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixrt.checks import check_float
from radixrt.errors import ParameterError
from radixrt.limits import (
    GPU_LIMITS,
    PASS_BYTES,
    PassLimits,
    RunLimits,
    requests_at_once,
    requests_with_states,
    states_in_pool,
)
from radixrt.workloads.bound import KNOWN_DEVICES, DeviceSpeed, Experts, ModelShape, RecurrentLayers

if TYPE_CHECKING:
    from radixrt.models.config import ModelConfig

MEMORY_FRACTION = 0.95  # as a Runtime's: of the memory left by weights and passes
# Seconds of a pass beside its work, where passes are small, on an H200: of the decodes of Qwen3-0.6B in a graph
# (docs/lab-notebook/2026-11-22-where-a-step-goes.md); and of passes with new prompts: 2.5 s = 1.3 x 0.39 s + 620
# passes x 3.2 ms, for the few-shot file in a small pool (docs/benchmarks.md, batches in the planned order).
PASS_SECONDS = 0.9e-3, 3.2e-3


def shape_of(config: ModelConfig, *, in_e4m3: bool = False, in_int4: bool = False) -> ModelShape:
    """The sizes of a model that determine the cost of a token.

    `in_e4m3`, `in_int4`: whether the weights of layers are held in e4m3, or in 4 bits; of experts never in these.
    """
    from radixrt.models.mixtral import MixtureConfig  # torch

    layout, experts, recurrent = config.kv_layout(config.dtype), None, None
    if layout.sequences:
        count = layout.sequences[0].num_layers
        recurrent = RecurrentLayers(count, config.recurrent_weights, layout.bytes_per_sequence)
    if isinstance(config, MixtureConfig) and config.num_experts:
        own = in_e4m3 and config.experts_fit_e4m3
        sizes = config.num_experts, config.top_k, config.expert_size_of_all
        experts = Experts(*sizes, config.bytes_of_expert_weights, in_e4m3=own)
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.size_of_all,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        kv_bytes=layout.bytes_per_token,
        bytes_per_value=config.dtype.itemsize,
        layers_in_e4m3=in_e4m3,
        layers_in_int4=in_int4,
        experts=experts,
        recurrent=recurrent,
    )


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        title: its name, and where its numbers come from.
        memory: in bytes.
        speed: its peak.
        has_e4m3: whether it multiplies e4m3.
    """

    title: str
    memory: float
    speed: DeviceSpeed
    has_e4m3: bool = True

    def pool_tokens(self, shape: ModelShape, num_states: int = 0) -> int:
        """About how many tokens the KV pool of a Runtime holds with this model, beside so many states; 0 if the
        weights do not fit.
        """
        share = (self.memory - shape.weight_bytes - PASS_BYTES) * MEMORY_FRACTION
        return max(0, int((share - num_states * shape.state_bytes) / shape.kv_bytes))

    def limits(
        self,
        shape: ModelShape,
        context_length: int,
        *,
        max_total_tokens: int | None = None,
        max_running_requests: int | None = None,
        chunked_prefill_size: int | None = None,
    ) -> RunLimits:
        """About those of a Runtime with this model and these options, where None is what it chooses.

        Raises ParameterError where the states of so many requests at once do not fit.
        """
        free = max(0, int((self.memory - shape.weight_bytes) * MEMORY_FRACTION))
        left = max(0, int((self.memory - shape.weight_bytes - PASS_BYTES) * MEMORY_FRACTION))  # by passes
        chunk, running = chunked_prefill_size or GPU_LIMITS.chunked_prefill_size, max_running_requests
        if running is None:
            of_pool = free if max_total_tokens is None else max_total_tokens * shape.kv_bytes
            sizes = {"context_length": context_length, "vocab_size": shape.vocab_size}
            running = requests_at_once(GPU_LIMITS.max_running_requests, free, of_pool, shape.kv_bytes, **sizes)
            running = requests_with_states(running, left, shape.state_bytes, shape.kv_bytes)
        in_pool = states_in_pool(PassLimits(running, chunk), left, shape.state_bytes)
        pool = self.pool_tokens(shape, in_pool) if max_total_tokens is None else max_total_tokens
        return RunLimits(pool, running, chunk, max(0, in_pool - 1))


def _as_published(name: str, gigabytes: float, bandwidth: float, flops: float, *, has_e4m3: bool = True) -> Card:
    title = f"{name}, by published figures, not measured"
    return Card(title, gigabytes * 1e9, DeviceSpeed(bandwidth, flops), has_e4m3)


# Published figures, not all of which could be checked: memory, its bandwidth, and dense products of bf16 (without
# sparsity, sums in fp32).
CARDS = {
    "h200": Card("H200, measured", memory=149e9, speed=KNOWN_DEVICES["NVIDIA H200"]),
    "b200": _as_published("B200", 180, 8.0e12, 2250e12),
    "h100": _as_published("H100 SXM", 80, 3.35e12, 989e12),
    "h100-pcie": _as_published("H100 PCIe", 80, 2.0e12, 756e12),
    "h100-nvl": _as_published("H100 NVL", 94, 3.9e12, 835e12),
    "a100": _as_published("A100 80 GB SXM", 80, 2.039e12, 312e12, has_e4m3=False),
    "a100-pcie": _as_published("A100 80 GB PCIe", 80, 1.935e12, 312e12, has_e4m3=False),
    "a100-40gb": _as_published("A100 40 GB", 40, 1.555e12, 312e12, has_e4m3=False),
    "l40s": _as_published("L40S", 48, 0.864e12, 362e12),
    "rtx-4090": _as_published("RTX 4090", 24, 1.008e12, 165.2e12),
}


def find_card(name: str, bandwidth: float | None, flops: float | None, memory_gb: float | None) -> Card:
    """The card of a name, or one of the given three numbers.

    Raises:
        ParameterError: the name is unknown, or a number is missing or out of bounds.
    """
    numbers = {"bandwidth": bandwidth, "flops": flops, "memory_gb": memory_gb}
    given = {
        key: check_float(key, value, 0.0, 1e18, above=True) for key, value in numbers.items() if value is not None
    }
    if not given:
        if name.lower() not in CARDS:
            raise ParameterError(
                f"card is {name!r}; it must be one of: {', '.join(CARDS)}. For another one give bandwidth, flops "
                "and memory_gb"
            )
        return CARDS[name.lower()]
    if len(given) < len(numbers):
        raise ParameterError("bandwidth, flops and memory_gb describe a card together: give all three, or none")
    return Card("of the given numbers", given["memory_gb"] * 1e9, DeviceSpeed(given["bandwidth"], given["flops"]))
