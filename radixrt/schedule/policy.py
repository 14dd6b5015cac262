"""In which order waiting requests are considered, and how much output is expected of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from radixrt.schedule.request import Request

RANKED = 512  # requests at the head of the queue that longest-prefix order looks at
MAX_OVERTAKEN = 256  # admissions that the oldest waiting request lets pass


class SchedulePolicy(str, Enum):
    """LPM: longest matched prefix first, with ageing. FCFS: first come, first served."""

    LPM = "lpm"
    FCFS = "fcfs"

    def __str__(self) -> str:
        return self.value


def admission_order(
    policy: SchedulePolicy, waiting: Sequence[Request], match_length: Callable[[Request], int]
) -> list[Request]:
    """The requests to consider for admission, in this order; `waiting` is in order of arrival.

    Under LPM the oldest request goes first once MAX_OVERTAKEN others have been admitted before it, or if it came
    in an order that is to be kept.
    """
    ranked = list(waiting[:RANKED])
    if policy is SchedulePolicy.FCFS or not ranked:
        return ranked
    head = ranked[0]
    if head.in_order:
        return ranked
    ranked.sort(key=match_length, reverse=True)  # stable: equal matches stay in order of arrival
    if is_overdue(head):
        ranked.remove(head)
        ranked.insert(0, head)
    return ranked


def is_overdue(request: Request) -> bool:
    """Whether nobody may overtake this request, the oldest one, any more."""
    return request.overtaken >= MAX_OVERTAKEN


class OutputEstimate:
    """How many tokens a request is expected to generate yet.

    A share of what it may, but hardly more than requests that have ended had: their mean length plus twice the
    mean deviation, both fading. The share falls a little with every pass and rises whenever memory has fallen
    short, so that memory is neither kept idle for outputs that end early nor promised twice for those that do
    not. Requests that no token can stop are expected to run to their end.
    """

    INITIAL, LOWEST, FALL, RISE = 0.7, 0.1, 0.995, 0.2
    FADE = 1 / 32  # weight of the latest length
    ENOUGH = 16  # lengths before they count

    def __init__(self) -> None:
        self.share = self.INITIAL
        self._ended = 0
        self._mean = self._deviation = 0.0

    def expected(self, request: Request) -> int:
        """Output tokens still expected of `request`: 1 to `request.remaining`, 0 if none remain."""
        if not request.stop_ids and request.make_text_stop is None:
            return request.remaining
        expected = request.remaining * self.share
        if self._ended >= self.ENOUGH:
            expected = min(expected, self._mean + 2 * self._deviation - request.num_output)
        return min(request.remaining, max(1, int(expected)))

    def expected_each(
        self, remaining: NDArray[np.int32], num_output: NDArray[np.int32], may_stop: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """The same of N requests: from what remains of each, what it has had, and whether it may stop."""
        expected = remaining * self.share
        if self._ended >= self.ENOUGH:
            expected = np.minimum(expected, self._mean + 2 * self._deviation - num_output)
        bounded = np.minimum(remaining, np.maximum(1, expected.astype(np.int32)))
        return np.where(may_stop, bounded, remaining)

    def pass_scheduled(self) -> None:
        self.share = max(self.LOWEST, self.share * self.FALL)

    def fell_short(self) -> None:
        """Memory was promised that is not there."""
        self.share = min(1.0, self.share + self.RISE)
        self._ended = 0  # what has ended so far was not typical of what runs

    def ended(self, request: Request) -> None:
        """A request has ended with all the output that it will have."""
        self._ended += 1
        weight = max(self.FADE, 1 / self._ended)
        self._mean += weight * (request.num_output - self._mean)
        self._deviation += weight * (abs(request.num_output - self._mean) - self._deviation)
