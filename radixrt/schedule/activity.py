"""Where a run's time goes: what the device does in passes, and what the host does between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TypeVar

from radixrt.schedule.passes import Pass, PassResult

A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True)
class Activity:
    """Counters of an engine since it was made, or between two moments: `later - earlier`.

    A pass is counted when its result has come. One that failed has none: the device's time in it is not known.

    Attributes:
        passes: passes of any kind.
        extend_passes: those of them that extend an answer; they may have decodes beside it.
        extended_tokens: tokens that extends compute: prompt tokens not found in the cache, and tokens computed
            again after a retraction or for one of several answers.
        decoded_tokens: tokens that were sampled, the first of each answer among them, and those that were thrown
            away because their answer had ended.
        prefill_seconds: the device's time in `extend_passes`.
        decode_seconds: the device's time in the other passes.
        scheduling_seconds: the host's time in steps: planning, booking, starting transfers, and launching where
            the device computes meanwhile; not waiting for results. On a GPU most of it passes while the device
            computes, so that it must not be added to the others.
    """

    passes: int = 0
    extend_passes: int = 0
    extended_tokens: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    scheduling_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """The device's time in all passes. On a GPU: see `PassResult.seconds`."""
        return self.prefill_seconds + self.decode_seconds

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class ActivityMeter:
    """Adds up an engine's activity, step by step.

    Args:
        clock: seconds of the host.

    Attributes:
        activity: up to the end of the last step. It is replaced whole: another thread sees no half of a step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.activity = Activity()
        self._clock = clock
        self._passes = self._extend_passes = self._extended_tokens = self._decoded_tokens = 0
        self._prefill_seconds = self._decode_seconds = self._scheduling_seconds = 0.0
        self._began = 0.0

    def begin_step(self) -> None:
        self._began = self._clock()

    def end_step(self) -> None:
        self._scheduling_seconds += self._clock() - self._began
        self.activity = Activity(
            self._passes,
            self._extend_passes,
            self._extended_tokens,
            self._decoded_tokens,
            self._prefill_seconds,
            self._decode_seconds,
            self._scheduling_seconds,
        )

    def in_runner(self, call: Callable[[A], T], argument: A) -> T:
        """What `call(argument)` returns. It launches or collects a pass: its time is not the scheduler's."""
        began = self._clock()
        try:
            return call(argument)
        finally:
            self._began += self._clock() - began  # as if the step had begun so much later

    def count(self, pass_: Pass, result: PassResult) -> None:
        """Count a pass whose result has come."""
        seconds = result.seconds or 0.0
        self._passes += 1
        if pass_.extended_tokens:
            self._extend_passes += 1
            self._extended_tokens += pass_.extended_tokens
            self._prefill_seconds += seconds
        else:
            self._decode_seconds += seconds
        self._decoded_tokens += len(result.token_ids)
        self._scheduling_seconds += result.launch_seconds
