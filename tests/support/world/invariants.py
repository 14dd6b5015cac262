"""What must hold in a world, recomputed from scratch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, cast

import numpy as np

from radixrt.cache.lease import Lease
from radixrt.cache.radix_tree import DEVICE, HOST, NO_MATCH, Namespace, Node
from radixrt.output import FinishReason
from radixrt.schedule.answer import Answer
from tests.support.world.model import continuation, histories, logprob_of, read_on, start_of

if TYPE_CHECKING:
    from tests.support.forms import RuleForm
    from tests.support.world.world import World

MAX_TIMES_SKIPPED = 6


class Violation(AssertionError):
    """An invariant does not hold; `name` says which."""

    def __init__(self, name: str, detail: object = "") -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def require(name: str, holds: bool, detail: object = "") -> None:
    if not holds:
        raise Violation(name, detail)


def allocated_len(answer: Answer) -> int:
    return 0 if answer.lease is None else answer.lease.allocated_len


def total_len(answer: Answer) -> int:
    """Known tokens, and sampled ones in flight: one follows the last position that has a slot."""
    return max(answer.known_len, min(allocated_len(answer) + 1, answer.request.max_len))


def is_extending(answer: Answer) -> bool:
    return allocated_len(answer) < answer.extend_len


class Invariants:
    """Those of one world. Each has the number that the design gives it, or a name."""

    def __init__(self, world: World) -> None:
        self.world = world

    def check(self) -> None:
        """Recompute every invariant from scratch. Raises Violation."""
        if self.world.runner.violation is not None:
            raise self.world.runner.violation
        nodes = self._check_tree()
        self._check_slots(nodes)
        self._check_leases()
        self._check_loans()
        self._check_states(nodes)
        self._check_host_states(nodes)
        self._check_answers()

    def nodes(self) -> list[tuple[Node, list[Node]]]:
        """Every node with its path from the root, the node itself last."""
        out, stack = [], [(root, [root]) for root in self.world.cache.tree.roots.values()]
        while stack:
            node, path = stack.pop()
            out.append((node, path))
            stack.extend((child, [*path, child]) for child in node.children.values())
        return out

    def _check_tree(self) -> list[tuple[Node, list[Node]]]:
        tree = self.world.cache.tree
        nodes = self.nodes()
        crossing: Counter[int] = Counter()
        for lease in self.world.cache.leases:
            node: Node | None = lease.node
            while node is not None:
                crossing[id(node)] += 1
                node = node.parent
        total = locked = host_only = 0
        queued = Counter(id(node) for *_, node in tree.leaves[DEVICE].heap)
        host_queued = Counter(id(node) for *_, node in tree.leaves[HOST].heap)
        kv, host_kv, *_ = self.world.runner.settled(self.world.cache.transfers.booked)
        for node, path in nodes:
            name = "3: nodes have a slot a token, siblings differ, parents agree"
            require(name, all(len(node.tokens) == len(s) for s in node.slots if s is not None))
            self._check_residency(node)
            require(name, (len(node.tokens) > 0) == (node.parent is not None))
            for first, child in node.children.items():
                require(name, child.parent is node and int(child.tokens[0]) == first)
                require(name, child.namespace == node.namespace)
            name = "4: locks and counters equal their recount"
            require(name, node.lock == crossing[id(node)], (node.lock, crossing[id(node)]))
            require(name, node.parent is None or node.parent.lock >= node.lock)
            on_device, on_host = node.slots[DEVICE] is not None, node.slots[HOST] is not None
            is_leaf = all(child.slots[DEVICE] is None for child in node.children.values())
            if node.parent is not None and on_device and is_leaf and not node.lock:
                require("5: every unlocked leaf waits for eviction", queued[id(node)] == 1)
            if on_host and all(child.slots[HOST] is None for child in node.children.values()):
                name = "5: every leaf of the host waits for eviction"
                require(name, host_queued[id(node)] == 1)
            require("5: a node waits for eviction once", max(queued[id(node)], host_queued[id(node)]) <= 1)
            total += len(node.tokens) if on_device else 0
            host_only += 0 if on_device else len(node.tokens)
            locked += len(node.tokens) if crossing[id(node)] else 0
            if node.parent is not None:
                tokens = np.concatenate([n.tokens for n in path])
                weights = self.world.computed_with.get(node.namespace.weights_version, 0)
                expected = histories(node.namespace, tokens, weights)[-len(node.tokens) :]
                for slots, tier in zip(node.slots, (kv, host_kv), strict=True):
                    held = expected if slots is None else [int(one) for one in tier[slots]]
                    require("6: what is in the tree is the KV of its path", held == expected)
        known = {id(node) for node, _ in nodes}
        require("4: every locked node is in the tree", all(i in known for i in crossing))
        counters = (tree.device_tokens, tree.locked_tokens, tree.host_only_tokens)
        require("4: locks and counters equal their recount", (total, locked, host_only) == counters)
        return nodes

    def _check_residency(self, node: Node) -> None:
        name = "16: a node is in a tier, and so is all of its path"
        if node.parent is None:
            require(name, node.slots[DEVICE] is not None and node.slots[HOST] is None)
        else:
            require(name, node.slots[DEVICE] is not None or node.slots[HOST] is not None)
            require(name, node.slots[DEVICE] is None or node.parent.slots[DEVICE] is not None)
        require("16: what is locked is on the device", not node.lock or node.slots[DEVICE] is not None)
        children = node.children.values()
        counted = (
            sum(child.slots[DEVICE] is not None for child in children),
            sum(child.slots[HOST] is not None for child in children),
        )
        name = "4: locks and counters equal their recount"
        require(name, counted == tuple(node.num_children), counted)

    def _check_slots(self, nodes: list[tuple[Node, list[Node]]]) -> None:
        tree = self.world.cache.tree
        groups: dict[str, list[int]] = {"reserved": [0], "free": self.world.slots.free_slots().tolist()}
        on_device = [node for node, _ in nodes if node.slots[DEVICE] is not None]
        groups["evictable"] = [int(s) for node in on_device if not node.lock for s in node.slots[DEVICE]]
        groups["locked"] = [int(s) for node in on_device if node.lock for s in node.slots[DEVICE]]
        groups["private"] = [
            int(s)
            for lease in self.world.cache.leases
            if not lease.released
            for s in self.world.rows.req_to_token[lease.row, lease.own_start : lease.allocated_len]
        ]
        groups["pending"] = [int(s) for pending in self.world.cache.pending for s in pending.slots]
        everything = [slot for group in groups.values() for slot in group]
        twice = [slot for slot, n in Counter(everything).items() if n > 1]
        where = {slot: [g for g, slots in groups.items() if slot in slots] for slot in twice[:3]}
        require("2: a slot has one owner", not twice, where)
        missing = set(range(self.world.sizes.num_slots)) - set(everything)
        require("1: the states cover the pool", not missing, sorted(missing)[:8])
        stats = self.world.cache.stats()
        require("4: statistics equal their recount", stats.arriving == 0)
        for name in ("free", "evictable", "locked", "private", "pending"):
            require("4: statistics equal their recount", getattr(stats, name) == len(groups[name]), name)
        self._check_host_slots(nodes)
        free = set(groups["free"])
        for lease in self.world.cache.leases:
            used = set(self.world.rows.req_to_token[lease.row, : lease.allocated_len].tolist())
            require("5: no slot of a live row is free", not used & free, used & free)
        for flight in self.world.runner.in_flight:
            for slots in flight.snapshots:
                require("5: no slot read by a pass in flight is free", not set(slots.tolist()) & free)
        for lease in self.world.cache.leases:
            path = tree.slots_of(lease.node)
            own = self.world.rows.req_to_token[lease.row, : lease.committed]
            require("5: a row's committed part is its locked path", np.array_equal(path, own))

    def _check_loans(self) -> None:
        """Who borrows and who lends are in the same pass, which is in flight, and name the same slots."""
        live = [lease for lease in self.world.cache.leases if not lease.released]
        rows = self.world.rows.req_to_token
        lent = Counter(id(lease) for lender in live for lease in lender.borrowers)
        require("18: a loan has two sides", all(lent[id(lease)] == (lease.lender is not None) for lease in live))
        require("18: a loan has two sides", sum(lent.values()) == sum(lease.lender is not None for lease in live))
        for lease in live:
            if (lender := lease.lender) is not None:
                name = "18: what is borrowed is computed by a pass in flight, with what follows it"
                require(name, not lender.released and lease in lender.borrowers and lender.begun == lease.begun)
                require(name, self.world.cache.passes_ended <= lease.begun, (lease.begun, lease.row))
                stretch = slice(lease.committed, lease.lent_end)
                same = np.array_equal(rows[lease.row, stretch], rows[lender.row, stretch])
                require("18: a borrowed position has the lender's slot", same, (lease.row, lender.row))
                require("18: what is lent has slots", lender.own_start < lease.lent_end <= lender.allocated_len)

    def _check_states(self, nodes: list[tuple[Node, list[Node]]]) -> None:
        """Each state is in one place, and a kept one is that of its node's path."""
        states, kept = self.world.cache.states, [node for node, _ in nodes if node.state]
        require("20: only such models have states", states is not None or not kept)
        if states is None:
            return
        leases = self.world.cache.leases
        rows = {lease.row for lease in leases}
        require("20: what was left and not published is a lease's", states.fresh.keys() <= rows)
        groups = {
            "reserved": [0],
            "free": states.allocator.free_slots().tolist(),
            "own": [int(states.own[lease.row]) for lease in leases],
            "fresh": [state for by_position in states.fresh.values() for state in by_position.values()],
            "kept": [node.state for node in kept],
            "pending": [state for _, state in states.pending],
        }
        everything = [state for group in groups.values() for state in group]
        twice = [state for state, n in Counter(everything).items() if n > 1]
        require("20: a state is in one place", not twice, (twice, groups))
        require("20: a state is in one place", len(everything) == states.allocator.capacity + 1, groups)
        stats = self.world.cache.stats()
        for name in ("free", "kept", "pending"):
            require(
                "4: statistics equal their recount", getattr(stats, f"state_{name}") == len(groups[name]), name
            )
        require("4: statistics equal their recount", stats.state_own == len(groups["own"]) + len(groups["fresh"]))
        require("4: statistics equal their recount", stats.state_capacity == len(everything) - 1)
        require("4: statistics equal their recount", stats.stateless_tokens == self.world.stateless_tokens)
        require("20: what is not used is kept", states.ends | states.unused <= states.kept.keys())
        require("20: an end is not where prompts part", not states.ends & states.unused)
        require("20: an end that was passed is kept", states.passed <= states.kept.keys() - states.ends)
        require("20: a kept state knows its node", states.kept == {node.state: node for node in kept})
        for lease in leases:
            at = int(states.at[lease.row])
            may = {states.own[lease.row], lease.node.state, *states.fresh.get(lease.row, {}).values()}
            may |= {node.state for node in self.world.cache.tree.path(lease.node)}
            require("20: a lease goes on from a state of its own path", at in may, (at, may))
        memory = self.world.runner.settled(self.world.cache.transfers.booked)
        for node, path in nodes:
            require("20: what has a state is on the device", not node.state or node.slots[DEVICE] is not None)
            if node.has_state:
                tokens = np.concatenate([one.tokens for one in path])
                weights = self.world.computed_with.get(node.namespace.weights_version, 0)
                read = start_of(node.namespace, weights)
                for kv in histories(node.namespace, tokens, weights):
                    read = read_on(read, kv)
                for tier, state in ((memory.states, node.state), (memory.host_states, node.host_state)):
                    name = "20: a kept state is that of its node's path"
                    require(name, not state or tier[state] == read, (state, len(tokens)))

    def _check_host_states(self, nodes: list[tuple[Node, list[Node]]]) -> None:
        """Each of the host's states is free or at one node of the tree."""
        states, stats = self.world.cache.states, self.world.cache.stats()
        kept = [node for node, _ in nodes if node.host_state]
        host = None if states is None else states.host
        if host is None:
            name = "20: without states on the host nothing is there"
            require(name, not kept and not any(one.of_states for one in self.world.cache.transfers.booked))
            require(name, stats.state_stored == stats.state_loaded == 0)
        else:
            require("20: a kept state knows its node", host.kept == {node.host_state: node for node in kept})
            everything = [0, *host.allocator.free_slots().tolist(), *host.kept]
            name = "20: a state is in one place"
            require(name, sorted(everything) == [*range(host.allocator.capacity + 1)], everything)
        name = "4: statistics equal their recount"
        require(name, stats.state_on_host == len(kept))
        require(name, stats.state_nodes == sum(node.has_state for node, _ in nodes))

    def _check_host_slots(self, nodes: list[tuple[Node, list[Node]]]) -> None:
        used = [int(s) for node, _ in nodes if node.slots[HOST] is not None for s in node.slots[HOST]]
        host, stats = self.world.host_slots, self.world.cache.stats()
        if host is None:
            require("1: without a host tier nothing is there", not used and not self.world.cache.transfers.booked)
            require("1: without a host tier nothing is there", stats.host_capacity == stats.stored_tokens == 0)
            return
        everything = [0, *host.free_slots().tolist(), *used]
        require("2: a host's slot has one owner", len(set(everything)) == len(everything))
        require("1: the states cover the host's pool", set(everything) == set(range(self.world.sizes.host_slots)))
        require(
            "4: statistics equal their recount", stats.host_tokens == len(used) == host.capacity - stats.host_free
        )

    def _check_leases(self) -> None:
        held = [r.lease for r in self.world.scheduler.running]
        active = sum(is_extending(r) or total_len(r) < r.request.max_len for r in self.world.scheduler.running)
        require("10: no more requests run than may", active <= self.world.sizes.max_running, active)
        require("8: a running answer holds a lease", all(le is not None and not le.released for le in held))
        live = [le for le in self.world.cache.leases if not le.released]
        require("8: every live lease is held by one answer", set(held) == set(live) and len(held) == len(live))
        pending = Counter(id(one.lease) for one in self.world.cache.pending if one.lease is not None)
        released = [le for le in self.world.cache.leases if le.released]
        require(
            "8: a released lease waits once",
            all(pending[id(le)] == 1 for le in released) and len(pending) == len(released),
        )
        rows = [le.row for le in self.world.cache.leases]
        require("2: a row has one owner", len(set(rows)) == len(rows))
        require("9: rows add up", self.world.rows.num_free + len(rows) == self.world.sizes.num_rows)
        for answer in self.world.scheduler.running:
            lease = answer.lease
            require(
                "8: progress is ordered",
                lease.committed <= answer.computed_len <= lease.allocated_len <= total_len(answer),
                answer,
            )
            name = "8: progress is what passes have made"
            require(name, lease.allocated_len == self.world.runner.ends[lease], answer)
            require(name, answer.computed_len == self.world.computed[lease], answer)

    def _check_answers(self) -> None:
        scheduler = self.world.scheduler
        places = [(r.request.priority, r.arrival) for r in scheduler.waiting]
        require("11: the queue is in order of priority, then of arrival", places == sorted(places))
        for index, count in self.world.overtaken.items():
            # The pass in which the limit is reached admits its whole batch before the limit shows.
            # Who computes states again leads until a state is there, which others of the same pass leave or drop.
            limit = MAX_TIMES_SKIPPED * (1 if self.world.cache.states is None else 2)
            require("11: overtaking is bounded", count <= limit, (index, count))
        prompt = cached = recomputed = 0
        for answer in self.world.answers:
            places = [answer.finished, answer in scheduler.waiting, answer in scheduler.running]
            require("8: an answer is in one place", places.count(True) == 1)
            require("8: only running requests hold a lease", (answer.lease is not None) == places[2])
            sampling = [
                n
                for booking in self.world.in_flight
                for r, n, end in zip(
                    booking.answers, booking.pass_.num_samples, booking.pass_.seq_lens, strict=True
                )
                if r is answer and n and end >= answer.known_len  # else its form has forced that token since
            ]
            name = "8: samples in flight are those of the passes in flight"
            if answer in scheduler.running:
                require(name, total_len(answer) - answer.known_len == len(sampling), answer)
            elif answer in scheduler.waiting and sampling:
                require(name, answer.resumable_after > self.world.cache.passes_ended, answer)
            out = answer.output_ids().tolist()
            full = continuation(
                answer.request.namespace,
                answer.request.prompt_ids,
                answer.request.max_new_tokens,
                answer.request.stop_ids,
                answer.sample_index,
                self.world.weights[id(answer)],
                form := cast("RuleForm | None", answer.request.form),
            )
            name = "12: output does not depend on caching, chunking, retraction or batching"
            require(name, out == full[: len(out)], (answer.request.index, out, full))
            if answer.log.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                require(name, out == full, (answer.request.index, out, full))
                stopped = bool(out) and out[-1] in answer.request.stop_ids
                stopped |= form is not None and bool(out) and not form.allowed(out)
                require(name, stopped == (answer.log.finish_reason is FinishReason.STOP))
            name = "13: log-probabilities are those of the answer, where they are asked for"
            asked = out if answer.request.params.logprobs is not None else []
            require(name, [t.token_id for t in answer.log.logprobs] == asked, answer.request.index)
            require(
                name, all(t.logprob == logprob_of(t.token_id) for t in answer.log.logprobs), answer.request.index
            )
            if answer.request.params.prompt_logprobs is not None and answer.parent is None:
                name = "13: each prompt token that is asked for is scored once"
                first = max(1, answer.request.params.prompt_logprobs_start)
                wanted = answer.request.prompt_ids[first:].tolist()
                got = [t.token_id for t in answer.log.prompt_logprobs]
                require(name, got == wanted[: len(got)], (answer.request.index, got, wanted))
                require(name, all(t.logprob == logprob_of(t.token_id) for t in answer.log.prompt_logprobs))
                if answer.log.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    require(name, got == wanted, (answer.request.index, got, wanted))
            if answer.parent is not None:
                require(
                    "13: an answer's prompt is counted once", answer.log.cached_tokens == answer.request.prompt_len
                )
                self._check_launched(answer)
                recomputed += answer.log.recomputed_tokens
                continue
            usage = answer.usage()
            name = "13: cached + computed = prompt, counted once"
            require(name, usage.cached_tokens + usage.computed_tokens == answer.request.prompt_len)
            require(name, 0 <= usage.cached_tokens < answer.request.prompt_len)
            if answer.log.cached_tokens is not None:
                prompt += answer.request.prompt_len
                cached += answer.log.cached_tokens
                recomputed += answer.log.recomputed_tokens
                if id(answer) in self.world.first_match:
                    require(
                        name, answer.log.cached_tokens == self.world.first_match[id(answer)], answer.request.index
                    )
                self._check_launched(answer)
        for answer in scheduler.waiting:
            self._check_match(answer)
        got = (self.world.cache.prompt_tokens, self.world.cache.cached_tokens, self.world.cache.recomputed_tokens)
        require("13: cached + computed = prompt, counted once", got == (prompt, cached, recomputed))

    def _check_launched(self, answer: Answer) -> None:
        launched = self.world.runner.tokens_launched[id(answer)] + self.world.skipped[id(answer)]
        launched_ever = max(answer.launched_len, allocated_len(answer))
        counted = launched_ever - answer.log.cached_tokens + answer.log.recomputed_tokens
        require(
            "13: what is launched is what is counted",
            launched == counted,
            (answer.request.index, launched, counted),
        )

    def _check_match(self, answer: Answer) -> None:
        tokens = answer.tokens()
        match = self.world.cache.match(answer.request.namespace, tokens, answer.match_limit)
        name = "6: a match is a prefix, in the same namespace, without the last token"
        require(name, match.length <= min(len(tokens) - 1, answer.match_limit))
        if answer.pending_match is not None:
            name = "6: what an answer expects to find is what it would find"
            expected = copy.copy(answer.pending_match)  # what it remembers stays as it is
            require(
                name, expected.length() == match.length, (answer.request.index, expected.length(), match.length)
            )
            usable = self.world.cache.usable(match).length
            require(name, expected.usable_length() == usable, (answer.request.index, usable))
            leader = self.world.cache.leader(match, tokens, answer.match_limit)
            require(name, expected.has_leader() == (leader is not None), answer.request.index)
        name = "6: a match is a prefix, in the same namespace, without the last token"
        if match.node is NO_MATCH.node:
            return
        require(name, match.node.namespace == answer.request.namespace)
        path = list(self.world.cache.tree.path(match.node))[::-1]
        above = np.concatenate([n.tokens for n in path[:-1]] or [np.zeros(0, np.int32)])
        reached = np.concatenate([above, match.node.tokens[: match.inside]])
        require(name, len(reached) == match.length and np.array_equal(reached, tokens[: match.length]))

    def check_urgent(self, admitted: Answer) -> None:
        """Who is more urgent than one that is about to be admitted has a leader, or tokens in flight."""
        cache = self.world.cache
        for answer in self.world.scheduler.waiting:
            if (
                answer.request.priority < admitted.request.priority
                and answer.resumable_after <= cache.passes_ended
            ):
                limit = answer.match_limit
                match = cache.match(answer.request.namespace, answer.tokens(), limit)
                leader = cache.leader(match, answer.tokens(), limit)
                name = "11: the more urgent are admitted first"
                require(name, leader is not None, (answer.request.index, admitted.request.index))

    def check_computed_once(self, namespace: Namespace, tokens: np.ndarray, limit: int, lease: Lease) -> None:
        if self.world.sizes.force_miss or not self.world.sizes.enabled or lease.matched >= limit:
            return
        if self.world.cache.states is not None:
            return  # what others have published is computed again from the last state on
        for other in self.world.cache.leases:  # those of the coming pass, too, whose answers do not run yet
            shared = lease.matched
            if (
                other is not lease
                and not other.released
                and other.node.namespace == namespace
                and other.committed <= shared < len(other.tokens)
                and np.array_equal(other.tokens[: shared + 1], tokens[: shared + 1])
            ):
                raise Violation("followers wait for what their leader computes", (other.row, shared))

    def check_drained(self) -> None:
        name = "9: after draining nothing is held, and evicting all leaves the pool whole"
        require(
            name,
            not self.world.cache.leases and not self.world.cache.in_flight and not self.world.cache.pending,
        )
        require(name, self.world.rows.num_free == self.world.sizes.num_rows)
        require(name, all(node.lock == 0 for node, _ in self.nodes()))
        require(name, not len(self.world.cache.frontiers))
        self.world.cache.flush()
        require(name, self.world.slots.num_free == self.world.slots.capacity and not self.world.cache.tree.roots)
        require(
            name, self.world.host_slots is None or self.world.host_slots.num_free == self.world.host_slots.capacity
        )
        states = self.world.cache.states
        for pool in (states, None if states is None else states.host):
            require(name, pool is None or pool.allocator.num_free == pool.allocator.capacity)
        require("8: every answer ends", all(r.finished for r in self.world.answers))
        self.check()
