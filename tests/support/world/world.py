"""The engine, scheduler, cache and pools around a simulated device, and what has happened to them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.lease import Lease, Loan
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import DEVICE, HOST, Match, Namespace, Node
from radixrt.cache.snapshot import Adoption, TreeSnapshot, take_snapshot
from radixrt.cache.states import States
from radixrt.engine.driver import Driver
from radixrt.engine.engine import Engine
from radixrt.forms.matcher import Form
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking, Push
from radixrt.schedule.masks import PassForms
from radixrt.schedule.passes import PassResult
from radixrt.schedule.policy import SchedulePolicy, SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.request_table import MAX_STOPS
from radixrt.schedule.scheduler import Scheduler
from tests.support.world.drafts import Drafts
from tests.support.world.invariants import MAX_TIMES_SKIPPED, Invariants, require, total_len
from tests.support.world.model import POISON, VOCAB
from tests.support.world.runner import SimulatedRunner

MIN_STORE_TOKENS = 3


def address(tokens: np.ndarray) -> int:
    """Where tokens lie: what is looked up for a answer is its own."""
    return int(tokens.__array_interface__["data"][0])


@dataclass
class Sizes:
    num_slots: int = 48
    host_slots: int = 0  # 0: there is no host tier
    num_rows: int = 5
    context_len: int = 40
    max_running: int = 4
    max_samples: int = 6
    chunk: int = 6
    policy: SchedulePolicy = SchedulePolicy.LPM
    enabled: bool = True
    force_miss: bool = False
    max_in_flight: int = 1
    lanes: int = 1  # then as many passes are in flight
    max_forced_rows: int = Engine.max_forced_rows
    drafts: bool = False  # decodes verify drafts; only if none is in flight meanwhile
    families: bool = False  # walks submit prompts that begin with one another, together
    drops: bool = False  # some requests say how little of them later ones need
    forms: bool = False  # some answers have a form; not beside drafts
    max_ranked: int = 512
    spare_states: int | None = None  # of a model that keeps some: beside one for each row
    host_states: int = 4  # of such a model, with a host tier


class CheckedEngine:
    """A world as a driver sees it: everything is checked after each step."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler = world, world.scheduler

    @property
    def has_work(self) -> bool:
        return self.world.engine.has_work

    def step(self, aborts: Sequence[Answer] = (), launched: Callable[[], None] = lambda: None) -> list[Answer]:
        for answer in aborts:
            self.world.abort(answer)
        ended = self.world.step(launched)
        self.world.check()
        return ended

    def check_whole(self) -> None:
        self.world.engine.check_whole()

    def make_transfers(self) -> None:
        runner = self.world.runner
        runner.fail_transfer = None
        self.world.engine.make_transfers()
        while runner.transfers:
            runner.transfer_next()


@dataclass
class World:
    """Everything, and what has happened so far."""

    sizes: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        s = self.sizes
        self.rows = ReqToTokenPool(s.num_rows, s.context_len)
        self.slots = SlotAllocator(s.num_slots)
        self.host_slots = SlotAllocator(s.host_slots) if s.host_slots else None
        num_states = 0 if s.spare_states is None else s.num_rows + 1 + s.spare_states
        host_states = s.host_states if num_states and s.host_slots else 0
        self.cache = PrefixCache(
            self.rows,
            self.slots,
            host_slots=self.host_slots,
            min_store_tokens=MIN_STORE_TOKENS,
            enabled=s.enabled,
            force_miss=s.force_miss,
            states=None if s.spare_states is None else self._watched_states(num_states),
            host_states=self._watched_allocator(s.host_states, on_host=True) if host_states else None,
            tokens_each_state=3,
        )
        max_samples = max(s.max_samples, s.max_running)
        config = SchedulerConfig(
            s.max_running,
            s.chunk,
            max_samples,
            s.policy,
            max_ranked=s.max_ranked,
            max_times_skipped=MAX_TIMES_SKIPPED,
            least_scouted=2,
            num_lanes=s.lanes,
        )
        self.scheduler = Scheduler(self.cache, config)
        sizes = s.num_slots, s.host_slots, num_states, host_states
        self.runner = SimulatedRunner(self.rows, sizes, s.chunk, max_samples)
        self.engine = Engine(self.scheduler, self.runner, max_in_flight=s.max_in_flight * s.lanes)
        self.engine.max_forced_rows = s.max_forced_rows
        self.answers: list[Answer] = []
        self.events: Counter[str] = Counter()
        self.first_match: dict[int, int] = {}
        self.stateless_tokens = 0  # found in the tree by those that began, beyond the last state
        self.overtaken: Counter[int] = Counter()
        self._overtakers: list[tuple[Answer, Answer, bool]] = []  # of a step: who began, and before whom
        self.skipped: Counter[int] = Counter()  # tokens that another answer computed while this one waited again
        self._skips: dict[int, int] = {}  # the same, of requests that may yet be refused slots
        self.fail_alloc = False
        self.weights_version = 0  # of the namespaces that new requests get
        self.computed_with = {0: 0}  # the weights that prefixes of each version were computed with
        self.computed: dict[Lease, int] = {}  # positions known to be computed under each lease
        self.weights: dict[int, int] = {}  # the weights that each answer was submitted to
        self.prepared: list[Request] = []
        # With its KV and states, and the weights it is of.
        self.kept: tuple[TreeSnapshot, np.ndarray, np.ndarray, int] | None = None
        self.in_flight: deque[Booking] = deque()  # planned, and not booked yet
        self.invariants = Invariants(self)
        self.drafts = Drafts(self) if s.drafts else None
        self._aborted: list[Answer] = []  # since the last step
        self._observe()

    def _watched_states(self, count: int) -> States:
        """Those of a model."""
        allocator = self._watched_allocator(count, on_host=False)
        return States(allocator, self.rows.max_requests, least_gain=1)

    def _watched_allocator(self, count: int, *, on_host: bool) -> SlotAllocator:
        """Of states; whoever still reads a free one reads nonsense."""
        allocator = SlotAllocator(count)
        free = allocator.free

        def watched_free(freed: np.ndarray) -> None:
            free(freed)
            self.runner.freed(freed, self.cache.transfers.booked, of_states=True, on_host=on_host)

        allocator.free = watched_free
        return allocator

    def _observe(self) -> None:
        """Listen in on what the world cannot see from outside."""
        free, alloc = self.slots.free, self.slots.alloc
        acquire, evict, cut, insert = (
            self.cache.acquire, self.cache.tree.evict, self.cache.tree.cut, self.cache.tree.insert,
        )  # fmt: skip

        def watched_free(slots: np.ndarray) -> None:
            free(slots)
            self.runner.freed(slots, self.cache.transfers.booked, of_states=False, on_host=False)

        def watched_host_free(slots: np.ndarray) -> None:
            host_free(slots)
            self.runner.freed(slots, self.cache.transfers.booked, of_states=False, on_host=True)
            self.events["host eviction"] += bool(len(slots))

        def watched_alloc(count: int) -> np.ndarray | None:
            if self.fail_alloc and count:
                self.fail_alloc = False
                self.events["failed allocation"] += 1
                return None
            return alloc(count)

        def watched_acquire(
            namespace: Namespace, tokens: np.ndarray, match: Match, reserve: int, loan: Loan | None = None
        ) -> Lease | None:
            answer = next(r for r in self.scheduler.waiting if address(tokens) == address(r.tokens()))
            self.invariants.check_urgent(answer)
            limit = answer.match_limit
            found = self.cache.match(namespace, tokens, limit)
            require(
                "6: what an answer takes is what it would find",
                match == found,
                (answer.request.index, match, found),
            )
            stats, at_state = self.cache.stats(), match.at_state
            is_on_device = at_state.node.state > 0
            lease = acquire(namespace, tokens, match, reserve, loan)
            if lease is not None and self.cache.states is not None:
                require("20: a match ends where a state was kept", not lease.matched or bool(lease.node.state))
                is_whole = lease.matched == at_state.length
                require("20: what the device has is found", is_whole or not is_on_device)
                self.events["state dropped before it was loaded"] += not is_whole
                self.events["begins with a kept state"] += bool(lease.matched)
                self.stateless_tokens += found.length - at_state.length
                self.events["state loaded"] += self.cache.stats().state_loaded - stats.state_loaded
            if lease is not None:
                self._note_overtaken(answer)
                require("13: what is scored is computed", lease.matched <= limit)
                self.invariants.check_computed_once(namespace, tokens, limit, lease)
                self.runner.ends[lease], self.computed[lease] = lease.matched, lease.committed
                self.events["loan"] += loan is not None
                self.events["loan of a loan"] += loan is not None and loan.lender.lender is not None
                if answer.log.cached_tokens is not None:  # back from a retraction, others may have gone further
                    self._skips[id(answer)] = max(0, lease.matched - answer.launched_len)
                self.events["load"] += lease.loaded > 0
            return lease

        def watched_next_pass() -> Booking | None:
            booking = next_pass()
            self.runner.count(booking)
            if booking is not None and self.drafts is not None:
                self.runner.booking = booking = self.drafts.added_to(booking)
            if booking is not None:
                self._check_turns(booking)
                self.in_flight.append(booking)
            return booking

        def watched_next_victim(max_tokens: int, tier: int = DEVICE) -> Node | None:
            if tier == HOST:
                return next_victim(max_tokens, tier)
            leaves = [
                node
                for node, _ in self.invariants.nodes()
                if node.parent is not None and node.slots[DEVICE] is not None and not node.lock
                and all(child.slots[DEVICE] is None for child in node.children.values())
            ]  # fmt: skip
            node = next_victim(max_tokens)
            expected = min(leaves, key=lambda leaf: leaf.last_access, default=None)
            require("5: what was used longest ago leaves the device", node is expected)
            if node is not None and self.host_slots is not None:
                self.events["store" if node.slots[HOST] is None else "eviction of what the host has"] += 1
            return node

        def watched_evict(count: int, tier: int = DEVICE) -> np.ndarray:
            if tier == HOST:
                return watched_evict_from_host(count)
            out = evict(count)
            self.events["eviction"] += bool(len(out))
            return out

        def watched_cut(node: Node, at: int) -> Node:
            upper = cut(node, at)
            self.events["split"] += upper is not node
            return upper

        def watched_insert(node: Node, tokens: np.ndarray, slots: np.ndarray, *recency: int) -> object:
            on_host = self.cache.tree.host_only_tokens
            out = insert(node, tokens, slots, *recency)
            self.events["computed what the host has"] += self.cache.tree.host_only_tokens < on_host
            self.events["remap"] += bool(len(out[1]))
            return out

        if self.host_slots is not None:
            host_free = self.host_slots.free
            self.host_slots.free = watched_host_free

        def watched_evict_from_host(count: int) -> np.ndarray:
            used = {
                int(slot): node.last_access
                for node, _ in self.invariants.nodes()
                if node.slots[HOST] is not None
                for slot in node.slots[HOST]
            }
            expected = self._least_recent_on_host(count)
            out = evict(count, HOST)
            dropped = {used.get(slot) for slot in out.tolist()}  # leaves above one another may be equally old
            require("5: the host drops what was used longest ago", dropped == expected, (dropped, expected))
            return out

        def watched_process(booking: Booking, result: PassResult, push: Push = PassForms.push) -> list[Answer]:
            ends = booking.pass_.seq_lens
            for answer, end, good in zip(booking.answers, ends, result.finite, strict=True):
                if good and answer.lease is not None:
                    self.computed[answer.lease] = int(end)
            assert self.in_flight.popleft() is booking
            if self.drafts is not None:
                self.drafts.verified(booking, result)
            return process(booking, result, push)

        def watched_retract(answer: Answer) -> None:
            name = "11: the least urgent yields, and of these the latest"
            running = [(r.request.priority, r.arrival) for r in self.scheduler.running]
            require(name, (answer.request.priority, answer.arrival) == max(running), answer.request.index)
            self.events["urgent answer kept"] += answer.arrival < max(arrival for _, arrival in running)
            self._retract(answer)

        def watched_fail(booking: Booking, cause: Exception) -> list[Answer]:
            assert self.in_flight.popleft() is booking
            return fail(booking, cause)

        def watched_unlock(end: Node, reusable_len: int | None = None) -> np.ndarray:
            splits = self.events["split"]
            out = unlock(end, reusable_len)
            self.events["dropped in part" if self.events["split"] > splits else "dropped"] += bool(len(out))
            return out

        def watched_release(lease: Lease, reusable_len: int | None = None, **options: Any) -> None:
            self.events["end of a lender"] += any(one.lent_end > lease.committed for one in lease.borrowers)
            release(lease, reusable_len, **options)

        release, self.cache.release = self.cache.release, watched_release
        unlock = self.cache.tree.unlock
        self.cache.tree.unlock = watched_unlock
        process, fail = self.scheduler.process, self.scheduler.fail
        self.scheduler.process, self.scheduler.fail = watched_process, watched_fail
        self._retract, self.scheduler.retract = self.scheduler.retract, watched_retract
        next_pass, next_victim = self.scheduler.next_pass, self.cache.tree.next_victim
        self.scheduler.next_pass = watched_next_pass
        self.cache.tree.next_victim = watched_next_victim
        self.slots.free, self.slots.alloc = watched_free, watched_alloc
        self.cache.acquire = watched_acquire
        self.cache.tree.evict, self.cache.tree.cut = watched_evict, watched_cut
        self.cache.tree.insert = watched_insert

    def _check_turns(self, booking: Booking) -> None:
        """What a pass begins with and nobody knows yet is drawn by one pass in flight: as many passes before it as
        there are lanes, or the only one.
        """
        firsts = np.cumsum(booking.pass_.seq_lens - booking.pass_.prefix_lens) - 1
        for answer, token in zip(booking.answers, booking.pass_.input_ids[firsts].tolist(), strict=True):
            drawing = [
                len(self.in_flight) - k
                for k, before in enumerate(self.in_flight)
                if answer in before.answers and before.pass_.num_samples[before.answers.index(answer)]
            ]
            name = "lanes: a decode waits for one pass, and no other one waits for that"
            if token < 0:
                require(name, len(drawing) == 1, drawing)
                require(name, drawing[0] >= self.sizes.lanes or len(self.in_flight) == 1, drawing)
                self.events["decode of a token in flight"] += 1

    def _least_recent_on_host(self, count: int) -> set[int]:
        """When what the host is to drop for `count` tokens was last used, leaf by leaf."""
        held = [node for node, _ in self.invariants.nodes() if node.slots[HOST] is not None]
        out: set[int] = set()
        while count > 0 and held:
            leaves = [node for node in held if not any(child in held for child in node.children.values())]
            leaf = min(leaves, key=lambda node: node.last_access)
            held.remove(leaf)
            count -= len(leaf.tokens)
            out.add(leaf.last_access)
        return out

    # what can happen

    def namespace(self, tenant: str | None = None) -> Namespace:
        return Namespace(weights_version=self.weights_version, tenant=tenant)

    def request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 4,
        *,
        stop_ids: frozenset[int] = frozenset(),
        namespace: Namespace | None = None,
        n: int = 1,
        scored_from: int | None = None,
        priority: int = 0,
        yields: bool = False,
        form: Form | None = None,
    ) -> Request:
        """A request that nobody has submitted. Some want log-probabilities, some have many stop tokens, and some
        leave no more than a part of their prompt to others.
        """
        index = len(self.answers)
        if stop_ids and index % 5 == 3:
            stop_ids |= frozenset(range(VOCAB, VOCAB + MAX_STOPS))  # these are never sampled
        return Request(
            index=index,
            prompt_ids=np.array(prompt, dtype=np.int32),
            params=SamplingParams(
                max_new_tokens=max_new_tokens,
                n=n,
                logprobs=0 if index % 4 == 1 else None,
                prompt_logprobs=None if scored_from is None else 0,
                prompt_logprobs_start=scored_from or 0,
            ),
            max_new_tokens=min(max_new_tokens, self.sizes.context_len - len(prompt)),
            seed=1 + index,
            stop_ids=stop_ids,
            namespace=namespace or self.namespace(),
            reusable_len=index % (len(prompt) + 1) if self.sizes.drops and index % 3 == 2 else None,
            priority=priority,
            yields=yields,
            form=form,
        )

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 4,
        **options: Any,
    ) -> Answer | None:
        """Queue a request, made by `request`; None if it can never run."""
        return next(iter(self.submit_all([self.request(prompt, max_new_tokens, **options)])), None)

    def submit_all(self, requests: Sequence[Request], *, in_order: bool | None = None) -> list[Answer]:
        """Queue, as known together, those of the requests that can run."""
        able = [request for request in requests if self.scheduler.refusal(request) is None]
        self.events["refusal"] += len(requests) - len(able)
        if in_order is None:
            in_order = len(self.answers) % 5 == 3
        answers = self.engine.submit_all(able, in_order=in_order)
        for answer in answers:
            self.answers.append(answer)
            self.weights[id(answer)] = self.runner.weights
            self.events["n answers"] += answer.request.params.n > 1
            self.events["scored prompt"] += answer.request.params.prompt_logprobs is not None
        return answers

    def on_host(self) -> list[Answer]:
        """Requests of late whose tokens are, in part, on the host alone."""
        out = []
        for answer in self.answers[-40:]:
            namespace = self.namespace(answer.request.namespace.tenant)
            match = self.cache.match(namespace, answer.tokens(), answer.known_len - 1)
            if match.on_device.length < match.length:
                out.append(answer)
        return out

    def fork(self, answer: Answer, tails: Sequence[Sequence[int]], max_new_tokens: int, n: int = 1) -> None:
        """Branch an answer's history, however far it has come: its tokens so far, with each tail, all at once."""
        history = answer.tokens().tolist()
        self.events["fork"] += 1
        self.events["fork of a running answer"] += not answer.finished
        namespace = self.namespace(answer.request.namespace.tenant)
        self.submit_all(
            [self.request([*history, *tail], max_new_tokens, namespace=namespace, n=n) for tail in tails]
        )

    def update_weights(self, *, bump: bool = True, flush: bool = True) -> None:
        """Take other weights once all has run to its end. The new version and the flush do it each alone."""

        def swap() -> None:
            self.runner.weights += 1
            self.weights_version += bump
            if flush:
                self.cache.flush()
                self.computed_with = dict.fromkeys(range(self.weights_version + 1), self.runner.weights)
            else:
                self.computed_with[self.weights_version] = self.runner.weights
                self.prepared.clear()  # of a version whose prefixes are stale

        self.events["weights update"] += 1
        Driver(CheckedEngine(self), lambda answer: None).while_idle(swap)

    def save_cache(self) -> None:
        """Keep what is cached once all has run to its end, as a file would."""

        def save() -> None:
            snapshot, slots, states = take_snapshot(self.cache.tree, self.weights_version)
            require("kept: a snapshot is a tree of prefixes", snapshot.fault(VOCAB) is None, snapshot.fault(VOCAB))
            memory = self.runner.memory
            kv, of_states = memory.kv[np.maximum(slots, 0)], np.full(len(states), POISON, np.uint64)
            kv[slots < 0] = memory.host_kv[-slots[slots < 0]]
            of_states[states > 0] = memory.states[states[states > 0]]
            of_states[states < 0] = memory.host_states[-states[states < 0]]
            self.events["save from the host"] += bool((slots < 0).any())
            self.events["save of a state from the host"] += bool((states < 0).any())
            self.kept = snapshot, kv, of_states, self.computed_with[self.weights_version]

        self.events["save"] += 1
        Driver(CheckedEngine(self), lambda answer: None).while_idle(save)

    def load_cache(self, *, fails: bool = False) -> None:
        """Take what was kept, of the same weights, once all has run to its end; or find that its KV is damaged."""

        def load() -> None:
            assert self.kept is not None
            snapshot, kv, of_states, weights = self.kept
            if weights != self.runner.weights or weights != self.computed_with[self.weights_version]:
                return
            self.fail_alloc = False
            before, held = self.slots.num_free, self.cache.tree.device_tokens
            adoption = self.cache.begin_adoption(snapshot, self.weights_version)
            count = adoption.num_taken
            require("kept: slots by state add up", self.cache.stats().arriving == count)
            self.runner.kv[adoption.slots[adoption.slots > 0]] = kv[adoption.slots > 0]
            self.runner.states[adoption.states[adoption.states > 0]] = of_states[adoption.states > 0]
            if fails:
                self.cache.cancel_adoption(adoption)
                require("kept: what is given up leaves no trace", self.slots.num_free == before)
                require("kept: what is given up leaves no trace", self.cache.tree.device_tokens == held)
                return
            self.cache.adopt(adoption)
            require("kept: all that is taken is in the tree", self.cache.tree.device_tokens == held + count)
            require("kept: what is left out had no room", not adoption.left_out or not self.slots.num_free)
            self.events["load of a file"] += bool(count)
            self.events["load in part"] += bool(count and adoption.left_out)
            states = self.cache.states
            if states is not None:
                name = "kept: what is left out had no room"
                require(name, not adoption.left_out_states or adoption.left_out or not states.allocator.num_free)
            self.events["load of states"] += adoption.num_taken_states
            self._check_loaded(snapshot, adoption)

        Driver(CheckedEngine(self), lambda answer: None).while_idle(load)

    def _check_loaded(self, snapshot: TreeSnapshot, adoption: Adoption) -> None:
        """Every kept prefix is matched whole, but for the tokens that were left out, and likewise its states."""
        found = states = 0
        paths: list[np.ndarray] = []
        for i, (parent, own) in enumerate(zip(snapshot.parents, snapshot.parts(snapshot.tokens), strict=True)):
            paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
            namespace = self.namespace(snapshot.tenant_names[snapshot.tenants[i]])
            above = len(paths[i]) - len(own)
            match = self.cache.tree.match(namespace, paths[i])
            found += max(0, match.on_device.length - above)
            if snapshot.has_state[i] and self.cache.states is not None and match.at_boundary:
                states += match.length == len(paths[i]) and match.node.has_state
        left_out = adoption.left_out
        require("kept: a prefix is found", found == snapshot.num_tokens - left_out, (found, left_out))
        expected = snapshot.num_states - adoption.left_out_states
        require("kept: a state is found", states >= expected, (states, expected))

    def _note_overtaken(self, admitted: Answer) -> None:
        """Note who is the oldest of its priority, and whether that waits for what another one computes."""
        equals = [r for r in self.scheduler.waiting if r.request.priority == admitted.request.priority]
        oldest = min(equals, key=lambda one: one.arrival)
        if oldest.arrival < admitted.arrival:
            limit = oldest.match_limit
            match = self.cache.match(oldest.request.namespace, oldest.tokens(), limit)
            follows = self.cache.leader(match, oldest.tokens(), limit) is not None
            self._overtakers.append((admitted, oldest, follows))
            self.events["scout"] += self.scheduler.waiting.index(admitted) >= self.sizes.max_ranked

    def step(self, launched: Callable[[], None] = lambda: None) -> list[Answer]:
        num_launched, flying = self.cache.passes_launched, len(self.in_flight)
        had_work = self.engine.has_work
        self._skips.clear()
        waiting = list(self.scheduler.waiting)
        oldest: dict[int, Answer] = {}  # of each priority
        for answer in sorted(waiting, key=lambda one: one.arrival):
            oldest.setdefault(answer.request.priority, answer)
        aborted, self._aborted = self._aborted, []
        ended = self.engine.step(aborted, launched)
        require("8: an abort ends all answers", all(a.finished for r in aborted for a in r.family))
        known = {id(r) for r in self.answers}
        forked = [c for r in list(self.answers) for c in r.children if id(c) not in known]
        self.answers += forked
        self.weights.update((id(answer), self.weights[id(answer.parent)]) for answer in forked)
        self.events["first token drawn apart"] += sum(not answer.num_output for answer in forked)
        for answer in waiting:
            if answer.lease is not None:
                self.skipped[id(answer)] += self._skips.get(id(answer), 0)
            if answer.lease is not None and answer.log.cached_tokens is not None:
                self.first_match.setdefault(id(answer), answer.lease.matched)
        for admitted, overtaken, follows in self._overtakers:
            if overtaken in self.scheduler.waiting and admitted not in self.scheduler.waiting:
                self.overtaken[id(overtaken)] += not follows
                self.events["overtaken while it follows"] += follows
        self._overtakers.clear()
        for priority, first in oldest.items():
            if first in self.scheduler.waiting:
                self.events["less urgent admitted before"] += sum(
                    r.lease is not None and r.request.priority > priority for r in waiting
                )
        progress = self.cache.passes_launched > num_launched or bool(ended) or len(self.in_flight) < flying
        require("10: every step computes a token or ends an answer", progress or not had_work)
        for answer in ended:
            self.events[f"ended by {answer.log.finish_reason}"] += 1
        return ended

    def abort(self, answer: Answer) -> None:
        if any(answer in f.booking.answers for f in self.runner.in_flight) and not answer.finished:
            self.events["abort in flight"] += 1
        self._aborted.append(answer)

    def retract(self, answer: Answer) -> None:
        if answer in self.scheduler.running:
            self._retract(answer)

    def drain_requests(self) -> None:
        """Run until nothing is left to do; what is cached stays."""
        while self.engine.has_work:
            self.step()
            self.check()

    def drain(self) -> None:
        self.fail_alloc = False
        budget = 50 + 60 * sum(
            (total_len(r) + r.request.max_new_tokens) * r.request.params.n for r in self.answers if not r.finished
        )
        while self.engine.has_work:
            require("10: a run comes to its end", budget > 0)
            budget -= 1
            self.step()
            self.check()
        self.check_drained()

    def check(self) -> None:
        """Recompute every invariant from scratch. Raises Violation."""
        self.invariants.check()
        self.events["retraction"] = self.scheduler.num_retractions

    def check_drained(self) -> None:
        """The same of a world that has nothing left to do; forgets all that is cached."""
        self.invariants.check_drained()
