"""What passes in flight have on the host: copies of their results, and the events that time them."""

from __future__ import annotations

import time
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_ops.implementation import next_power_of_2

MIN_BYTES = 256
HostCopy = tuple[Tensor, Tensor]  # memory, and the copy that lies in it
# The seconds of a pass's launch and, on a GPU, the two events before and after all that it is.
TimedPass = tuple[float, list[torch.cuda.Event]]


class HostCopies:
    """Starts copies of device tensors, and hands out what they brought. Their memory is used again, never freed.

    It is pinned, for CUDA. Freeing pinned memory records an event, which would end the process where the device
    has been lost and nobody knows it yet. So all `num_allocated` pieces were once in use together.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._free: dict[int, list[Tensor]] = {}  # by bytes
        self.num_allocated = 0

    def start(self, tensor: Tensor) -> HostCopy:
        """Start a copy; it belongs to the caller until `take`."""
        num_bytes = next_power_of_2(max(tensor.nbytes, MIN_BYTES))
        free = self._free.setdefault(num_bytes, [])
        if not free:
            self.num_allocated += 1
            free.append(torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned))
        memory = free.pop()
        copy = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return memory, copy.copy_(tensor, non_blocking=True)

    def take(self, copy: HostCopy) -> NDArray[Any]:
        """The numbers of a copy that has been made, in memory of their own."""
        memory, tensor = copy
        numbers: NDArray[Any] = tensor.numpy().copy()
        self._free[len(memory)].append(memory)
        return numbers


class PassTimer:
    """Times passes in the order in which they are launched. The host begins to launch one at `begin` and has at
    `end`; at `start` it knows all that it had to find out first, and the pass begins on the device. What it does
    between `pause` and `resume` is not launching.

    On a GPU a pass lasts from one event to another. The first is due when all that was launched before has ended,
    so that a pass which is launched while another one is computed begins where that ends. Elsewhere the launch
    computes the pass. Events are used again: there are as many as passes have ever been in flight together.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: list[list[torch.cuda.Event]] = []
        self._own: list[torch.cuda.Event] = []  # of the launch at hand, or of one that raised
        self._paused: torch.cuda.Event | None = None  # the end of what was before the last pause, on a GPU
        self._began = 0.0

    def begin(self, already: float = 0.0) -> None:
        """`already`: the seconds that have gone into this launch before."""
        self._began = time.perf_counter() - already

    def start(self) -> None:
        if self._on_gpu:
            if not self._own and self._free:
                self._own = self._free.pop()
            elif not self._own:
                self._own = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._own[0].record()

    def pause(self) -> None:
        self._began -= time.perf_counter()
        if self._on_gpu:
            if self._paused is None:
                self._paused = torch.cuda.Event(enable_timing=False)  # type: ignore[no-untyped-call]
            self._paused.record()

    def resume(self) -> bool:
        """Whether a GPU has done all that was launched before the pause, and waits."""
        self._began += time.perf_counter()
        return self._paused is not None and bool(self._paused.query())  # type: ignore[no-untyped-call]

    def end(self) -> TimedPass:
        events, self._own = self._own, []
        if events:
            events[1].record()
        return time.perf_counter() - self._began, events

    def wait(self, timed: TimedPass) -> tuple[float, float]:
        """Wait for a pass. The device's seconds, and those of the launch unless they are the same."""
        launch_seconds, events = timed
        if not events:
            return launch_seconds, 0.0
        started, ended = events
        ended.synchronize()
        self._free.append(events)
        return started.elapsed_time(ended) / 1000, launch_seconds
