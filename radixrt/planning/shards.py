"""Cuts a planned run into ranges, one for each replica. Numpy only.

The run is in depth-first order, so a range of it holds whole subtrees, but for the two paths along which it is
cut: each prefix is computed by one replica, but for what the first prompt of a range shares with the one before.
Cuts lie where the predicted work on both sides is as wanted, or near there, where prompts share less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from radixrt.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from radixrt.limits import RunLimits
from radixrt.planning.batch_plan import BatchPlan
from radixrt.planning.demands import Demands
from radixrt.planning.work import extend_ops
from radixrt.workloads.bound import DeviceSpeed, ModelShape

TOLERANCE = 0.02  # of a range's work, that a cut may be off without counting
PARTS_OF_A_RANGE = 32  # at least, of prompts with several answers: a cut is off by half a part
PARTS_AT_ONCE = 8  # that a replica runs, at least: what it was given, others cannot take


@dataclass(frozen=True)
class Pieces:
    """A run as P pieces that a replica runs as a whole, in the order of the run.

    A piece is a prompt with its answers, or some of them where all are too large a part of a range.

    Attributes:
        places: `[P]` int64, of the prompts in the run.
        first_answers, num_answers: `[P]` int64, the answers of the prompt that the piece has.
        repeated_tokens: `[P]` int64, prompt tokens that the cache has after the piece before; where a range begins
            with this one, they are computed once more.
        seconds: `[P]` float64, predicted, after the piece before.
        repeated_seconds: `[P]` float64, more where a range begins with this one.
    """

    places: Int64Array
    first_answers: Int64Array
    num_answers: Int64Array
    repeated_tokens: Int64Array
    seconds: Float64Array
    repeated_seconds: Float64Array

    @classmethod
    def alike(cls, count: int) -> Pieces:
        """Prompts that take as long as one another, and share nothing."""
        places, none = np.arange(count), np.broadcast_to(np.int64(0), count)
        second = np.broadcast_to(np.float64(1.0), count)
        return cls(places, none, none + 1, none, second, 0.0 * second)

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def is_part(self) -> BoolArray:
        """Which pieces are some of the answers of their prompts, `[P]`."""
        return np.bincount(self.places)[self.places] > 1

    @cached_property
    def seconds_before(self) -> Float64Array:
        """Those of the pieces before each, and of all, `[P + 1]`."""
        return np.append(0.0, np.cumsum(self.seconds))

    def cut(self, begin: int, end: int, wanted: float, tolerance: float) -> int:
        """Where to cut [begin, end) so that about `wanted` seconds of it come before.

        The cut is where the least is repeated, in seconds; what it is off by more than `tolerance` seconds counts
        as much. Of places that are alike it is the one that is least off.
        """
        off = np.abs(self.seconds_before[begin : end + 1] - self.seconds_before[begin] - wanted)
        # At the end nothing is repeated in this range, but in the next one.
        repeated = np.append(self.repeated_seconds[begin:end], 0.0)
        return begin + int(np.lexsort((off, np.maximum(off - tolerance, 0.0) + repeated))[0])


@dataclass(frozen=True)
class Shards:
    """Ranges of a run for N replicas.

    Attributes:
        pieces: of the run.
        bounds: `[N + 1]` int64; replica i has the pieces from bounds[i] to bounds[i + 1], which may be none.
    """

    pieces: Pieces
    bounds: Int64Array

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def shares(self) -> Float64Array:
        """The predicted time of each replica as a share of that of one replica for all, `[N]`."""
        return self.seconds / max(float(self.pieces.seconds_before[-1]), 1e-30)

    @property
    def longest_share(self) -> float:
        """That of the replica that takes longest."""
        return float(self.shares.max())

    @property
    def seconds(self) -> Float64Array:
        """Predicted for each replica, with what it computes once more, `[N]`."""
        own = np.diff(self.pieces.seconds_before[self.bounds])
        own += np.where(self._repeats, np.append(self.pieces.repeated_seconds, 0.0)[self.bounds[:-1]], 0.0)
        return own

    @property
    def repeated_tokens(self) -> Int64Array:
        """Tokens that each replica computes though the one before it does, too, `[N]`."""
        return np.where(self._repeats, np.append(self.pieces.repeated_tokens, 0)[self.bounds[:-1]], 0)

    @property
    def begins_within_a_prompt(self) -> BoolArray:
        """Which replicas begin with further answers to a prompt that another one begins, `[N]`."""
        return np.append(self.pieces.first_answers, 0)[self.bounds[:-1]] > 0

    @property
    def _repeats(self) -> BoolArray:
        """Which replicas begin after another one, and have anything."""
        begin, end = self.bounds[:-1], self.bounds[1:]
        return (begin > 0) & (end > begin)


def shards(pieces: Pieces, num_replicas: int) -> Shards:
    """Cut a run into ranges of equal predicted work."""
    bounds = [0]
    each = float(pieces.seconds_before[-1]) / num_replicas
    for replica in range(1, num_replicas):
        before = float(pieces.seconds_before[bounds[-1]])
        bounds.append(pieces.cut(bounds[-1], len(pieces), replica * each - before, TOLERANCE * each))
    return Shards(pieces, np.array([*bounds, len(pieces)], dtype=np.int64))


def pieces_of(
    plan: BatchPlan,
    num_replicas: int,
    limits: RunLimits,
    shape: ModelShape,
    speed: DeviceSpeed,
    *,
    split: bool = True,
) -> Pieces:
    """The pieces of a planned run; see `cut_in_pieces`."""
    asked = plan.demands[plan.run.order]
    return cut_in_pieces(asked, plan.run.shared, plan.held, num_replicas, limits, shape, speed, split=split)


def cut_in_pieces(
    asked: Demands,
    shared: Int32Array,
    held: Int64Array,
    num_replicas: int,
    limits: RunLimits,
    shape: ModelShape,
    speed: DeviceSpeed,
    *,
    split: bool = True,
) -> Pieces:
    """The pieces of N prompts, in the order of their run, for so many replicas within `limits` each.

    A prompt takes the seconds of the operations for its tokens that no earlier one has computed, and of its
    answers' tokens, in passes of as many answers as `limits` allow: their part of the weights' bytes, and the KV
    and the states that they have by themselves, or their operations if these take longer. All at peak speed: only
    ratios count.

    Args:
        asked: what they ask for.
        shared: `[N]` tokens that each shares with the one before it.
        held: `[N]` leading tokens of each that the cache has at first.
        split: whether some answers of a prompt may be a piece; else a piece is a prompt.
    """
    found = np.maximum(np.minimum(asked.match_limits, np.maximum(shared, held)), held)
    running = max(1, min(limits.max_running_requests, int(asked.num_answers.sum())))
    private = asked.lengths - shared + asked.grown / 2
    token_bytes = shape.read_bytes(float(running)) / running + shape.kv_bytes * private + 2 * shape.state_bytes
    token_ops = shape.weight_ops + shape.attention_ops * (asked.lengths + asked.grown / 2)
    answer = asked.grown * np.maximum(token_bytes / speed.bandwidth, token_ops / speed.flops)
    prompt = extend_ops(found, asked.lengths, shape) / speed.flops
    before = extend_ops(held, found, shape) / speed.flops

    # A further part of a prompt finds all of the prompt but its last token, unless it is scored.
    seconds = (prompt + asked.num_answers * answer).sum() / num_replicas / PARTS_OF_A_RANGE
    most_of_a_part = limits.max_running_requests // PARTS_AT_ONCE
    may_split = split & (num_replicas > 1) & (asked.match_limits >= asked.lengths - 1)
    most = seconds / np.maximum(answer, 1e-30)
    size = np.where(may_split & (most < asked.num_answers), np.minimum(most, most_of_a_part), asked.num_answers)
    size = np.maximum(1, size).astype(np.int64)
    counts = -(-asked.num_answers // size)
    places = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_further = nth > 0
    first = nth * size[places]
    num_answers = np.minimum(size[places], asked.num_answers[places] - first)
    repeated = np.where(is_further, np.maximum(asked.match_limits, found)[places], found[places]) - held[places]
    return Pieces(
        places=places,
        first_answers=first,
        num_answers=num_answers,
        repeated_tokens=repeated,
        seconds=num_answers * answer[places] + np.where(is_further, 0.0, prompt[places]),
        repeated_seconds=before[places] + np.where(is_further, prompt[places], 0.0),
    )
