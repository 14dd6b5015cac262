"""In which order waiting answers are considered, how much output is expected, and the numbers behind both."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from radixrt.arrays import BoolArray, Int32Array
from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.limits import EXPECTED_TOKENS
from radixrt.sampling_params import MAX_NEW_TOKENS
from radixrt.schedule.answer import Answer


class SchedulePolicy(str, Enum):
    """LPM: longest matched prefix first, with ageing. FCFS: first come, first served."""

    LPM = "lpm"
    FCFS = "fcfs"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SchedulerConfig:
    """What a scheduler works within."""

    max_running_requests: int
    chunked_prefill_size: int  # tokens of extends that one pass computes; longer ones take several passes
    # Tokens that one pass samples, each from a row of logits of its own. First tokens of a prompt's n answers for
    # which there is none are sampled later: those answers compute the prompt's last token once more.
    max_samples_per_pass: int
    policy: SchedulePolicy = SchedulePolicy.LPM
    max_ranked: int = 512  # answers at the head of the queue that are considered for a pass
    max_times_skipped: int = 256  # admissions that the oldest waiting answer of a priority lets pass
    least_scouted: int = 256  # tokens that several answers begin with, for one of them to go before its turn
    first_ranked: int = 96  # those for a pass that the device waits for, such as the first: it is planned sooner
    max_loaded_chunks: int = 4  # about how many chunks of tokens a pass waits for from the host
    room_passes: int = 4  # decode passes to make room for once answers must be retracted
    num_lanes: int = 1  # parts of the decoding answers that take turns, for as many passes in flight; see `Lanes`

    def __post_init__(self) -> None:
        if self.max_samples_per_pass < self.max_running_requests:  # every running answer may sample one
            bound = f"at least max_running_requests, {self.max_running_requests}"
            raise ValueError(f"max_samples_per_pass is {self.max_samples_per_pass}; it must be {bound}")

    def is_overdue(self, oldest: Answer) -> bool:
        """Whether no other answer of its priority may be admitted before the oldest of these in the queue."""
        return oldest.times_skipped >= self.max_times_skipped


def admission_order(config: SchedulerConfig, ranked: list[Answer], cache: PrefixCache) -> list[Answer]:
    """The answers to consider for admission, in this order; they are given in the order of their places.

    The most urgent come first. Under LPM, the oldest of a priority goes before its equals once it is overdue; if
    it is `in_order`, all of them are in order of arrival.
    """
    if config.policy is not SchedulePolicy.LPM or not cache.may_match:
        return ranked  # nothing has a longer match than others
    length = PendingMatch.length if cache.states is None else PendingMatch.usable_length
    groups = [[*ranked]]
    if ranked[0].request.priority != ranked[-1].request.priority:
        groups = [list(group) for _, group in itertools.groupby(ranked, key=lambda one: one.request.priority)]
    for equals in groups:
        oldest = equals[0]
        if not oldest.in_order:
            first = oldest if config.is_overdue(oldest) else None
            # Stable: equal matches stay in order of arrival.
            equals.sort(key=lambda one: math.inf if one is first else length(one.match_in(cache)), reverse=True)
    return list(itertools.chain.from_iterable(groups))


class OutputEstimate:
    """How many more tokens an answer is expected to have.

    A share of what it may have, but hardly more than ended answers had: their mean length plus twice the mean
    deviation, both fading. The share falls a little with every pass and rises when memory has fallen short, so
    that memory is neither kept idle for outputs that end early nor promised twice for those that do not. Before
    enough have ended, some length stands in their place, and doubles when memory has fallen short: the limit of a
    chat may be the whole context, and others are to run beside it. Answers that no token can stop are expected to
    run to their end.
    """

    INITIAL, MIN, FALL, RISE = 0.7, 0.1, 0.995, 0.2
    FADE = 1 / 32  # weight of the latest length
    ENOUGH = 16  # lengths before they count

    def __init__(self) -> None:
        self.share = self.INITIAL
        self._ended = 0
        self._unknown = EXPECTED_TOKENS
        self._mean = self._deviation = 0.0

    def expected(self, answer: Answer) -> int:
        """Output tokens still expected of one that waits: from 1 to what its limit leaves, 0 if that is none."""
        remaining = answer.request.max_len - answer.known_len
        if not answer.request.may_stop:
            return remaining
        expected = min(remaining * self.share, self._most() - answer.num_output)
        return min(remaining, max(1, int(expected)))

    def expected_each(self, remaining: Int32Array, num_output: Int32Array, may_stop: BoolArray) -> Int32Array:
        """The same of N answers: from what remains of each, what it has had, and whether it may stop."""
        expected = np.minimum(remaining * self.share, self._most() - num_output)
        bounded = np.minimum(remaining, np.maximum(1, expected.astype(np.int32)))
        return np.where(may_stop, bounded, remaining)

    def _most(self) -> float:
        """Output tokens that hardly any answer has more of."""
        return self._mean + 2 * self._deviation if self._ended >= self.ENOUGH else self._unknown

    def pass_scheduled(self) -> None:
        self.share = max(self.MIN, self.share * self.FALL)

    def fell_short(self) -> None:
        """Memory was promised that is not there."""
        self.share = min(1.0, self.share + self.RISE)
        self._ended = 0  # the outputs that have ended so far were not typical of those that run
        self._unknown = min(2 * self._unknown, MAX_NEW_TOKENS)

    def ended(self, num_output: int) -> None:
        """An answer has ended with so many output tokens."""
        self._ended += 1
        weight = max(self.FADE, 1 / self._ended)
        self._mean += weight * (num_output - self._mean)
        self._deviation += weight * (abs(num_output - self._mean) - self._deviation)
