"""Where a run's time goes: what the device does in passes, and what the host does between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import TypeVar

from radixrt.schedule.passes import Pass, PassResult

T = TypeVar("T")


@dataclass(frozen=True)
class Activity:
    """Counters of an engine since it was made, or between two moments: `later - earlier`.

    A pass is counted when its result has come. One that failed has none: the device's time in it is not known.
    """

    passes: int = 0
    extend_passes: int = 0  # those that extend an answer, perhaps with decodes beside it
    # Prompt tokens not found in the cache, tokens that forms have forced, and tokens that are computed again.
    extended_tokens: int = 0
    decoded_tokens: int = 0  # tokens that were sampled, those of answers that had ended included
    prefill_seconds: float = 0.0  # the device's time in `extend_passes`
    decode_seconds: float = 0.0  # and in the others
    # The host's time in steps: planning, booking, starting transfers, and launching where the device computes
    # meanwhile; not waiting for results. On a GPU most of it passes while the device computes: do not add them up.
    scheduling_seconds: float = 0.0
    masked_passes: int = 0  # those with draws of answers that have a form
    late_masks: int = 0  # those of them whose draws a GPU waited for: their masks were not filled yet

    @property
    def busy_seconds(self) -> float:
        """The device's time in all passes. On a GPU: see `PassResult.seconds`."""
        return self.prefill_seconds + self.decode_seconds

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class ActivityMeter:
    """Adds up an engine's `activity`, replaced whole after each step: another thread sees no half of one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.activity = Activity()
        self._clock, self._began = clock, 0.0
        self._counts = asdict(self.activity)

    def begin_step(self) -> None:
        self._began = self._clock()

    def end_step(self) -> None:
        self._counts["scheduling_seconds"] += self._clock() - self._began
        self.activity = Activity(**self._counts)

    def in_runner(self, call: Callable[..., T], argument: object) -> T:
        """What `call(argument)` returns. It launches or collects a pass: its time is not the scheduler's."""
        began = self._clock()
        try:
            return call(argument)
        finally:
            self._began += self._clock() - began  # as if the step had begun so much later

    def count(self, pass_: Pass, result: PassResult) -> None:
        counts, extends = self._counts, pass_.extended_tokens > 0
        counts["passes"] += 1
        counts["extend_passes"] += extends
        counts["extended_tokens"] += pass_.extended_tokens
        counts["decoded_tokens"] += len(result.token_ids)
        counts["masked_passes"] += pass_.sampling.masked is not None
        counts["late_masks"] += result.waited_for_masks
        counts["prefill_seconds" if extends else "decode_seconds"] += result.seconds or 0.0
        counts["scheduling_seconds"] += result.launch_seconds
