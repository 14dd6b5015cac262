"""In which order waiting requests are considered, and how much output is expected of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

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

    Under LPM the oldest request goes first once MAX_OVERTAKEN others have been admitted before it.
    """
    ranked = list(waiting[:RANKED])
    if policy is SchedulePolicy.FCFS or not ranked:
        return ranked
    head = ranked[0]
    ranked.sort(key=match_length, reverse=True)  # stable: equal matches stay in order of arrival
    if is_overdue(head):
        ranked.remove(head)
        ranked.insert(0, head)
    return ranked


def is_overdue(request: Request) -> bool:
    """Whether nobody may overtake this request, the oldest one, any more."""
    return request.overtaken >= MAX_OVERTAKEN


class OutputEstimate:
    """How many tokens a request is expected to generate yet, as a share of what it may.

    The share falls a little with every pass and rises with every retraction, so that memory is neither kept
    idle for outputs that end early nor promised twice for outputs that do not. Requests that no token can stop
    are expected to run to their end.
    """

    INITIAL, LOWEST, FALL, RISE = 0.7, 0.1, 0.995, 0.2

    def __init__(self) -> None:
        self.share = self.INITIAL

    def expected(self, request: Request) -> int:
        """Output tokens still expected of `request`, at least one."""
        if not request.stop_ids:
            return request.remaining
        return max(1, int(request.remaining * self.share))

    def pass_scheduled(self) -> None:
        self.share = max(self.LOWEST, self.share * self.FALL)

    def retracted(self) -> None:
        self.share = min(1.0, self.share + self.RISE)
