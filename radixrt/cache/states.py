"""Who has which state, of a model of which some layers keep one for a sequence instead of the KV of its tokens.

A state is what such layers know of a whole prefix. Unlike KV it cannot be cut: a prefix is of use only up to where
one was kept. Every state is in exactly one of these places:

    reserved  state 0: rows that begin with it begin with zeros
    free      in the allocator's free list
    own       a lease's, until its last pass has ended; its passes overwrite it
    fresh     left by a pass at a position where prompts part, and not published yet
    kept      at the tree node that ends where it was left; leases begin with it, and none overwrites it
    pending   given up, but a pass in flight may still read or write it
    arriving  getting the content of a kept cache's; no node has it yet

With a host tier, a kept state that is given up is stored there (`HostStates`). One that only the host has is
loaded, and kept, when a lease begins with it; the transfer is made before the pass that reads it.

A pass names for each row the state that it begins with and the one that it leaves, so that nothing is ever copied:
the first pass of a lease reads a kept state and leaves the lease's own; one that ends where prompts part leaves a
fresh one, which the next pass reads.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

from memory_pool.slot_allocator import SlotAllocator
from radixrt.arrays import Int32Array
from radixrt.cache.host_states import END, PASSED, SHARED, HostStates
from radixrt.cache.radix_tree import DEVICE, Node

NO_STATE = 0
FOR_FRESH = 2  # states that leases begin without, as long as others run: what is not kept is computed again
LEAST_GAIN = 32  # tokens that a state saves, where nobody waits for it
AT_ONCE = 64  # of so many states that are waited for, one is given up at once
FEWEST = 2  # tokens, before which there is no stop and no wait: all prompts of a model begin with one


class States:
    """Lends states to leases, and keeps some at nodes; `PrefixCache` says when.

    Kept states make room for others, but never one that a lease is about to begin with. First go those that nobody
    waits for: of these ends of answers, passed ones first, and then what was used longest ago. Of the others, that
    goes first which saves fewest tokens for the time until its next use.

    Attributes:
        own: by the row of a lease, int32 `[max_requests]`: the state that its passes may overwrite.
        at: by row, that which its next pass begins with.
        kept: by state, the node that has it.
        version: changes whenever a node gets a state, or loses one.
        given_up_unused: how many that were left where prompts part were given up before a lease began with them.
        next_use: how many requests wait before the first one that may begin with a node's state; None: none may.
        host: the states in host memory, if there is a tier of them.
    """

    def __init__(self, allocator: SlotAllocator, max_requests: int, least_gain: int = LEAST_GAIN) -> None:
        self.allocator, self.least_gain = allocator, least_gain
        self.own, self.at = np.zeros((2, max_requests), np.int32)
        self.kept: dict[int, Node] = {}
        self.host: HostStates | None = None
        self.next_use: Callable[[Node], int | None] = lambda node: None  # nobody waits
        # Of kept ones with which no lease has begun yet: of ends of answers, and those that were left for others.
        self.ends, self.unused = set[int](), set[int]()
        self.passed = set[int]()  # ends that one lease has gone on from, to a later end
        self.pending: deque[tuple[int, int]] = deque()  # after which pass, and which state
        self.fresh: dict[int, dict[int, int]] = {}  # by row, those that were left and not published, by position
        self.version = self.given_up_unused = 0
        self._num_begun = 0  # leases that have one of their own
        self._readers: Counter[int] = Counter()  # of kept and fresh states: rows whose next pass begins with it
        self._coming: list[int] = []  # what the coming pass reads of them

    @property
    def num_kept(self) -> int:
        """Nodes that have a state, in one tier or both."""
        on_host = () if self.host is None else tuple(self.host.kept.values())  # another thread may ask
        return len(self.kept) + sum(not node.state for node in on_host)

    def loads(self, node: Node) -> int:
        """How much a lease that begins with a node's state loads, in tokens: 0 where the device has it."""
        return self.host.tokens_each if self.host is not None and node.host_state and not node.state else 0

    def expect(self, node: Node | None) -> None:
        """Let no state that is stored take the place of the one that a lease is about to begin with."""
        if self.host is not None:
            self.host.expected = node

    def begin(self, row: int, node: Node, passes: tuple[int, int]) -> bool:
        """Let a new lease begin with a node's state, and have one of its own, for which another may have to go; as
        for one that is loaded, if only the host has the node's. False if there is none, at least until passes in
        flight have ended.
        """
        self.expect(node)
        self._readers[node.state] += 1  # which must not go
        reserved, loads = FOR_FRESH if self._num_begun else 0, self.loads(node) > 0
        # For the next one, too: what goes is free once passes have ended.
        self.make_room(2 + reserved + loads, passes)
        self._readers[node.state] -= 1
        self.expect(None)
        # What is loaded is read by the coming pass, and may go then: it takes what is reserved.
        own = self._taken() if self.allocator.num_free > max(reserved, int(loads)) else None
        if own is None:
            return False
        if loads:
            loaded = self._taken()
            assert self.host is not None  # it has the state
            assert loaded is not None  # there is room for both
            self.host.load(node, loaded)
            self.keep(loaded, node)
        self._readers[node.state] += 1
        self.own[row], self.at[row] = own, node.state
        self._num_begun += 1
        self.ends.discard(node.state)
        self.unused.discard(node.state)
        node.worth = PASSED if node.worth == END else SHARED
        (self.passed.add if node.worth == PASSED else self.passed.discard)(node.state)
        return True

    def step(self, row: int, keep_at: int | None, passes: tuple[int, int]) -> tuple[int, int]:
        """The states that a row of the coming pass begins with and leaves. With `keep_at`, the position where it
        ends, it leaves a fresh one, if there is any to be had.
        """
        before = int(self.at[row])
        if keep_at is not None:
            self.make_room(1, passes)
        after = fresh = self._taken() if keep_at is not None else None
        if after is None:
            after = int(self.own[row])
        self._has_read(row, before)
        self.at[row] = after
        if fresh is not None and keep_at is not None:
            self.fresh.setdefault(row, {})[keep_at] = fresh
            self._readers[fresh] += 1
        return before, after

    def step_each(self, rows: Int32Array) -> tuple[Int32Array, Int32Array]:
        """`step` of several rows `[n]`, none of which leaves a fresh state."""
        before, after = self.at[rows], self.own[rows]
        for place in np.flatnonzero(before != after):  # seldom: a row's first pass, or that after a fresh state
            self._has_read(int(rows[place]), int(before[place]))
        self.at[rows] = after
        return before, after

    def publish(self, row: int, position: int, node: Node, passes: tuple[int, int]) -> None:
        """Keep, at the node that ends at `position`, the fresh state that was left there, if one was; given up is
        what was left before, and what the node has already. `passes`: how many were launched, and have ended.
        """
        fresh = self.fresh.get(row)
        if fresh is None:
            return
        for at in [at for at in fresh if at <= position]:
            state = fresh.pop(at)
            if at == position and not node.state:
                self.keep(state, node)
                self.unused.add(state)
                node.worth = SHARED
            elif self.at[row] == state:  # its next pass needs it: it becomes the lease's own
                self._give_up(int(self.own[row]), passes)
                self._readers[state] -= 1
                self.own[row] = state
            else:
                self._give_up(state, passes)
        if not fresh:
            del self.fresh[row]

    def release(self, row: int, node: Node | None, passes: tuple[int, int], *, comes_back: bool = False) -> None:
        """Give up what a lease has; keep its own state at `node`, where all that it computed ends, if there is one
        without a state. `comes_back`: its request will go on from there.
        """
        own, at = int(self.own[row]), int(self.at[row])
        if at != own:
            self._readers[at] -= 1
        if node is not None and not node.state and node.parent is not None and at == own:
            self.keep(own, node)
            (self.unused if comes_back else self.ends).add(own)
            if not node.host_state:
                node.worth = SHARED if comes_back else END
        else:
            self._give_up(own, passes)
        for state in self.fresh.pop(row, {}).values():
            self._give_up(state, passes)
        self.own[row] = self.at[row] = NO_STATE
        self._num_begun -= 1

    def keep(self, state: int, node: Node) -> None:
        """Keep a state at a node on the device that has none there."""
        node.state = state
        self.kept[state] = node
        self.version += 1

    def drop(self, nodes: Iterable[Node], passes: tuple[int, int]) -> None:
        """Give up the states of nodes that have left a tier: those on the device of nodes that are not there, and
        those on the host of nodes that are in no tier.
        """
        for node in nodes:
            if node.state and node.slots[DEVICE] is None:
                self._forget(node, passes)
            if self.host is not None and node.host_state and not len(node.tokens):
                self.host.drop(node)
                self.version += 1

    def pass_launched(self) -> None:
        """What the coming pass reads need not be kept for it any more: it comes before all that overwrites it."""
        for state in self._coming:
            self._readers[state] -= 1
        self._coming.clear()

    def pass_ended(self, ended: int) -> None:
        """Free what waited for the passes up to number `ended`."""
        while self.pending and self.pending[0][0] <= ended:
            self._free(self.pending.popleft()[1])

    def make_room(self, count: int, passes: tuple[int, int], *, ends_only: bool = False) -> None:
        """Let `count` states be free, now or once passes in flight have ended, by giving up those that are needed
        least, as far as there are some. `ends_only`: ends of answers that nobody waits for, passed ones first.
        """
        missing = count - self.allocator.num_free - len(self.pending)
        if missing <= 0:
            return
        candidates = sorted(
            (state not in self.passed, state not in self.ends, self.kept[state].last_access, state)
            for state in (self.ends | self.passed if ends_only else self.kept)
            if not self._readers[state]
        )
        uses: dict[int, int] = {}  # by state, the next one
        for *_, state in candidates:
            use = self.next_use(self.kept[state])
            if use is not None:
                uses[state] = use
                continue
            self._forget(self.kept[state], passes)
            missing -= 1
            if not missing:
                return
        if not ends_only:
            soonest = min(uses.values(), default=0)
            worth = {state: self.kept[state].beyond_state / (1 + use - soonest) for state, use in uses.items()}
            # Where there are many, several at once: others that begin with the pass want some, too.
            for state in sorted(worth, key=worth.__getitem__)[: max(missing, len(worth) // AT_ONCE)]:
                self._forget(self.kept[state], passes)

    def figures(self) -> dict[str, int]:
        """Those of `CacheStats`, by their names there; another thread may look while this one works."""
        fresh = sum(map(len, tuple(self.fresh.values())))
        return {
            "state_capacity": self.allocator.capacity,
            "state_free": self.allocator.num_free,
            "state_own": self._num_begun + fresh,
            "state_kept": len(self.kept),
            "state_ends": len(self.ends),
            "state_unused": len(self.unused),
            "state_pending": len(self.pending),
            "states_given_up_unused": self.given_up_unused,
        }

    def _forget(self, node: Node, passes: tuple[int, int]) -> None:
        """Give up the state that is kept at a node, to the host if it takes it."""
        state = node.state
        if self.host is not None:
            self.host.store(node)
        node.state = NO_STATE
        del self.kept[state]
        self.version += 1
        self.given_up_unused += state in self.unused
        self.ends.discard(state)
        self.passed.discard(state)
        self.unused.discard(state)
        self._give_up(state, passes)

    def _taken(self) -> int | None:
        taken = self.allocator.alloc(1)
        return None if taken is None else int(taken[0])

    def _has_read(self, row: int, state: int) -> None:
        if state != self.own[row]:
            self._coming.append(state)

    def _give_up(self, state: int, passes: tuple[int, int]) -> None:
        # For all passes, also where the last one to use it has ended: else requests that begin together would each
        # take a state that others wait for, which finds half as much where there are few (fewshot in file order).
        launched, ended = passes
        if launched > ended:
            self.pending.append((launched, state))
        else:
            self._free(state)

    def _free(self, state: int) -> None:
        self.allocator.free(np.array([state], np.int32))


def states_of(num_states: int, max_requests: int) -> States | None:
    """So many states, beside the reserved one, for that many rows; None for 0."""
    return States(SlotAllocator(num_states + 1), max_requests) if num_states else None
