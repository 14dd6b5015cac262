"""Which states a modelled run keeps, at which nodes of the tree of its prompts: as `radixrt.cache.states`, without
ends of answers, which no known prompt goes on from.
"""

# Tests: tests/planning/test_states.py

from __future__ import annotations

from radixrt.cache.states import FOR_FRESH


class KeptStates:
    """States at nodes, of `num_states` in all.

    Those with which a request has begun go first, the least recently used one before the others; those that were
    left and not used yet stay, unless they are most.
    """

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self._ready: dict[int, int] = {}  # by node, the first pass that can admit requests which begin with it
        # Nodes in order of last use, as keys: a dict keeps the order in which they were put in.
        self._used, self._unused = dict[int, None](), dict[int, None]()

    def ready(self, node: int) -> int | None:
        """The first pass that can admit requests which begin with a node's state; None: it has none."""
        return self._ready.get(node)

    def use(self, node: int) -> None:
        """Let a request begin with a node's state."""
        self._unused.pop(node, None)
        self._used.pop(node, None)
        self._used[node] = None

    def leave(self, node: int, ready: int) -> None:
        """Leave a state at a node that has none."""
        if node not in self._ready:
            self._ready[node] = ready
            self._unused[node] = None

    def drop(self, node: int) -> None:
        """Give up a node's state, if it has one."""
        if self._ready.pop(node, None) is not None:
            self._used.pop(node, None)
            self._unused.pop(node, None)

    def make_room(self, running: int) -> None:
        """Give up those for which there is no room beside the states of so many running requests."""
        while self._ready and len(self._ready) > self._num_states - running - FOR_FRESH:
            protects = self._used and 2 * len(self._unused) <= len(self._ready)
            self.drop(next(iter(self._used if protects or not self._unused else self._unused)))
