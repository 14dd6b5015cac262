"""GPUs to plan for."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from dataclasses import dataclass

from radixrt.checks import check_float
from radixrt.errors import ParameterError
from radixrt.workloads.bound import KNOWN_DEVICES, DeviceSpeed, ModelShape

MEMORY_FRACTION = 0.95  # as a Runtime's: of the memory left by weights and passes
PASS_BYTES = 4e9  # about the need of the largest pass and its graphs


@dataclass(frozen=True)
class Card:
    """A GPU: its memory in bytes, and its peak speed."""

    memory: float
    speed: DeviceSpeed

    def pool_tokens(self, shape: ModelShape) -> int:
        """About how many tokens the KV pool of a Runtime holds with this model; 0 if the weights do not fit."""
        weights = (shape.layer_weights + shape.head_weights) * shape.bytes_per_value
        return max(0, int((self.memory - weights - PASS_BYTES) * MEMORY_FRACTION / shape.kv_bytes))


CARDS = {"h200": Card(memory=149e9, speed=KNOWN_DEVICES["NVIDIA H200"])}


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
        if name not in CARDS:
            raise ParameterError(
                f"card is {name!r}; it must be one of: {', '.join(CARDS)}. For another one give bandwidth, flops "
                "and memory_gb"
            )
        return CARDS[name]
    if len(given) < len(numbers):
        raise ParameterError("bandwidth, flops and memory_gb describe a card together: give all three, or none")
    return Card(given["memory_gb"] * 1e9, DeviceSpeed(given["bandwidth"], given["flops"]))
