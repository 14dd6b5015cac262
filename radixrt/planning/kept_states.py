"""Which states a modelled run keeps, at which nodes of the tree of its prompts: as `radixrt.cache.states`, without
ends of answers, which no known prompt goes on from.
"""

# Tests: tests/planning/test_states.py

from __future__ import annotations

import heapq

from radixrt.cache.states import FOR_FRESH


class KeptStates:
    """States at nodes, of `num_states` in all. Those whose next use is farthest go first, and of these
    that which was used longest ago.
    """

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self._ready: dict[int, int] = {}  # by node, the first pass that can admit requests which begin with it
        self._latest: dict[int, tuple[int, int, int]] = {}  # by node, its entry in the heap; others are outdated
        self._farthest: list[tuple[int, int, int]] = []  # a heap: -(the next use), its number, node
        self._number = 0

    def ready(self, node: int) -> int | None:
        """The first pass that can admit requests which begin with a node's state; None: it has none."""
        return self._ready.get(node)

    def use_next(self, node: int, place: int) -> None:
        """Let the prompt at `place` be the next one that may begin with a node's state, if it has one."""
        if node in self._ready:
            self._number += 1
            self._latest[node] = entry = (-place, self._number, node)
            heapq.heappush(self._farthest, entry)
            if len(self._farthest) > 100 + 4 * len(self._latest):  # most are outdated
                self._farthest = sorted(self._latest.values())

    def leave(self, node: int, ready: int, place: int) -> None:
        """Leave a state at a node, unless it has one; the prompt at `place` is the next that may begin with it."""
        self._ready.setdefault(node, ready)
        self.use_next(node, place)

    def drop(self, node: int) -> None:
        """Give up a node's state, if it has one."""
        self._ready.pop(node, None)
        self._latest.pop(node, None)

    def make_room(self, running: int) -> None:
        """Give up those for which there is no room beside the states of so many running requests."""
        while self._ready and len(self._ready) > self._num_states - running - FOR_FRESH:
            entry = heapq.heappop(self._farthest)
            if self._latest.get(entry[-1]) == entry:
                self.drop(entry[-1])
