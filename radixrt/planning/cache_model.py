"""A model of a run over a cache of limited size: one step a request, where the engine takes many passes.

The tree of the prompts is known beforehand, so that no tokens are compared. The model includes: admission in
order, within budget, number of requests and unreserved memory; followers that wait for their leader; prefixes
locked while requests run on them; eviction of the least recently used leaf, its tail first; answers that grow with
time, and remain as leaves or leave with all other tokens that no later prompt needs. It leaves out admission of
others while a follower waits, and publication of a long prompt chunk by chunk.

Where layers keep states, a prompt is found up to the last node with one, and waits for one that is left meanwhile.
It leaves some where prompts to come part from it, and where its own match ended beyond the last state.

A request locks the path from the root to the deepest node of its prompt, and touches it. Only that node is noted:
its ancestors are cached whenever it is, so that a step takes as long as the cached paths differ, however deep they
are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from radixrt.arrays import Float64Array, Int32Array, Int64Array
from radixrt.cache.states import FEWEST, LEAST_GAIN
from radixrt.hit_rate import CountsHits
from radixrt.limits import RunLimits
from radixrt.planning.demands import Demands
from radixrt.planning.kept_states import KeptStates
from radixrt.prefixes.order import PrefixOrder
from radixrt.prefixes.tree import PrefixTree

UNTIL_PUBLISHED = 2  # passes from the one that computes a prefix to the first that can admit requests with it
UNTIL_FREE = 3  # passes from a request's last one to the first that can use its memory: one is planned ahead


@dataclass(frozen=True)
class Timeline:
    """A run in S stretches with the same running requests, whose answers grow.

    Attributes:
        passes: `[S]` float64, passes of each stretch.
        running: `[S]` float64, running answers.
        distinct_tokens: `[S]` float64, KV tokens read in a pass on average, with shared tokens counted once.
        context_tokens: `[S]` float64, the same with shared tokens counted for each answer.
    """

    passes: Float64Array
    running: Float64Array
    distinct_tokens: Float64Array
    context_tokens: Float64Array


@dataclass(frozen=True)
class ModelledRun(CountsHits):
    """Expected hits and timeline of a run.

    Attributes:
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens found in the cache.
        found: `[N]` of these, those of each prompt, in the order of the run.
        timeline: the running answers over time.
    """

    prompt_tokens: int
    cached_tokens: int
    found: Int64Array
    timeline: Timeline


def model_run(
    order: PrefixOrder,
    tree: PrefixTree,
    demands: Demands,
    run: Int64Array,
    limits: RunLimits,
    keep: Int32Array | None = None,
) -> ModelledRun:
    """Model a run of N prompts, first come, first served.

    Args:
        order: of the prompts, in lexicographic order.
        tree: of that order.
        demands: of all prompts of the store.
        run: `[N]` the numbers of the prompts in the order in which they run.
        limits: of the run.
        keep: `[N]` leading tokens of the prompt at each place of `run` that later ones need; None: unknown.
    """
    place = np.zeros(len(demands.lengths), dtype=np.int64)
    place[order.order] = np.arange(len(order.order))
    # Several answers share the whole prompt.
    asked = demands[order.order]
    is_node = (asked.num_answers > 1) & (asked.lengths > tree.depth[tree.leaf_parent])
    tree = tree.with_leaves(np.flatnonzero(is_node), asked.lengths[is_node])
    asked = demands[run]
    above = tree.leaf_parent[place[run]].tolist()
    places = np.zeros(len(run), dtype=np.int64)
    places[place[run]] = np.arange(len(run))
    model = _Model(tree, limits, places)
    found = [
        model.run_all(*prompt)
        for prompt in zip(
            above,
            asked.lengths.tolist(),
            asked.match_limits.tolist(),
            asked.grown.tolist(),
            asked.num_answers.tolist(),
            [None] * len(run) if keep is None else keep.tolist(),
            strict=True,
        )
    ]
    model.finish()
    timeline = np.array(model.stretches, dtype=np.float64).reshape(-1, 4).T
    return ModelledRun(int(asked.lengths.sum()), sum(found), np.array(found, dtype=np.int64), Timeline(*timeline))


class _Model:
    """The state of a run. Nodes have the numbers of the tree; the leaf of an ended request gets the next one."""

    def __init__(self, tree: PrefixTree, limits: RunLimits, places: Int64Array) -> None:
        self.parent: list[int] = tree.parent.tolist()
        self.size: list[int] = tree.num_tokens.tolist()
        self.depth: list[int] = tree.depth.tolist()
        # The last node below each; nodes are numbered in the order of their first sequences.
        self.last: list[int] = (np.searchsorted(tree.begin, tree.end) - 1).tolist()
        self.have = [0] * len(tree)  # cached tokens of each node, its first ones; with any, its parent has all
        self.children = [0] * len(tree)  # cached children
        self.last_access = [0] * len(tree)  # its own; a child that goes hands its own on
        self.ready = [0] * len(tree)  # the first pass in which others find a node, never before its parent
        self.begun = [-1] * len(tree)  # the pass that computes it, where others may follow; -1: it takes several
        self.in_use: list[int] = []  # the deepest node of each running request, ascending
        self.evictable: list[tuple[int, int]] = []  # a heap of (last access, node), some of them outdated
        self.clock = 0
        self.capacity, self.budget = limits.pool_tokens, limits.chunked_prefill_size
        self.max_running = limits.max_running_requests
        self.cached = 0  # tokens that nodes have
        self.locked = 0  # of nodes
        self.own = 0  # tokens of running prompts outside nodes that have slots
        self.starting: list[tuple[int, int]] = []  # a heap: when further such tokens get slots, and how many
        self.promised = 0  # tokens that running requests will have outside nodes
        self.context = 0  # tokens of running prompts
        self.now = 0  # pass
        self.spent = 0  # of its budget
        self.sum_of_starts = 0  # passes in which the running requests began to decode
        # A heap by end: end, number, deepest node, length, own, growth, start, keep.
        self.running: list[tuple[int, int, int, int, int, int, int, int | None]] = []
        self.active: list[int] = []  # a heap: when each running request will have launched its last pass
        self.last_launch = 0  # the maximum of these
        self.stretches: list[tuple[float, int, float, float]] = []
        self.states = KeptStates(limits.num_states) if limits.num_states else None
        self.to_come: list[int] = (tree.end - tree.begin).tolist()  # prompts below each node that have not begun
        self.places = places  # in the run, of the prompts in lexicographic order, of which each node has a part
        self.part: list[tuple[int, int]] = [*zip(tree.begin.tolist(), tree.end.tolist(), strict=True)]
        self.places_below: dict[int, list[int]] = {}  # of nodes that have had a state, ascending

    def run_all(self, above: int, length: int, limit: int, growth: int, num_answers: int, keep: int | None) -> int:
        """Admit all answers to a prompt; see `run`. Returns the tokens of it found in the cache."""
        node = above
        while self.states is not None and node:
            self.to_come[node] -= 1
            if self.states.ready(node) is not None:
                self.states.use_next(node, self._next_use(node))
            node = self.parent[node]
        while_others_wait = None if keep is None else length
        many = num_answers > 1 and growth > 0  # an answer of one token ends with the first one's
        found = self.run(above, length, limit, growth, while_others_wait if many else keep)
        if many:
            if self.states is not None:
                self.states.leave(above, self.ready[above], self._next_use(above))
            # The others begin with the token that was drawn after the prompt.
            for left in range(num_answers - 2, -1, -1):
                self.run(above, length + 1, length, growth - 1, while_others_wait if left else keep)
        return found

    def run(self, above: int, length: int, limit: int, growth: int, keep: int | None) -> int:
        """Admit a request as soon as it fits. Returns its tokens found in the cache.

        Args:
            above: the deepest node of its prompt.
            length: tokens of its prompt.
            limit: leading tokens of its prompt that may come from the cache.
            growth: cached tokens of its answer.
            keep: leading tokens of its prompt that later requests need; None: unknown.
        """
        own = length - self.depth[above]
        if self.spent >= self.budget:
            self._pass_time(self.now + self.spent // self.budget, self.spent % self.budget)
        self._end_until(self.now)
        while self.running and not self._fits(above, own + growth):
            self._wait_for_memory()
        while len(self.active) >= self.max_running:
            self._end_until(self.active[0])
        missing = []
        node = above
        while node and not self.have[node]:
            missing.append(node)
            node = self.parent[node]
        found = min(limit, self.depth[node] - self.size[node] + self.have[node])
        leader = node
        if self.have[node] < self.size[node]:
            missing.append(node)
            leader = self.parent[node]
        while leader and self.depth[self.parent[leader]] >= limit:
            leader = self.parent[leader]
        first = self.now + self.spent // self.budget
        in_tree, follows = found, self.begun[leader] >= first
        ready = self.begun[leader] if follows else self.ready[leader]
        if self.states is not None:
            found, ready = self._up_to_a_state(self.states, leader, found, max(first, self.ready[leader]))
        self.spent += length - found
        last = self.now + (self.spent - 1) // self.budget
        start = max(last, ready)
        for node in missing:
            if not self.have[node]:
                self.children[self.parent[node]] += 1
            self.cached += self.size[node] - self.have[node]
            self.have[node] = self.size[node]
            self.ready[node] = start + UNTIL_PUBLISHED
            self.begun[node] = start if first == last else -1
        if self.states is not None:
            if in_tree - found >= LEAST_GAIN:
                self.states.leave(leader, start + UNTIL_PUBLISHED, self._next_use(leader))
            self._leave_for_others(self.states, above, found, start + UNTIL_PUBLISHED)
        self.clock += 1
        self.last_access[above] = self.clock
        at = bisect_left(self.in_use, above)
        self.locked += self.depth[above] - self._locked_depth(above, at)
        self.in_use.insert(at, above)
        heapq.heappush(self.starting, (start, own))
        self.promised += own + growth
        self.context += length
        self.sum_of_starts += start
        heapq.heappush(self.active, start + growth + 1)
        self.last_launch = max(self.last_launch, start + growth + 1)
        heapq.heappush(
            self.running, (start + growth + UNTIL_FREE, self.clock, above, length, own, growth, start, keep)
        )
        self._evict()
        return found

    def finish(self) -> None:
        """Let all that runs come to its end."""
        while self.running:
            self._wait_for_memory()

    def _up_to_a_state(self, states: KeptStates, node: int, limit: int, now: int) -> tuple[int, int]:
        """Tokens up to the last state on the path of `node`, at most `limit`, which a request of pass `now` uses,
        and the pass that it begins with: a later one, where a state that saves some is still to come.
        """
        last = coming = None
        while node and last is None:
            ready = states.ready(node)
            if ready is not None and ready <= now:
                last = node
            elif ready is not None and coming is None:
                coming = node
            if last is None:
                node = self.parent[node]
        if coming is not None and min(limit, self.depth[coming]) - self.depth[node] >= LEAST_GAIN:
            node, now = coming, states.ready(coming) or now
        return min(limit, self.depth[node]), now

    def _leave_for_others(self, states: KeptStates, node: int, found: int, ready: int) -> None:
        """Leave states where prompts to come part from one that begins after `found` tokens, and whose deepest
        node is `node`: see `Neighbours.partings`.
        """
        partings, further = list[tuple[int, int]](), 0
        while node and self.depth[node] > found:
            if self.to_come[node] > further:  # some part here
                further = self.to_come[node]
                partings.append((node, further))
            node = self.parent[node]
        for node, others in reversed(partings):
            if (self.depth[node] - found) * others >= LEAST_GAIN // 4 and self.depth[node] >= FEWEST:
                states.leave(node, ready, self._next_use(node))
                found = self.depth[node]
        states.make_room(len(self.active) + 1)

    def _next_use(self, node: int) -> int:
        """The place of the next prompt below a node; after all others, if there is none."""
        if not self.to_come[node]:
            return len(self.places)
        below = self.places_below.get(node)
        if below is None:
            below = self.places_below[node] = sorted(self.places[slice(*self.part[node])].tolist())
        return below[-self.to_come[node]]

    def _common(self, node: int, other: int) -> int:
        """The deepest common ancestor of two nodes."""
        while node != other:  # parents have smaller numbers
            if node > other:
                node = self.parent[node]
            else:
                other = self.parent[other]
        return node

    def _wait_for_memory(self) -> None:
        """Wait until a request ends, or, if no request has a pass left to launch, until all have ended."""
        end = self.running[0][0]
        if self.last_launch >= end:
            self._end_until(end)
            return
        self._end_until(max(self.now, self.last_launch))
        while self.running:
            self._end(*heapq.heappop(self.running)[2:])

    def _locked_depth(self, node: int, at: int) -> int:
        """Tokens from the root to `node` that requests in use hold; `at` is its place among them."""
        depth = 0
        for other in self.in_use[max(0, at - 1) : at + 1]:
            depth = max(depth, self.depth[self._common(node, other)])
        return depth

    def _is_locked(self, node: int) -> bool:
        at = bisect_left(self.in_use, node)
        return at < len(self.in_use) and self.in_use[at] <= self.last[node]

    def _fits(self, above: int, rest: int) -> bool:
        more = self.depth[above] - self._locked_depth(above, bisect_left(self.in_use, above))
        return self.locked + self.promised + rest + more <= self.capacity

    def _pass_time(self, now: int, spent: int = 0) -> None:
        passes = now - self.now
        count = len(self.running)
        if passes > 0 and count:
            growth = max(0.0, count * (self.now + now) / 2 - self.sum_of_starts)
            self.stretches.append((passes, count, self.locked + self.own + growth, self.context + growth))
        self.now, self.spent = now, spent
        self._evict()

    def _end_until(self, now: int) -> None:
        if now > self.now:
            self._pass_time(now)
        while self.active and self.active[0] <= now:
            heapq.heappop(self.active)
        while self.running and self.running[0][0] <= now:
            self._end(*heapq.heappop(self.running)[2:])

    def _end(self, above: int, length: int, own: int, growth: int, start: int, keep: int | None) -> None:
        self.own -= own
        self.promised -= own + growth
        self.context -= length
        self.sum_of_starts -= start
        self.clock += 1
        if keep is None and own + growth:
            self._leave_leaf(above, own + growth)
        self.last_access[above] = self.clock
        at = bisect_left(self.in_use, above)
        self.in_use.pop(at)
        locked_depth = self._locked_depth(above, at)
        self.locked -= self.depth[above] - locked_depth
        node = above
        while self.depth[node] > locked_depth and not self.children[node]:
            if keep is not None and self.depth[node] > keep:
                self._shrink(node, min(self.size[node], self.depth[node] - keep))
            if self.have[node]:
                heapq.heappush(self.evictable, (self.last_access[node], node))
                break
            node = self.parent[node]

    def _leave_leaf(self, above: int, size: int) -> None:
        heapq.heappush(self.evictable, (self.clock, len(self.have)))
        self.parent.append(above)
        self.have.append(size)
        self.children.append(0)
        self.last_access.append(self.clock)
        self.children[above] += 1
        self.cached += size

    def _shrink(self, node: int, by: int) -> None:
        self.have[node] -= by
        self.cached -= by
        if self.states is not None:
            self.states.drop(node)
        if not self.have[node]:
            above = self.parent[node]
            self.children[above] -= 1
            self.last_access[above] = max(self.last_access[above], self.last_access[node])

    def _evict(self) -> None:
        """Evict tokens beyond the capacity: the tails of the least recently used leaves."""
        while self.starting and self.starting[0][0] <= self.now:
            self.own += heapq.heappop(self.starting)[1]
        growth = max(0, len(self.running) * self.now - self.sum_of_starts)
        over = self.cached + self.own + growth - self.capacity
        while over > 0 and self.evictable:
            last_access, node = self.evictable[0]
            if self.children[node] or not self.have[node] or self._is_locked(node):
                heapq.heappop(self.evictable)
            elif last_access != self.last_access[node]:
                heapq.heapreplace(self.evictable, (self.last_access[node], node))
            else:
                by = min(over, self.have[node])
                self._shrink(node, by)
                over -= by
                if not self.have[node]:
                    heapq.heappop(self.evictable)
                    above = self.parent[node]
                    if not self.children[above] and not self._is_locked(above):
                        heapq.heappush(self.evictable, (self.last_access[above], above))
