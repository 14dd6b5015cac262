"""Expected cost of a run on a card: operations, bytes, and a range of seconds. Numpy only.

The minimum time is the bound of `radixrt.workloads.bound`, for no more requests at once than the run's limits
allow: every computed token once through the layers with its causal attention, and every decode step the larger of
its bytes over bandwidth and its operations over speed, distinct KV read once. No engine is as fast as that; the
range comes from measured multiples of it: docs/lab-notebook/2026-11-22-five-lists.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.arrays import Int32Array, Int64Array
from radixrt.planning.cache_model import ModelledRun
from radixrt.workloads.bound import DeviceSpeed, ModelShape

# Measured times over the bound, for five lists at two shapes: docs/lab-notebook/2026-11-22-five-lists.md.
QUICKEST, SLOWEST = 1.2, 2.7


@dataclass(frozen=True)
class Work:
    """The work of a run, and the minimum seconds that it takes.

    Attributes:
        computed_tokens: prompt tokens that go through the layers.
        generated_tokens: tokens of all answers.
        decode_steps: passes in which requests decode.
        prefill_seconds, decode_seconds: minimum times that no engine can beat.
    """

    computed_tokens: int
    generated_tokens: int
    decode_steps: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def min_seconds(self) -> float:
        """The time that no engine can beat."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def expected_seconds(self) -> tuple[float, float]:
        """The range in which this engine should be, by its measured multiples of the bound."""
        return QUICKEST * self.min_seconds, SLOWEST * self.min_seconds


def expected_work(
    run: ModelledRun,
    lengths: Int64Array,
    shared: Int32Array,
    new_tokens: Int64Array,
    shape: ModelShape,
    speed: DeviceSpeed,
) -> Work:
    """The work of N prompts in the order of their run.

    Args:
        run: the modelled run.
        lengths: `[N]` tokens of each prompt.
        shared: `[N]` leading tokens that it shares with the one before it.
        new_tokens: `[N]` tokens of its answer.
        shape: of the model.
        speed: of the card.
    """
    own = (lengths - shared).astype(np.float64)
    attended = float((own * shared + own * (own + 1) / 2).sum())
    computed = run.prompt_tokens - run.cached_tokens
    prefill_ops = (
        2.0 * shape.layer_weights * computed
        + 2.0 * shape.head_weights * len(lengths)
        + shape.attention_ops * attended
    )
    line = run.timeline
    weights = shape.layer_weights + shape.head_weights
    step_bytes = weights * shape.bytes_per_value + line.distinct_tokens * shape.kv_bytes
    step_ops = 2 * weights * line.running + shape.attention_ops * line.context_tokens
    seconds = line.passes * np.maximum(step_bytes / speed.bandwidth, step_ops / speed.flops)
    return Work(
        computed_tokens=computed,
        generated_tokens=int(new_tokens.sum()),
        decode_steps=int(line.passes.sum()),
        prefill_seconds=prefill_ops / speed.flops,
        decode_seconds=float(seconds.sum()),
    )
