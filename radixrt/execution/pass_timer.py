"""How long the device takes for each pass."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TimedPass:
    """A launched pass: the seconds of its launch and, on a GPU, the events before and after all that it is."""

    launch_seconds: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class PassTimer:
    """Times passes in the order in which they are launched: `begin`, `start` and `end` are of one launch.

    On a GPU a pass lasts from one event to another. The first is due when all that was launched before has ended,
    so that a pass which is launched while another one is computed begins where that ends. Elsewhere the launch
    computes the pass. Events are used again: there are as many as passes have ever been in flight together.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # of the launch at hand
        self._began = 0.0

    def begin(self) -> None:
        """The host begins to launch."""
        self._began = time.perf_counter()

    def start(self) -> None:
        """The pass begins on the device: whatever the host had to find out first is known."""
        if not self._on_gpu:
            return
        if self._events is None:  # else those of a launch that raised
            self._events = self._free.pop() if self._free else (_event(), _event())
        self._events[0].record()

    def end(self) -> TimedPass:
        """All of the pass has been launched."""
        events, self._events = self._events, None
        assert events is not None or not self._on_gpu  # it has begun
        if events is not None:
            events[1].record()
        return TimedPass(time.perf_counter() - self._began, events)

    def wait(self, timed: TimedPass) -> tuple[float, float]:
        """Wait for a pass. The device's seconds, and those of the launch unless they are the same."""
        if timed.events is None:
            return timed.launch_seconds, 0.0
        started, ended = timed.events
        ended.synchronize()
        seconds = started.elapsed_time(ended) / 1000
        self._free.append(timed.events)
        return seconds, timed.launch_seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
