"""Where other engines keep the states of hybrid models: their rules, over a list of prompts, without any engine;
and the most that any rule can find.

What a model keeps of a prefix in its recurrent layers cannot be cut, so that a prompt is found in the cache up to
the deepest state that was kept on its path, as far as its KV is there, too. These are models of rules, not of
engines: everything that is not said here is to their advantage. KV that two requests compute at once counts once,
KV of answers is free when they end, and a state given up leaves its KV.
docs/lab-notebook/2026-11-26-states-where-prompts-part.md says where the rules are from.
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count

import numpy as np

from radixrt.arrays import Int64Array
from radixrt.limits import RunLimits
from radixrt.planning.batch_plan import BatchPlan

ROUNDS = 1000  # of `most_found`


class Rule:
    """What differs from engine to engine. `unit`: lengths of matches, and of what is published, are multiples."""

    unit = 1

    def branch(self, kv_match: int, state: int) -> int | None:
        """Where a request should leave a state that others want, if its KV matches further than to a state."""
        return None

    def chunk_end(self, start: int, budget: int, length: int, branch: int | None) -> int:
        """Where the chunk of a prompt ends that begins at `start`; there, if this pass can compute none of it."""
        return min(start + budget, length)

    def kept(self, start: int, end: int, length: int, branch: int | None) -> list[int]:
        """Positions in (start, end], ascending, of which a chunk leaves states. KV is published up to the last."""
        raise NotImplementedError

    def answer_states(self, length: int, growth: int) -> int:
        """States that an answer of `growth` computed tokens leaves, of which no other prompt has any use."""
        raise NotImplementedError


class RequestEnds(Rule):
    """SGLang, `no_buffer`: where a chunk ends, and where the answer ends."""

    def kept(self, start: int, end: int, length: int, branch: int | None) -> list[int]:
        return [end]

    def answer_states(self, length: int, growth: int) -> int:
        return int(growth > 0)


@dataclass
class Branches(Rule):
    """SGLang, `extra_buffer`: at the last multiple of `chunk` tokens in what a pass computes; or, instead of that,
    where the request parts from KV without a state, rounded down. In answers every `interval` tokens, of which the
    last one stays.
    """

    chunk: int = 64
    interval: int = 256

    def branch(self, kv_match: int, state: int) -> int | None:
        aligned = kv_match // self.chunk * self.chunk
        return aligned if aligned > state else None

    def kept(self, start: int, end: int, length: int, branch: int | None) -> list[int]:
        last = end // self.chunk * self.chunk
        if branch is not None and start < branch < last:
            last = branch
        return [last] if last > start else []

    def answer_states(self, length: int, growth: int) -> int:
        return int((length + growth) // self.interval > length // self.interval)


@dataclass
class Blocks(Rule):
    """vLLM, `align`: chunks end at multiples of the block, one of them at the prompt's last; at each of these ends
    there is a state, and in answers at each multiple.

    With `match_unit`, a chunk ends at the prompt's last multiple of that instead, and another one where a request
    parts from KV without a state (`prefix_match_unit`, with checkpoints where prefixes are shared).
    """

    block: int = 528
    match_unit: int | None = None

    def __post_init__(self) -> None:
        self.unit = self.match_unit or self.block

    def branch(self, kv_match: int, state: int) -> int | None:
        return kv_match if self.match_unit is not None and kv_match > state else None

    def chunk_end(self, start: int, budget: int, length: int, branch: int | None) -> int:
        last = length // self.unit * self.unit
        if start >= last:
            return min(start + budget, length)
        end = last if start + budget >= last else max(start, (start + budget) // self.block * self.block)
        return branch if branch is not None and start < branch < end else end

    def kept(self, start: int, end: int, length: int, branch: int | None) -> list[int]:
        return [end] if end % self.unit == 0 else []

    def answer_states(self, length: int, growth: int) -> int:
        return (length + growth) // self.block - length // self.block


@dataclass
class EveryBlock(Rule):
    """vLLM, `all`: at each multiple of the block."""

    block: int = 528

    def __post_init__(self) -> None:
        self.unit = self.block

    def kept(self, start: int, end: int, length: int, branch: int | None) -> list[int]:
        return list(range((start // self.block + 1) * self.block, end + 1, self.block))

    def answer_states(self, length: int, growth: int) -> int:
        return (length + growth) // self.block - length // self.block


@dataclass(eq=False)
class Running:
    """A request that was admitted: its path of nodes, each with its end, and how far it has come."""

    path: list[tuple[int, int]]
    length: int
    growth: int  # computed tokens of its answer
    done: int
    branch: int | None


def simulate(plan: BatchPlan, order: Int64Array, limits: RunLimits, rule: Rule) -> int:
    """Prompt tokens that are found in the cache, where the prompts run in this order, first come, first served.

    A pass computes up to `chunked_prefill_size` tokens of prompts, and one of each answer; what it leaves is found
    from the next pass on. A request is admitted once the pool holds what all running ones will have. Each of them
    has one of the states; the others are kept, and the least recently used go first. A match uses all on its path.

    Raises:
        ValueError: a request does not fit in the pool, or a block not in the budget.
    """
    asked, paths = plan.demands, paths_of(plan)
    cache = _Cache(limits.pool_tokens, limits.num_states)
    waiting, prefilling = deque(int(number) for number in order), deque[Running]()
    ends, numbers = list[tuple[int, int, Running]](), count()
    now = hits = 0
    while waiting or prefilling or ends:
        budget, chunks = limits.chunked_prefill_size, list[tuple[Running, int]]()
        for one in prefilling:
            end = rule.chunk_end(one.done, budget, one.length, one.branch) if budget else one.done
            if end > one.done:
                chunks.append((one, end))
                budget -= end - one.done
        while waiting and budget and len(prefilling) + len(ends) < limits.max_running_requests:
            number = waiting[0]
            path, length = paths[number], int(asked.lengths[number])
            growth = int(asked.new_tokens[number]) - 1
            kv, state = cache.match(path, int(asked.match_limits[number]), rule.unit)
            branch = rule.branch(kv, state)
            end = rule.chunk_end(state, budget, length, branch)
            if end == state or not cache.admit(path, growth):
                break
            waiting.popleft()
            hits += state
            one = Running(path, length, growth, state, branch)
            prefilling.append(one)
            chunks.append((one, end))
            budget -= end - state
        if not chunks and not ends:
            raise ValueError("a request does not fit in the pool, or a block not in the budget")
        now = now + 1 if chunks else max(now + 1, ends[0][0])
        for one, end in chunks:
            for position in rule.kept(one.done, end, one.length, one.branch):
                cache.publish(one.path, position, rule.unit)
            one.done = end
            if end == one.length:
                prefilling.remove(one)
                heapq.heappush(ends, (now + one.growth, next(numbers), one))
        while ends and ends[0][0] <= now:
            one = heapq.heappop(ends)[2]
            cache.release(one.path, one.growth, rule.answer_states(one.length, one.growth))
    return hits


def paths_of(plan: BatchPlan) -> dict[int, list[tuple[int, int]]]:
    """Of each prompt by its number: the nodes of its path and where they end, its own tokens included."""
    depth, parent = plan.tree.depth.tolist(), plan.tree.parent.tolist()
    paths = {}
    for place, (number, above) in enumerate(
        zip(plan.order.order.tolist(), plan.tree.leaf_parent.tolist(), strict=True)
    ):
        length, path = int(plan.store.lengths[number]), list[tuple[int, int]]()
        if length > depth[above]:
            path.append((len(depth) + place, length))
        while above > 0:
            path.append((above, depth[above]))
            above = parent[above]
        paths[number] = path[::-1]
    return paths


class _Cache:
    """KV of nodes, from their beginnings on, and states at positions of them."""

    def __init__(self, pool: int, num_states: int) -> None:
        self.pool, self.num_states = pool, num_states
        self.free = pool  # tokens that no node has and no running request will have
        self.have: dict[int, int] = {}  # by node, where its KV ends; a locked one counts with all of its tokens
        self.locks: dict[int, int] = {}
        self.children: dict[int, int] = {}  # by node, those that have KV or are locked
        self.above: dict[int, tuple[int, int, int]] = {}  # by node, its parent, where it begins, and where it ends
        self.used: dict[int, int] = {}
        self.running = self.clock = 0
        self.leaves: list[tuple[int, int]] = []  # a heap, by when they were last used
        self.states: OrderedDict[tuple[int, int], None] = OrderedDict()  # (node, position), last used last
        self.at: dict[int, set[int]] = {}  # by node, the positions of its states

    def match(self, path: list[tuple[int, int]], limit: int, unit: int) -> tuple[int, int]:
        """How far KV is there, and up to which state. What is used becomes the most recent."""
        kv = 0
        for node, end in path:
            kv = max(kv, self.have.get(node, 0))
            if kv < end:
                break
        kv = min(kv, limit) // unit * unit
        found = [(node, at) for node, _ in path for at in sorted(self.at.get(node, ())) if at <= kv]
        for state in found:
            self.states.move_to_end(state)
        return kv, found[-1][1] if found else 0

    def admit(self, path: list[tuple[int, int]], growth: int) -> bool:
        """Lock a path, and reserve memory for all of it and for an answer; False if there is not enough."""
        begin, own = 0, list[tuple[int, int, int]]()  # nodes that are not locked yet
        above = -1
        for node, end in path:
            self.above[node] = above, begin, end
            if not self.locks.get(node):
                own.append((node, begin, end))
            above, begin = node, end
        needed = growth + sum(end - max(begin, self.have.get(node, 0)) for node, begin, end in own)
        kept = {node for node, _, _ in own}
        if needed > self.free and needed > self.free + self._evictable(kept):
            return False
        for node, _ in path:
            self.locks[node] = self.locks.get(node, 0) + 1
        for node, begin, _ in own:
            if self.have.get(node, 0) <= begin:
                self.children[self.above[node][0]] = self.children.get(self.above[node][0], 0) + 1
                self.have[node] = begin
        self.free -= needed
        while self.free < 0:
            self._evict()
        self.running += 1
        self._drop_states()
        return True

    def publish(self, path: list[tuple[int, int]], position: int, unit: int) -> None:
        """Have KV up to a position, in whole units, and a state there."""
        above = 0
        for node, end in path:
            self.have[node] = max(self.have[node], min(end, position // unit * unit))
            if above < position <= end:
                self.at.setdefault(node, set()).add(position)
                self.states[node, position] = None
                self.states.move_to_end((node, position))
            above = end
        self._drop_states()

    def release(self, path: list[tuple[int, int]], growth: int, answer_states: int) -> None:
        """Unlock a path, and let an answer leave states."""
        self.free += growth
        self.running -= 1
        for node, end in reversed(path):
            self.clock += 1
            self.used[node] = self.clock  # of one path, what is deeper goes first
            self.locks[node] -= 1
            if not self.locks[node]:
                self.free += end - self.have[node]
                self._gone_if_empty(node)
                self._offer(node)
        for _ in range(answer_states):
            self.clock += 1
            self.states[-1, self.clock] = None
        self._drop_states()

    def _evictable(self, besides: set[int]) -> int:
        return sum(
            have - self.above[node][1]
            for node, have in self.have.items()
            if not self.locks.get(node) and node not in besides
        )

    def _offer(self, node: int) -> None:
        if node in self.have and not self.locks[node] and not self.children.get(node):
            heapq.heappush(self.leaves, (self.used[node], node))

    def _evict(self) -> None:
        used, node = heapq.heappop(self.leaves)
        if node not in self.have or self.locks[node] or self.children.get(node) or used != self.used[node]:
            return
        begin = self.above[node][1]
        tokens = min(-self.free, self.have[node] - begin)
        self.have[node] -= tokens
        self.free += tokens
        for at in [at for at in self.at.get(node, ()) if at > self.have[node]]:
            self._forget((node, at))
        self._gone_if_empty(node)
        self._offer(node)

    def _gone_if_empty(self, node: int) -> None:
        above, begin, _ = self.above[node]
        if self.have[node] <= begin:
            del self.have[node]
            self.children[above] -= 1
            if above >= 0 and above in self.used:
                self._offer(above)

    def _drop_states(self) -> None:
        while self.states and len(self.states) > self.num_states - self.running:
            self._forget(next(iter(self.states)))

    def _forget(self, state: tuple[int, int]) -> None:
        del self.states[state]
        if state[0] >= 0:
            self.at[state[0]].remove(state[1])


def most_found(plan: BatchPlan, order: Int64Array, num_kept: int) -> float:
    """The most prompt tokens that can be found, whatever is kept, by who knows all that comes.

    A request leaves states at all nodes of its path for nothing, and begins with one that was kept since the last
    request there. What is kept is a linear program: one of these for each request, and no more than `num_kept` of
    all while any request begins, its own included. Its dual, with a price for a place at each time, is an upper
    bound whatever the prices are. They go up where too much is kept, and down elsewhere.
    """
    paths, limits = paths_of(plan), plan.demands.match_limits
    before, uses = dict[int, int](), list[tuple[int, int, int]]()  # from which place to which; what it saves
    for place, number in enumerate(order.tolist()):
        for node, end in paths[number]:
            if node in before:
                uses.append((before[node], place, min(end, int(limits[number]))))
            before[node] = place
    if not uses:
        return 0.0
    first, last, saved = np.array(uses).T
    begins = np.flatnonzero(np.diff(last, prepend=-1))  # of what each request may begin with
    choices = np.diff(np.append(begins, len(uses)))
    prices, least = np.zeros(len(order)), np.inf
    for number in range(ROUNDS):
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        gains = saved - (paid[last + 1] - paid[first + 1])
        best = np.maximum.reduceat(gains, begins)
        least = min(least, np.maximum(best, 0).sum() + num_kept * prices.sum())
        chosen = np.flatnonzero((gains == np.repeat(best, choices)) & (gains > 0))
        chosen = chosen[np.unique(last[chosen], return_index=True)[1]]  # one each
        changes = np.bincount(first[chosen] + 1, minlength=len(order) + 1).astype(np.int64)
        changes -= np.bincount(last[chosen] + 1, minlength=len(order) + 1)
        excess = np.cumsum(changes)[:-1] - num_kept
        prices = np.maximum(0, prices + 3 / (1 + number / 50) * excess / num_kept)
    return float(least)


if __name__ == "__main__":
    sys.exit("this is a part of scripts/compare_state_rules.py: run that")
