"""Captured graphs by key: each is launched as a whole, and reads and writes where it did when it was captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Set
from functools import partial
from typing import Protocol


class Graph(Protocol):
    """What a torch.cuda.CUDAGraph has."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """What makes graphs. See GraphMemory."""

    def captured(self, compute: Callable[[], None], warm_up: Callable[[], None]) -> Graph: ...


class CapturedGraphs:
    """Graphs that a recorder makes, and what each of them launches."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._graphs: dict[Hashable, Graph] = {}

    @property
    def keys(self) -> Set[Hashable]:
        return self._graphs.keys()

    def capture(self, key: Hashable, compute: Callable[..., None], **warm_up: int) -> None:
        """Capture what `compute` launches, after a call of it with the arguments `warm_up`."""
        self._graphs[key] = self._recorder.captured(partial(compute), partial(compute, **warm_up))

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()
