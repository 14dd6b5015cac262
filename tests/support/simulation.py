"""A world without torch: the real engine, scheduler, cache and pools around a model that is a hash.

The KV of a slot is a hash of the weights and of everything read before it through the request's row, and the next
token depends on all that is read, so that one wrong or stale slot anywhere changes what comes out. Passes run at
a moment that the test chooses between launch and collection. `World.check` recomputes every invariant from
scratch.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.cache.radix_tree import NO_MATCH, Match, Namespace, Node
from radixrt.cache.snapshot import TreeSnapshot, take_snapshot
from radixrt.engine.driver import Driver
from radixrt.engine.engine import LAG, Engine
from radixrt.errors import DeviceLostError
from radixrt.output import FinishReason
from radixrt.sampling_params import SamplingParams
from radixrt.schedule import policy as policies
from radixrt.schedule.passes import Logprobs, Pass, PassResult
from radixrt.schedule.policy import SchedulePolicy
from radixrt.schedule.progress import MOST_STOPS
from radixrt.schedule.request import Request, RequestState
from radixrt.schedule.scheduler import Scheduler

VOCAB = 5
MASK = (1 << 64) - 1
POISON = 0xDEADDEADDEADDEAD
MAX_OVERTAKEN = 6
MIN_STORE_TOKENS = 3


class Violation(AssertionError):
    """An invariant does not hold; `name` says which."""

    def __init__(self, name: str, detail: object = "") -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def require(name: str, holds: bool, detail: object = "") -> None:
    if not holds:
        raise Violation(name, detail)


class SimulatedFailure(RuntimeError):
    """A pass that the test told to fail."""


# -- the model ---------------------------------------------------------------------------------------------


def _mix(value: int) -> int:
    value = (value ^ (value >> 31)) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 & MASK
    return value ^ (value >> 32)


def _start(namespace: Namespace, weights: int) -> int:
    return _mix(sum(map(ord, repr(namespace))) + 1 + weights * 0x10001)


def _read(read: int, kv: int) -> int:
    """What is known after one more position has been read."""
    return (read * 0x5851F42D4C957F2D + kv + 1) & MASK


def _kv(read: int, token: int) -> int:
    return _mix(read + 0x1000003 * (token + 1) & MASK)


def histories(namespace: Namespace, tokens: Sequence[int], weights: int = 0) -> list[int]:
    """The KV of each token, given all tokens before it."""
    read, out = _start(namespace, weights), []
    for token in tokens:
        out.append(_kv(read, int(token)))
        read = _read(read, out[-1])
    return out


def _draw(read: int, sample_index: int) -> int:
    return _mix(read + sample_index * 0x2545F491 & MASK) % VOCAB


def continuation(
    namespace: Namespace,
    prompt: Sequence[int],
    count: int,
    stop_ids: frozenset[int],
    sample_index: int = 0,
    weights: int = 0,
) -> list[int]:
    """What the model says after a prompt when nothing goes wrong."""
    tokens, read = list(map(int, prompt)), _start(namespace, weights)
    for kv in histories(namespace, tokens, weights):
        read = _read(read, kv)
    out: list[int] = []
    while len(out) < count:
        token = _draw(read, sample_index)
        out.append(token)
        if token in stop_ids:
            break
        read = _read(read, _kv(read, token))
    return out


# -- the device --------------------------------------------------------------------------------------------


@dataclass
class SimulatedPass:
    batch: Pass
    snapshots: list[np.ndarray]  # the slots that each request's row names when the pass is launched
    lines: list[np.ndarray]  # of `req_to_token`, that name the slots of each request's positions
    transfers: int  # that had been started before it, and come before it
    fails: bool = False
    poisoned: frozenset[int] = frozenset()
    result: PassResult | None = None
    error: Exception | None = None


def own_lines(batch: Pass) -> list[np.ndarray]:
    """Each request reads all by its own row."""
    return [np.full(end, row) for row, end in zip(batch.req_pool_indices, batch.seq_lens, strict=True)]


class SimulatedRunner:
    """Runs passes in order, each when the test says so, at the latest when it is collected.

    Transfers between the tiers are made in order too, beside the passes that were launched before them: when the
    test says so, at the latest before the pass that is launched next.
    """

    def __init__(
        self, rows: ReqToTokenPool, num_slots: int, num_host_slots: int, prefill_budget: int, max_samples: int
    ) -> None:
        self.host_rows = rows
        self.prefill_budget = prefill_budget
        self.max_samples = max_samples
        self.req_to_token = np.zeros_like(rows.req_to_token)
        self.kv = np.full(num_slots, POISON, dtype=np.uint64)
        self.host_kv = np.full(num_host_slots, POISON, dtype=np.uint64)
        self.transfers: deque[KVTransfer] = deque()  # started, not yet made
        self.transfers_started = self.transfers_made = 0
        self.stale: tuple[set[int], set[int]] = (
            set(),
            set(),
        )  # freed slots of device and host, still to be copied
        self.last_token = np.zeros(rows.max_requests, dtype=np.int32)
        self.queue: deque[SimulatedPass] = deque()  # launched, not yet run
        self.in_flight: deque[SimulatedPass] = deque()  # launched, not yet collected
        self.fail_launch = False
        self.fail_run = False
        self.fail_transfer: int | None = None  # transfers that are started before one fails
        self.poison_next = False
        self.pad_slot = 0
        self.weights = 0  # those that passes run with
        self.ends: dict[Lease, int] = {}  # positions launched, or found, of each lease that there was
        self.met: set[Lease] = set()  # those that were in a pass
        self.last_batch: Pass | None = None
        self.is_lost = False  # after the next pass that fails
        self.lines_of = own_lines  # how a pass reads: `SimulatedPass.lines`
        self.violation: Violation | None = None  # kept for `World.check`: the engine takes it for a failed pass
        self.tokens_launched: Counter[int] = Counter()

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        require("transfers: there are some", len(transfers) > 0)
        while transfers:
            if self.fail_transfer == 0:
                self.fail_transfer = None
                raise SimulatedFailure("transfer")
            transfer = transfers[0]
            targets = transfer.targets.tolist()
            name = "transfers: a target is named once"
            self._require(name, len(set(targets)) == len(targets) == len(transfer.sources) > 0)
            self.transfers.append(transfer)
            self.transfers_started += 1
            transfers.popleft()
            if self.fail_transfer is not None:
                self.fail_transfer -= 1

    def transfer_next(self) -> None:
        """Make the oldest transfer that has been started."""
        transfer = self.transfers.popleft()
        self.transfers_made += 1
        make(transfer, self.kv, self.host_kv)
        # Sources that were freed in the meantime are overwritten as soon as nobody is to copy them.
        sources = set(transfer.sources.tolist())
        stale, kv = self._side(transfer)
        still_read = {int(s) for t in self.transfers if t.to_host == transfer.to_host for s in t.sources}
        gone = sorted((sources & stale) - still_read)
        kv[gone] = POISON
        stale.difference_update(gone)

    def _side(self, transfer: KVTransfer) -> tuple[set[int], np.ndarray]:
        """Of a transfer's source: slots that are to be overwritten, and the KV."""
        return (self.stale[0], self.kv) if transfer.to_host else (self.stale[1], self.host_kv)

    def settled(self, booked: Sequence[KVTransfer]) -> tuple[np.ndarray, np.ndarray]:
        """What device and host will hold once all transfers are made, those that are only `booked` too."""
        kv, host_kv = self.kv.copy(), self.host_kv.copy()
        for transfer in (*self.transfers, *booked):
            make(transfer, kv, host_kv)
        return kv, host_kv

    def count(self, batch: Pass | None) -> None:
        """A pass that is about to be launched, whether that succeeds or not."""
        if batch is None:
            return
        before, self.last_batch = self.last_batch, batch
        if before is not None and batch.req_pool_indices is before.req_pool_indices:
            require("8: the same array of rows is of the same requests", batch.requests is before.requests)
            require("8: and of what they hold", batch.leases is before.leases)
        new = []
        for i, (request, lease) in enumerate(zip(batch.requests, batch.leases, strict=True)):
            start, end = int(batch.prefix_lens[i]), int(batch.seq_lens[i])
            self.tokens_launched[id(request)] += end - start
            if lease not in self.met:
                new.append((int(batch.req_pool_indices[i]), request))
            name = "8: positions are launched once, in order"
            require(name, start == self.ends[lease], (request.index, start, end))
            require("8: nothing is launched beyond the last token", end <= request.most_slots, request.index)
            require("8: a pass holds what its requests hold", request.lease is lease)
            self.ends[lease] = end
            self.met.add(lease)
        require(
            "8: a pass tells whom it has for the first time",
            sorted(batch.admitted, key=id_of) == sorted(new, key=id_of),
        )

    def launch(self, batch: Pass) -> SimulatedPass:
        extended = [
            int(end - start)
            for request, start, end in zip(batch.requests, batch.prefix_lens, batch.seq_lens, strict=True)
            if start < request.extend_end
        ]
        self._require("10: a pass keeps to its prefill budget", sum(extended) <= self.prefill_budget)
        samples = int(batch.num_samples.sum())
        self._require("10: a pass keeps to its limit of samples", samples <= self.max_samples, samples)
        lines = self._planned(batch)
        if self.fail_launch:
            self.fail_launch = False
            raise SimulatedFailure("launch")
        rows = self.host_rows.req_to_token
        snapshots = [rows[r, :n].copy() for r, n in zip(batch.req_pool_indices, batch.seq_lens, strict=True)]
        poisoned = frozenset([len(batch.requests) // 2]) if self.poison_next else frozenset()
        flight = SimulatedPass(batch, snapshots, lines, self.transfers_started, self.fail_run, poisoned)
        self.fail_run = self.poison_next = False
        self.queue.append(flight)
        self.in_flight.append(flight)
        return flight

    def collect(self, handle: SimulatedPass) -> PassResult:
        assert handle is self.in_flight[0], "passes are collected in order"
        while handle.result is None and handle.error is None:
            self.run_next()
        self.in_flight.popleft()
        if handle.error is not None:
            raise handle.error
        assert handle.result is not None
        return handle.result

    def check_device(self, error: Exception) -> None:
        if self.is_lost:
            raise DeviceLostError("the simulated device works no more") from error

    def _planned(self, batch: Pass) -> list[np.ndarray]:
        try:
            return self.lines_of(batch)
        except Violation as violation:
            self.violation = self.violation or violation
            raise
        except Exception as error:
            self.violation = self.violation or Violation("17: a plan is made", repr(error))
            raise

    def _require(self, name: str, holds: bool, detail: object = "") -> None:
        try:
            require(name, holds, detail)
        except Violation as violation:
            self.violation = self.violation or violation
            raise

    def run_next(self) -> None:
        flight = self.queue.popleft()
        while self.transfers_made < flight.transfers:
            self.transfer_next()
        batch = flight.batch
        changes = batch.row_changes
        cells = set(zip(changes.rows.tolist(), changes.positions.tolist(), strict=True))
        self._require("rows: no cell is changed twice in one pass", len(cells) == len(changes))
        self.req_to_token[changes.rows, changes.positions] = changes.slots
        if flight.fails:
            flight.error = SimulatedFailure("run")
            return
        sampled: list[int] = []
        asked: list[int] = []  # those of them whose log-probabilities are wanted
        finite = np.ones(len(batch.requests), dtype=bool)
        self.kv[self.pad_slot] = POISON  # what a padded row writes
        at = 0
        for i, request in enumerate(batch.requests):
            start, end = int(batch.prefix_lens[i]), int(batch.seq_lens[i])
            row = int(batch.req_pool_indices[i])
            read = _start(request.namespace, self.weights)
            history = []
            slots = self.req_to_token[flight.lines[i], np.arange(end)]
            name = "17: what is read for several is what each has on the device"
            self._require(name, np.array_equal(slots, self.req_to_token[row, :end]), request.index)
            for position, slot in enumerate(slots.tolist()):
                if position >= start:
                    token = int(batch.input_ids[at])
                    token = int(self.last_token[-token - 1]) if token < 0 else token
                    self._require("7: a new token is written where its row says", slot == batch.out_cache_loc[at])
                    bad = i in flight.poisoned and position == end - 1
                    self.kv[slot] = POISON + 1 if bad else _kv(read, token)
                    at += 1
                history.append(int(self.kv[slot]))
                read = _read(read, history[-1])
            known = request.tokens()[:end]
            if i in flight.poisoned:
                finite[i] = False
            elif not self._tainted(flight, i):
                expected = histories(request.namespace, known, self.weights)
                got = history[: len(known)]
                self._require(
                    "7: what is read is the KV of the own history", got == expected, (request.index, start, end)
                )
            draws = [_draw(read, request.sample_index + k) for k in range(batch.num_samples[i])]
            if draws:
                self.last_token[row] = draws[0]
            sampled += draws
            asked += draws if request.params.logprobs is not None else []
        flight.result = PassResult(
            np.array(sampled, dtype=np.int32),
            finite,
            _logprobs(asked) if asked else None,
            _logprobs(batch.scored_targets.tolist()),
        )

    def _tainted(self, flight: SimulatedPass, i: int) -> bool:
        """Whether an earlier pass that this one builds on failed; its result will be thrown away."""
        request = flight.batch.requests[i]
        for earlier in self.in_flight:
            if earlier is flight:
                break
            if request in earlier.batch.requests and (
                earlier.error is not None or earlier.batch.requests.index(request) in earlier.poisoned
            ):
                return True
        return request.finish_reason is FinishReason.ERROR


def _logprob(token: int) -> np.float32:
    """A log-probability that tells which token it is of."""
    return np.float32(_mix(token + 1))


def _logprobs(tokens: Sequence[int]) -> Logprobs:
    return Logprobs(
        np.array([_logprob(token) for token in tokens], dtype=np.float32),
        np.ones(len(tokens), np.int32),
        np.zeros((len(tokens), 0), np.int32),
        np.zeros((len(tokens), 0), np.float32),
    )


def address(tokens: np.ndarray) -> int:
    """Where tokens lie: what is looked up for a request is its own."""
    return int(tokens.__array_interface__["data"][0])


def id_of(admitted: tuple[int, Request]) -> tuple[int, int]:
    return admitted[0], id(admitted[1])


def make(transfer: KVTransfer, kv: np.ndarray, host_kv: np.ndarray) -> None:
    if transfer.to_host:
        host_kv[transfer.host_slots] = kv[transfer.device_slots]
    else:
        kv[transfer.device_slots] = host_kv[transfer.host_slots]


# -- the world ---------------------------------------------------------------------------------------------


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
    lag: int = LAG
    drops: bool = False  # some requests say how little of them later ones need


class CheckedEngine:
    """A world as a driver sees it: everything is checked after each step."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def has_work(self) -> bool:
        return self.world.engine.has_work

    def step(self) -> list[Request]:
        ended = self.world.step()
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
        policies.MAX_OVERTAKEN = MAX_OVERTAKEN
        self.rows = ReqToTokenPool(s.num_rows, s.context_len)
        self.slots = SlotAllocator(s.num_slots)
        self.host_slots = SlotAllocator(s.host_slots) if s.host_slots else None
        self.cache = PrefixCache(
            self.rows,
            self.slots,
            host_slots=self.host_slots,
            min_store_tokens=MIN_STORE_TOKENS,
            enabled=s.enabled,
            force_miss=s.force_miss,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_running_requests=s.max_running,
            chunked_prefill_size=s.chunk,
            policy=s.policy,
            max_samples_per_pass=max(s.max_samples, s.max_running),
        )
        self.runner = SimulatedRunner(
            self.rows, s.num_slots, s.host_slots, s.chunk, self.scheduler.max_samples_per_pass
        )
        self.engine = Engine(self.scheduler, self.runner, lag=s.lag)
        self.requests: list[Request] = []
        self.events: Counter[str] = Counter()
        self.first_match: dict[int, int] = {}
        self.overtaken: Counter[int] = Counter()
        self.skipped: Counter[int] = Counter()  # tokens that another request computed while this one waited again
        self._skips: dict[int, int] = {}  # the same, of requests that may yet be refused slots
        self.fail_alloc = False
        self.weights_version = 0  # of the namespaces that new requests get
        self.computed_with = {0: 0}  # the weights that prefixes of each version were computed with
        self.computed: dict[Lease, int] = {}  # positions known to be computed under each lease
        self.weights: dict[int, int] = {}  # the weights that each request was submitted to
        self.prepared: list[Request] = []
        self.kept: tuple[TreeSnapshot, np.ndarray, int] | None = None  # with its KV, and the weights it is of
        self._aborted: list[Request] = []  # since the last step
        self._observe()

    def _observe(self) -> None:
        """Listen in on what the world cannot see from outside."""
        free, alloc = self.slots.free, self.slots.alloc
        acquire, evict, split, insert = (
            self.cache.acquire, self.cache.tree.evict, self.cache.tree._split, self.cache.tree.insert,
        )  # fmt: skip

        def watched_free(slots: np.ndarray) -> None:
            free(slots)
            self._overwrite(slots, to_host=True)

        def watched_host_free(slots: np.ndarray) -> None:
            host_free(slots)
            self._overwrite(slots, to_host=False)
            self.events["host eviction"] += bool(len(slots))

        def watched_alloc(count: int) -> np.ndarray | None:
            if self.fail_alloc and count:
                self.fail_alloc = False
                self.events["failed allocation"] += 1
                return None
            return alloc(count)

        def watched_acquire(namespace: Namespace, tokens: np.ndarray, match: Match, reserve: int) -> Lease | None:
            request = next(r for r in self.scheduler.waiting if address(tokens) == address(r.tokens()))
            limit = request.match_limit
            found = self.cache.match(namespace, tokens, limit)
            require("6: what a request takes is what it would find", match == found, (request.index, match, found))
            lease = acquire(namespace, tokens, match, reserve)
            if lease is not None:
                require("13: what is scored is computed", lease.matched <= limit)
                self._check_computed_once(namespace, tokens, limit, lease)
                self.runner.ends[lease] = self.computed[lease] = lease.matched
                if request.cached_tokens is not None:  # back from a retraction, others may have gone further
                    self._skips[id(request)] = max(0, lease.matched - request.launched_ever)
                self.events["load"] += lease.loaded > 0
            return lease

        def watched_next_pass() -> Pass | None:
            batch = next_pass()
            self.runner.count(batch)
            return batch

        def watched_next_victim(max_tokens: int) -> Node | None:
            leaves = [
                node
                for node, _ in self._nodes()
                if node.parent is not None and node.slots is not None and not node.lock
                and all(child.slots is None for child in node.children.values())
            ]  # fmt: skip
            node = next_victim(max_tokens)
            expected = min(leaves, key=lambda leaf: leaf.last_access, default=None)
            require("5: what was used longest ago leaves the device", node is expected)
            if node is not None and self.host_slots is not None:
                self.events["store" if node.host_slots is None else "eviction of what the host has"] += 1
            return node

        def watched_evict(count: int) -> np.ndarray:
            out = evict(count)
            self.events["eviction"] += bool(len(out))
            return out

        def watched_split(node: Node, at: int) -> Node:
            self.events["split"] += 1
            return split(node, at)

        def watched_insert(node: Node, tokens: np.ndarray, slots: np.ndarray, *recency: int) -> object:
            on_host = self.cache.tree.host_only_tokens
            out = insert(node, tokens, slots, *recency)
            self.events["computed what the host has"] += self.cache.tree.host_only_tokens < on_host
            self.events["remap"] += bool(len(out.canonical))
            return out

        if self.host_slots is not None:
            host_free = self.host_slots.free
            self.host_slots.free = watched_host_free

        def watched_evict_from_host(count: int) -> np.ndarray:
            used = {
                int(slot): node.last_access
                for node, _ in self._nodes()
                if node.host_slots is not None
                for slot in node.host_slots
            }
            expected = self._least_recent_on_host(count)
            out = evict_from_host(count)
            dropped = {used.get(slot) for slot in out.tolist()}  # leaves above one another may be equally old
            require("5: the host drops what was used longest ago", dropped == expected, (dropped, expected))
            return out

        def watched_process(batch: Pass, result: PassResult) -> list[Request]:
            for request, lease, end, good in zip(
                batch.requests, batch.leases, batch.seq_lens, result.finite, strict=True
            ):
                if good and request.lease is lease:
                    self.computed[lease] = int(end)
            return process(batch, result)

        def watched_unlock(end: Node, reusable_len: int | None = None) -> np.ndarray:
            splits = self.events["split"]
            out = unlock(end, reusable_len)
            self.events["dropped in part" if self.events["split"] > splits else "dropped"] += bool(len(out))
            return out

        unlock = self.cache.tree.unlock
        self.cache.tree.unlock = watched_unlock
        process = self.scheduler.process
        self.scheduler.process = watched_process
        evict_from_host = self.cache.tree.evict_from_host
        self.cache.tree.evict_from_host = watched_evict_from_host
        next_pass, next_victim = self.scheduler.next_pass, self.cache.tree.next_victim
        self.scheduler.next_pass = watched_next_pass
        self.cache.tree.next_victim = watched_next_victim
        self.slots.free, self.slots.alloc = watched_free, watched_alloc
        self.cache.acquire = watched_acquire
        self.cache.tree.evict, self.cache.tree._split = watched_evict, watched_split
        self.cache.tree.insert = watched_insert

    def _least_recent_on_host(self, count: int) -> set[int]:
        """When what the host is to drop for `count` tokens was last used, leaf by leaf."""
        held = [node for node, _ in self._nodes() if node.host_slots is not None]
        out: set[int] = set()
        while count > 0 and held:
            leaves = [node for node in held if not any(child in held for child in node.children.values())]
            leaf = min(leaves, key=lambda node: node.last_access)
            held.remove(leaf)
            count -= len(leaf.tokens)
            out.add(leaf.last_access)
        return out

    def _overwrite(self, slots: np.ndarray, *, to_host: bool) -> None:
        """Whoever still reads a free slot reads nonsense; transfers that are booked may read it yet."""
        started, booked = self.runner.transfers, self.cache.transfers.pending()
        read = {int(s) for t in (*started, *booked) if t.to_host == to_host for s in t.sources}
        stale, kv = (
            (self.runner.stale[0], self.runner.kv) if to_host else (self.runner.stale[1], self.runner.host_kv)
        )
        for slot in slots.tolist():
            if slot in read:
                stale.add(slot)
            else:
                kv[slot] = POISON

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
    ) -> Request:
        """A request that nobody has submitted. Some want log-probabilities, some have many stop tokens, and some
        leave no more than a part of their prompt to others.
        """
        index = len(self.requests)
        if stop_ids and index % 5 == 3:
            stop_ids |= frozenset(range(VOCAB, VOCAB + MOST_STOPS))  # these are never sampled
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
            seed=0,
            stop_ids=stop_ids,
            namespace=namespace or self.namespace(),
            keep=index % (len(prompt) + 1) if self.sizes.drops and index % 3 == 2 else None,
        )

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 4,
        *,
        stop_ids: frozenset[int] = frozenset(),
        namespace: Namespace | None = None,
        n: int = 1,
        scored_from: int | None = None,
    ) -> Request:
        request = self.request(
            prompt, max_new_tokens, stop_ids=stop_ids, namespace=namespace, n=n, scored_from=scored_from
        )
        self.submit_all([request])
        return request

    def submit_all(self, requests: Sequence[Request], *, in_order: bool | None = None) -> None:
        """Queue, as known together, those of the requests that can run."""
        able = [request for request in requests if self.scheduler.refusal(request) is None]
        self.events["refusal"] += len(requests) - len(able)
        if in_order is None:
            in_order = len(self.requests) % 5 == 3
        self.engine.submit_all(able, in_order=in_order)
        for request in able:
            self.requests.append(request)
            self.weights[id(request)] = self.runner.weights
            self.events["n answers"] += request.params.n > 1
            self.events["scored prompt"] += request.params.prompt_logprobs is not None

    def on_host(self) -> list[Request]:
        """Requests of late whose tokens are, in part, on the host alone."""
        out = []
        for request in self.requests[-40:]:
            namespace = self.namespace(request.namespace.tenant)
            match = self.cache.match(namespace, request.tokens(), request.num_known - 1)
            if match.on_device.length < match.length:
                out.append(request)
        return out

    def fork(self, request: Request, tails: Sequence[Sequence[int]], max_new_tokens: int, n: int = 1) -> None:
        """Branch a request's history, however far it has come: its tokens so far, with each tail, all at once."""
        history = request.tokens().tolist()
        self.events["fork"] += 1
        self.events["fork of a running request"] += not request.finished
        namespace = self.namespace(request.namespace.tenant)
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
        Driver(CheckedEngine(self), lambda request: None).while_idle(swap)

    def save_cache(self) -> None:
        """Keep what is cached once all has run to its end, as a file would."""

        def save() -> None:
            snapshot, slots = take_snapshot(self.cache.tree, self.weights_version)
            require("kept: a snapshot is a tree of prefixes", snapshot.fault(VOCAB) is None, snapshot.fault(VOCAB))
            kv = self.runner.kv[np.maximum(slots, 0)]
            kv[slots < 0] = self.runner.host_kv[-slots[slots < 0]]
            self.events["save from the host"] += bool((slots < 0).any())
            self.kept = snapshot, kv, self.computed_with[self.weights_version]

        self.events["save"] += 1
        Driver(CheckedEngine(self), lambda request: None).while_idle(save)

    def load_cache(self, *, fails: bool = False) -> None:
        """Take what was kept, of the same weights, once all has run to its end; or find that its KV is damaged."""

        def load() -> None:
            assert self.kept is not None
            snapshot, kv, weights = self.kept
            if weights != self.runner.weights or weights != self.computed_with[self.weights_version]:
                return
            self.fail_alloc = False
            before, held = self.slots.num_free, self.cache.tree.device_tokens
            adoption = self.cache.begin_adoption(snapshot, self.weights_version)
            count = int(adoption.taken.sum())
            require("kept: slots by state add up", self.cache.stats().arriving == count)
            self.runner.kv[adoption.slots[adoption.slots > 0]] = kv[adoption.slots > 0]
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
            self._check_loaded(snapshot, adoption.left_out)

        Driver(CheckedEngine(self), lambda request: None).while_idle(load)

    def _check_loaded(self, snapshot: TreeSnapshot, left_out: int) -> None:
        """Every kept prefix is matched whole, but for the tokens that were left out."""
        starts, found = snapshot.starts(), 0
        paths: list[np.ndarray] = []
        for i, parent in enumerate(snapshot.parents):
            own = snapshot.tokens[starts[i] : starts[i] + snapshot.lengths[i]]
            paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
            namespace = self.namespace(snapshot.tenant_names[snapshot.tenants[i]])
            above = len(paths[i]) - len(own)
            found += max(0, self.cache.tree.match(namespace, paths[i]).on_device.length - above)
        require("kept: a prefix is found", found == snapshot.num_tokens - left_out, (found, left_out))

    def step(self) -> list[Request]:
        launched, flying = self.cache.passes_launched, len(self.engine._in_flight)
        had_work = self.engine.has_work
        self._skips.clear()
        oldest = self.scheduler.waiting[0] if self.scheduler.waiting else None
        waiting = list(self.scheduler.waiting)
        aborted, self._aborted = self._aborted, []
        ended = self.engine.step()
        require("8: an abort ends all answers", all(a.finished for r in aborted for a in r.family))
        known = {id(r) for r in self.requests}
        answers = [c for r in list(self.requests) for c in r.children if id(c) not in known]
        self.requests += answers
        self.weights.update((id(answer), self.weights[id(answer.parent)]) for answer in answers)
        self.events["first token drawn apart"] += sum(not answer.num_output for answer in answers)
        for request in waiting:
            if request.lease is not None:
                self.skipped[id(request)] += self._skips.get(id(request), 0)
            if request.lease is not None and request.cached_tokens is not None:
                self.first_match.setdefault(id(request), request.lease.matched)
        if oldest is not None and oldest.state is RequestState.WAITING:
            passed = sum(r.lease is not None and r.arrival > oldest.arrival for r in waiting)
            self.overtaken[id(oldest)] += passed
        progress = self.cache.passes_launched > launched or bool(ended) or len(self.engine._in_flight) < flying
        require("10: every step computes a token or ends a request", progress or not had_work)
        for request in ended:
            self.events[f"ended by {request.finish_reason}"] += 1
        return ended

    def abort(self, request: Request) -> None:
        if any(request in f.batch.requests for f in self.runner.in_flight) and not request.finished:
            self.events["abort in flight"] += 1
        self.engine.abort(request)
        self._aborted.append(request)

    def retract(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.scheduler.retract(request)

    def drain_requests(self) -> None:
        """Run until nothing is left to do; what is cached stays."""
        while self.engine.has_work:
            self.step()
            self.check()

    def drain(self) -> None:
        self.fail_alloc = False
        budget = 50 + 60 * sum((r.total + r.max_new_tokens) * r.params.n for r in self.requests if not r.finished)
        while self.engine.has_work:
            require("10: a run comes to its end", budget > 0)
            budget -= 1
            self.step()
            self.check()
        self.check_drained()

    # what must hold

    def check(self) -> None:
        """Recompute every invariant from scratch. Raises Violation."""
        if self.runner.violation is not None:
            raise self.runner.violation
        nodes = self._check_tree()
        self._check_slots(nodes)
        self._check_leases()
        self._check_requests()
        self.events["retraction"] = self.scheduler.num_retractions

    def _nodes(self) -> list[tuple[Node, list[Node]]]:
        """Every node with its path from the root, the node itself last."""
        out, stack = [], [(root, [root]) for root in self.cache.tree.roots.values()]
        while stack:
            node, path = stack.pop()
            out.append((node, path))
            stack.extend((child, [*path, child]) for child in node.children.values())
        return out

    def _check_tree(self) -> list[tuple[Node, list[Node]]]:
        tree = self.cache.tree
        nodes = self._nodes()
        crossing: Counter[int] = Counter()
        for lease in self.cache.leases:
            node: Node | None = lease.node
            while node is not None:
                crossing[id(node)] += 1
                node = node.parent
        total = locked = host_only = 0
        queued = Counter(map(id, tree.device_leaves.nodes()))
        host_queued = Counter(map(id, tree.host_leaves.nodes()))
        kv, host_kv = self.runner.settled(self.cache.transfers.pending())
        for node, path in nodes:
            name = "3: nodes have a slot a token, siblings differ, parents agree"
            require(name, all(len(node.tokens) == len(s) for s in (node.slots, node.host_slots) if s is not None))
            self._check_residency(node)
            require(name, (len(node.tokens) > 0) == (node.parent is not None))
            for first, child in node.children.items():
                require(name, child.parent is node and int(child.tokens[0]) == first)
                require(name, child.namespace == node.namespace)
            name = "4: locks and counters equal their recount"
            require(name, node.lock == crossing[id(node)], (node.lock, crossing[id(node)]))
            require(name, node.parent is None or node.parent.lock >= node.lock)
            on_device, on_host = node.slots is not None, node.host_slots is not None
            is_leaf = all(child.slots is None for child in node.children.values())
            if node.parent is not None and on_device and is_leaf and not node.lock:
                require("5: every unlocked leaf waits for eviction", queued[id(node)] == 1)
            if on_host and all(child.host_slots is None for child in node.children.values()):
                name = "5: every leaf of the host waits for eviction"
                require(name, host_queued[id(node)] == 1)
            require("5: a node waits for eviction once", max(queued[id(node)], host_queued[id(node)]) <= 1)
            total += len(node.tokens) if on_device else 0
            host_only += 0 if on_device else len(node.tokens)
            locked += len(node.tokens) if crossing[id(node)] else 0
            if node.parent is not None:
                tokens = np.concatenate([n.tokens for n in path])
                weights = self.computed_with.get(node.namespace.weights_version, 0)
                expected = histories(node.namespace, tokens, weights)[-len(node.tokens) :]
                for slots, tier in ((node.slots, kv), (node.host_slots, host_kv)):
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
            require(name, node.slots is not None and node.host_slots is None)
        else:
            require(name, node.slots is not None or node.host_slots is not None)
            require(name, node.slots is None or node.parent.slots is not None)
        require("16: what is locked is on the device", not node.lock or node.slots is not None)
        children = node.children.values()
        counted = (
            sum(child.slots is not None for child in children),
            sum(child.host_slots is not None for child in children),
        )
        name = "4: locks and counters equal their recount"
        require(name, counted == (node.device_children, node.host_children), counted)

    def _check_slots(self, nodes: list[tuple[Node, list[Node]]]) -> None:
        tree = self.cache.tree
        groups: dict[str, list[int]] = {"reserved": [0], "free": self.slots.free_slots().tolist()}
        on_device = [node for node, _ in nodes if node.slots is not None]
        groups["evictable"] = [int(s) for node in on_device if not node.lock for s in node.slots]
        groups["locked"] = [int(s) for node in on_device if node.lock for s in node.slots]
        groups["private"] = [
            int(s)
            for lease in self.cache.leases
            if not lease.released
            for s in self.rows.req_to_token[lease.row, lease.committed : lease.allocated_len]
        ]
        groups["pending"] = [int(s) for slots in self.cache.pending_slots() for s in slots]
        everything = [slot for group in groups.values() for slot in group]
        twice = [slot for slot, n in Counter(everything).items() if n > 1]
        where = {slot: [g for g, slots in groups.items() if slot in slots] for slot in twice[:3]}
        require("2: a slot has one owner", not twice, where)
        missing = set(range(self.sizes.num_slots)) - set(everything)
        require("1: the states cover the pool", not missing, sorted(missing)[:8])
        stats = self.cache.stats()
        require("4: statistics equal their recount", stats.arriving == 0)
        for name in ("free", "evictable", "locked", "private", "pending"):
            require("4: statistics equal their recount", getattr(stats, name) == len(groups[name]), name)
        self._check_host_slots(nodes)
        free = set(groups["free"])
        for lease in self.cache.leases:
            used = set(self.rows.req_to_token[lease.row, : lease.allocated_len].tolist())
            require("5: no slot of a live row is free", not used & free, used & free)
        for flight in self.runner.in_flight:
            for slots in flight.snapshots:
                require("5: no slot read by a pass in flight is free", not set(slots.tolist()) & free)
        for lease in self.cache.leases:
            path = tree.slots_of(lease.node)
            own = self.rows.req_to_token[lease.row, : lease.committed]
            require("5: a row's committed part is its locked path", np.array_equal(path, own))

    def _check_host_slots(self, nodes: list[tuple[Node, list[Node]]]) -> None:
        used = [int(s) for node, _ in nodes if node.host_slots is not None for s in node.host_slots]
        host, stats = self.host_slots, self.cache.stats()
        if host is None:
            require("1: without a host tier nothing is there", not used and not self.cache.transfers.pending())
            require("1: without a host tier nothing is there", stats.host_capacity == stats.stored_tokens == 0)
            return
        everything = [0, *host.free_slots().tolist(), *used]
        require("2: a host's slot has one owner", len(set(everything)) == len(everything))
        require("1: the states cover the host's pool", set(everything) == set(range(self.sizes.host_slots)))
        require(
            "4: statistics equal their recount", stats.host_tokens == len(used) == host.capacity - stats.host_free
        )

    def _check_leases(self) -> None:
        held = [r.lease for r in self.scheduler.running]
        active = sum(r.is_extending or r.remaining > 0 for r in self.scheduler.running)
        require("10: no more requests run than may", active <= self.sizes.max_running, active)
        require("8: a running request holds a lease", all(le is not None and not le.released for le in held))
        live = [le for le in self.cache.leases if not le.released]
        require("8: every live lease is held by one request", set(held) == set(live) and len(held) == len(live))
        pending = Counter(map(id, self.cache.pending_leases()))
        released = [le for le in self.cache.leases if le.released]
        require(
            "8: a released lease waits once",
            all(pending[id(le)] == 1 for le in released) and len(pending) == len(released),
        )
        rows = [le.row for le in self.cache.leases]
        require("2: a row has one owner", len(set(rows)) == len(rows))
        require("9: rows add up", self.rows.num_free + len(rows) == self.sizes.num_rows)
        for request in self.scheduler.running:
            lease = request.lease
            require(
                "8: progress is ordered",
                lease.committed <= request.computed <= request.launched == lease.allocated_len <= request.total,
                request,
            )
            name = "8: progress is what passes have made"
            require(name, request.launched == self.runner.ends[lease], request)
            require(name, request.computed == self.computed[lease], request)
            require(name, request.is_extending == (request.launched < request.extend_end), request)

    def _check_requests(self) -> None:
        scheduler = self.scheduler
        arrivals = [r.arrival for r in scheduler.waiting]
        require("11: the queue is in order of arrival", arrivals == sorted(arrivals))
        for index, count in self.overtaken.items():
            # The pass in which the limit is reached admits its whole batch before the limit shows.
            require("11: overtaking is bounded", count <= MAX_OVERTAKEN, (index, count))
        prompt = cached = recomputed = 0
        for request in self.requests:
            state = request.state
            require(
                "8: a request is in one place",
                (request in scheduler.waiting, request in scheduler.running)
                == (state is RequestState.WAITING, state is RequestState.RUNNING),
            )
            require(
                "8: only running requests hold a lease",
                (request.lease is not None) == (state is RequestState.RUNNING),
            )
            sampling = [
                f
                for f in self.engine._in_flight
                for r, n in zip(f.batch.requests, f.batch.num_samples, strict=True)
                if r is request and n
            ]
            name = "8: samples in flight are those of the passes in flight"
            require(name, request.finished or request.samples_in_flight == len(sampling), request)
            out = request.output_ids().tolist()
            full = continuation(
                request.namespace,
                request.prompt_ids,
                request.max_new_tokens,
                request.stop_ids,
                request.sample_index,
                self.weights[id(request)],
            )
            name = "12: output does not depend on caching, chunking, retraction or batching"
            require(name, out == full[: len(out)], (request.index, out, full))
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                require(name, out == full, (request.index, out, full))
                stopped = bool(out) and out[-1] in request.stop_ids
                require(name, stopped == (request.finish_reason is FinishReason.STOP))
            name = "13: log-probabilities are those of the answer, where they are asked for"
            asked = out if request.params.logprobs is not None else []
            require(name, [t.token_id for t in request.logprobs] == asked, request.index)
            require(name, all(t.logprob == _logprob(t.token_id) for t in request.logprobs), request.index)
            if request.params.prompt_logprobs is not None and request.parent is None:
                name = "13: each prompt token that is asked for is scored once"
                first = max(1, request.params.prompt_logprobs_start)
                wanted = request.prompt_ids[first:].tolist()
                got = [t.token_id for t in request.prompt_logprobs]
                require(name, got == wanted[: len(got)], (request.index, got, wanted))
                require(name, all(t.logprob == _logprob(t.token_id) for t in request.prompt_logprobs))
                if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    require(name, got == wanted, (request.index, got, wanted))
            if request.parent is not None:
                require("13: an answer's prompt is counted once", request.cached_tokens == request.prompt_len)
                self._check_launched(request)
                recomputed += request.recomputed_tokens
                continue
            usage = request.usage()
            name = "13: cached + computed = prompt, counted once"
            require(name, usage.cached_tokens + usage.computed_tokens == request.prompt_len)
            require(name, 0 <= usage.cached_tokens < request.prompt_len)
            if request.cached_tokens is not None:
                prompt += request.prompt_len
                cached += request.cached_tokens
                recomputed += request.recomputed_tokens
                if id(request) in self.first_match:
                    require(name, request.cached_tokens == self.first_match[id(request)], request.index)
                self._check_launched(request)
        for request in scheduler.waiting:
            self._check_match(request)
        got = (self.cache.prompt_tokens, self.cache.cached_tokens, self.cache.recomputed_tokens)
        require("13: cached + computed = prompt, counted once", got == (prompt, cached, recomputed))

    def _check_launched(self, request: Request) -> None:
        launched = self.runner.tokens_launched[id(request)] + self.skipped[id(request)]
        counted = request.launched_ever - request.cached_tokens + request.recomputed_tokens
        require("13: what is launched is what is counted", launched == counted, (request.index, launched, counted))

    def _check_match(self, request: Request) -> None:
        tokens = request.tokens()
        match = self.cache.match(request.namespace, tokens, request.match_limit)
        name = "6: a match is a prefix, in the same namespace, without the last token"
        require(name, match.length <= min(len(tokens) - 1, request.match_limit))
        if request.pending_match is not None:
            name = "6: what a request expects to find is what it would find"
            expected = copy.copy(request.pending_match)  # what it remembers stays as it is
            require(name, expected.length() == match.length, (request.index, expected.length(), match.length))
            leader = self.cache.leader(match, tokens, request.match_limit)
            require(name, expected.has_leader() == (leader is not None), request.index)
        name = "6: a match is a prefix, in the same namespace, without the last token"
        if match.node is NO_MATCH.node:
            return
        require(name, match.node.namespace == request.namespace)
        path = list(self.cache.tree.path(match.node))[::-1]
        above = np.concatenate([n.tokens for n in path[:-1]] or [np.zeros(0, np.int32)])
        reached = np.concatenate([above, match.node.tokens[: match.inside]])
        require(name, len(reached) == match.length and np.array_equal(reached, tokens[: match.length]))

    def _check_computed_once(self, namespace: Namespace, tokens: np.ndarray, limit: int, lease: Lease) -> None:
        if self.sizes.force_miss or not self.sizes.enabled or lease.matched >= limit:
            return
        for other in self.scheduler.running:
            shared = lease.matched
            if (
                other.namespace == namespace
                and other.lease.committed <= shared < other.extend_end
                and np.array_equal(other.tokens()[: shared + 1], tokens[: shared + 1])
            ):
                raise Violation("followers wait for what their leader computes", (other.index, shared))

    def check_drained(self) -> None:
        name = "9: after draining nothing is held, and evicting all leaves the pool whole"
        require(name, not self.cache.leases and not self.cache.in_flight and not self.cache.pending_slots())
        require(name, self.rows.num_free == self.sizes.num_rows)
        require(name, all(node.lock == 0 for node, _ in self._nodes()))
        require(name, not len(self.cache.frontiers))
        self.cache.flush()
        require(name, self.slots.num_free == self.slots.capacity and not self.cache.tree.roots)
        require(name, self.host_slots is None or self.host_slots.num_free == self.host_slots.capacity)
        require("8: every request ends", all(r.finished for r in self.requests))
        self.check()


# -- a random walk -----------------------------------------------------------------------------------------


class Walk:
    """Random actions on a world, all from one seed; `faults` multiplies how often something fails."""

    def __init__(self, world: World, seed: int, faults: int = 1) -> None:
        self.world = world
        self.faults = faults
        self.random = random.Random(seed)

    def prompt(self) -> list[int]:
        """Fresh, a repetition, or something that shares a prefix with an earlier request or its answer."""
        r = self.random
        fresh = [r.randrange(VOCAB) for _ in range(r.randint(1, 14))]
        if not self.world.requests or r.random() < 0.25:
            return fresh
        there = self.world.on_host() if self.world.host_slots is not None and r.random() < 0.4 else []
        earlier = r.choice(there or self.world.requests[-12:]).tokens().tolist()
        if r.random() < 0.3:
            return earlier[:24]
        return (earlier[: r.randint(1, len(earlier))] + fresh)[:24]

    def act(self) -> None:
        world, r = self.world, self.random
        action = r.random()
        if action < 0.28:
            stop_ids = frozenset([r.randrange(VOCAB)]) if r.random() < 0.4 else frozenset()
            namespace = world.namespace(r.choice([None, None, None, "other"]))
            prompt = self.prompt()
            for _ in range(r.choice([1, 1, 1, 3])):
                world.submit(
                    prompt,
                    r.randint(0, 12) or r.randint(0, 1),
                    stop_ids=stop_ids,
                    namespace=namespace,
                    scored_from=r.choice([None, None, None, 0, len(prompt) // 2, len(prompt) - 1]),
                )
        elif action < 0.30:
            world.submit(self.prompt(), r.randint(1, 8), n=r.randint(2, 5))
        elif action < 0.32:
            forked = [q for q in world.requests[-12:] if q.num_known < 28]
            if forked:
                tails = [[t] * r.randint(1, 3) for t in r.sample(range(VOCAB), r.randint(2, 3))]
                world.fork(r.choice(forked), tails, r.randint(1, 8), n=r.choice([1, 1, 3]))
        elif action < 0.325:
            bump = r.random() < 0.7
            world.update_weights(bump=bump, flush=not bump or r.random() < 0.5)
        elif action < 0.33:
            world.save_cache()
        elif action < 0.34:
            if world.kept is not None:
                world.load_cache(fails=r.random() < 0.2)
        elif action < 0.40:
            if world.runner.transfers and r.random() < 0.5:
                world.runner.transfer_next()
            elif world.runner.queue:
                world.runner.run_next()
        elif action < 0.45:
            alive = [q for q in world.requests if not q.finished]
            if alive:
                world.abort(r.choice(alive))
        elif action < 0.50:
            if world.scheduler.running:
                world.retract(r.choice(world.scheduler.running))
        elif action < 0.52:
            if world.host_slots is None or r.random() < 0.2:  # what is on the host has taken time to get there
                world.cache.flush()
        else:
            if r.random() < 0.03 * self.faults:
                world.fail_alloc = True
            fault = r.random() / self.faults
            # What a failed launch loses matters to requests that are not in its pass: those that sit it out.
            sits_out = sum(q.is_extending for q in world.scheduler.running) > 1
            world.runner.fail_launch |= fault < (0.03 if sits_out else 0.01)
            if world.host_slots is not None and r.random() < 0.02 * self.faults:
                world.runner.fail_transfer = r.randint(0, 2)
            world.runner.fail_run |= 0.03 <= fault < 0.04
            world.runner.poison_next |= 0.04 <= fault < 0.06
            world.step()
        world.check()


def random_sizes(seed: int, host_slots: int = 0) -> Sizes:
    r = random.Random(seed)
    return Sizes(
        num_slots=r.choice([40, 48, 64, 120]),
        num_rows=r.choice([2, 4, 6]),
        max_running=r.choice([1, 3, 5]),
        chunk=r.choice([1, 3, 7, 32]),
        policy=r.choice(list(SchedulePolicy)),
        enabled=r.random() > 0.08,
        force_miss=r.random() < 0.08,
        max_samples=r.choice([0, 4, 8]),
        host_slots=host_slots,
        lag=LAG if r.random() > 0.2 else 0,
        drops=True,
    )
