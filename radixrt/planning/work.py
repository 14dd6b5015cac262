"""Expected cost of a run on a card: operations, bytes, and a range of seconds. Numpy only.

Two times are computed. One is the time of this run's passes at peak speed: every computed token once through the
layers with its causal attention, then every decode step the larger of its bytes over bandwidth and its operations
over speed, distinct KV read once. The range of seconds comes from measured multiples of it, and of the host's time
a pass. The other is a bound for all engines and orders: the larger of all operations and all bytes that cannot be
avoided, since passes may mix prefill and decode, and copies may run beside products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.arrays import Float64Array, Int64Array
from radixrt.planning.cache_model import ModelledRun
from radixrt.planning.cards import PASS_SECONDS
from radixrt.planning.demands import Demands
from radixrt.workloads.bound import DeviceSpeed, ModelShape

# Measured times over those at peak speed, of five lists, two shapes: docs/lab-notebook/2026-11-22-five-lists.md.
QUICKEST, SLOWEST = 1.2, 2.7


@dataclass(frozen=True)
class Work:
    """The work of a run, and the seconds that it takes.

    Attributes:
        computed_tokens: prompt tokens that go through the layers.
        generated_tokens: tokens of all answers.
        passes: of the model.
        prefill_seconds, decode_seconds: times at peak speed of this run's passes, if none mixes both.
        min_seconds: lower bound at peak speed, in any order, if all answers have these tokens.
    """

    computed_tokens: int
    generated_tokens: int
    passes: int
    prefill_seconds: float
    decode_seconds: float
    min_seconds: float

    @property
    def expected_seconds(self) -> tuple[float, float]:
        """The range in which this engine should be: multiples of the time at peak speed, and the host's a pass."""
        at_peak, (least, most) = self.prefill_seconds + self.decode_seconds, PASS_SECONDS
        return max(QUICKEST * at_peak, least * self.passes), SLOWEST * at_peak + most * self.passes


def expected_work(
    run: ModelledRun,
    asked: Demands,
    distinct: Int64Array,
    private: Int64Array,
    shape: ModelShape,
    speed: DeviceSpeed,
) -> Work:
    """The work of N prompts in the order of their run.

    Args:
        run: the modelled run.
        asked: of the N prompts.
        distinct: `[N]` last tokens of each prompt that no earlier one has computed.
        private: `[N]` last tokens of each prompt that it shares with no other.
        shape: of the model.
        speed: of the card.
    """
    computed = asked.lengths - run.found
    line = run.timeline
    step_bytes = shape.read_bytes(line.running) + line.distinct_tokens * shape.kv_bytes
    step_bytes += 2 * line.running * shape.state_bytes  # each is read and written
    step_ops = shape.weight_ops * line.running + shape.attention_ops * line.context_tokens
    steps = line.passes * np.maximum(step_bytes / speed.bandwidth, step_ops / speed.flops)
    return Work(
        computed_tokens=int(computed.sum()),
        generated_tokens=int((asked.new_tokens * asked.num_answers).sum()),
        passes=int(line.passes.sum()),
        prefill_seconds=_prefill_ops(asked, computed, shape) / speed.flops,
        decode_seconds=float(steps.sum()),
        min_seconds=_min_seconds(asked, distinct, private, shape, speed),
    )


def extend_ops(first: Int64Array, last: Int64Array, shape: ModelShape) -> Float64Array:
    """Operations for the tokens from `first` to `last` of each prompt, `[N]` each, without those for logits."""
    first, last = first.astype(np.float64), last.astype(np.float64)
    attended = (last * (last + 1) - first * (first + 1)) / 2
    ops: Float64Array = shape.layer_ops * (last - first) + shape.attention_ops * attended
    return ops


def _prefill_ops(asked: Demands, computed: Int64Array, shape: ModelShape) -> float:
    """Operations for the last `computed` `[N]` tokens of each prompt, and for the logits after it."""
    ops = extend_ops(asked.lengths - computed, asked.lengths, shape)
    return float(ops.sum()) + 2.0 * shape.head_weights * len(ops)


def _min_seconds(
    asked: Demands, distinct: Int64Array, private: Int64Array, shape: ModelShape, speed: DeviceSpeed
) -> float:
    """The larger time of all operations and of all bytes, whatever the passes.

    Bytes are the weights that a token needs in as many passes as the longest answer has tokens, and at each token
    of an answer the KV of its earlier ones, with that of the prompt as far as no other answer shares it; and its
    state, if there is one, twice.
    """
    count, steps = asked.num_answers.astype(np.float64), asked.grown.astype(np.float64)
    own = count * steps * (steps + 1) / 2  # tokens of answers attended to
    attended = (own + count * steps * asked.lengths).sum()
    decode_ops = float(shape.weight_ops) * (count * steps).sum() + shape.attention_ops * attended
    read = (own + np.where(count == 1, private, 0) * steps).sum()
    passes = int(np.maximum(1, asked.new_tokens).max(initial=0))  # one for a prompt alone
    bytes_read = float(shape.read_bytes(1.0)) * passes + shape.kv_bytes * read
    bytes_read += 2 * shape.state_bytes * float((count * steps).sum())
    ops = _prefill_ops(asked, distinct, shape) + decode_ops
    return float(max(ops / speed.flops, bytes_read / speed.bandwidth))
