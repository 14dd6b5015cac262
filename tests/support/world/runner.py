"""The device of a world: passes run when the test says so, over KV that is a hash."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from radixrt.cache.lease import Lease
from radixrt.errors import DeviceLostError
from radixrt.output import FinishReason
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking
from radixrt.schedule.passes import Pass, PassResult
from tests.support.forms import allowed_by
from tests.support.world.invariants import Violation, require
from tests.support.world.model import (
    NOT_FINITE,
    POISON,
    VOCAB,
    draw,
    histories,
    kv_of,
    logprobs_of,
    read_on,
    start_of,
)


class SimulatedFailure(RuntimeError):
    """A pass that the test told to fail."""


class Memory(NamedTuple):
    """What device and host hold, by slot and by state."""

    kv: np.ndarray
    host_kv: np.ndarray
    states: np.ndarray
    host_states: np.ndarray

    def side(self, *, of_states: bool, on_host: bool) -> np.ndarray:
        return self[2 * of_states + on_host]

    def make(self, transfer: KVTransfer) -> None:
        source = self.side(of_states=transfer.of_states, on_host=not transfer.to_host)
        target = self.side(of_states=transfer.of_states, on_host=transfer.to_host)
        target[transfer.targets] = source[transfer.sources]


@dataclass
class SimulatedPass:
    booking: Booking
    snapshots: list[np.ndarray]  # the slots that each answer's row names when the pass is launched
    lines: list[np.ndarray]  # of `req_to_token`, that name the slots of each answer's positions
    transfers: int  # that had been started before it, and come before it
    fails: bool = False
    poisoned: frozenset[int] = frozenset()
    verifies: frozenset[int] = frozenset()  # rows that draw after each new position: all but the first are drafts
    masks: np.ndarray | None = None  # of its masked draws, once they are known
    result: PassResult | None = None
    error: Exception | None = None

    @property
    def batch(self) -> Pass:
        return self.booking.pass_


def own_lines(batch: Pass) -> list[np.ndarray]:
    """Each answer reads all by its own row."""
    return [np.full(end, row) for row, end in zip(batch.req_pool_indices, batch.seq_lens, strict=True)]


class SimulatedRunner:
    """Runs passes in order, each when the test says so, at the latest when it is collected.

    Transfers between the tiers are made in order too, beside the passes that were launched before them: when the
    test says so, at the latest before the pass that is launched next.
    """

    def __init__(
        self,
        rows: ReqToTokenPool,
        sizes: tuple[int, int, int, int],  # of `Memory`
        prefill_budget: int,
        max_samples: int,
    ) -> None:
        self.host_rows = rows
        self.prefill_budget = prefill_budget
        self.max_samples = max_samples
        self.req_to_token = np.zeros_like(rows.req_to_token)
        self.memory = Memory(*(np.full(size, POISON, dtype=np.uint64) for size in sizes))
        self.kv, self.states = self.memory.kv, self.memory.states
        self.transfers: deque[KVTransfer] = deque()  # started, not yet made
        self.transfers_started = self.transfers_made = 0
        # What was freed and is still to be copied: of KV and states, and of device and host.
        self.stale: dict[tuple[bool, bool], set[int]] = {
            (of_states, on_host): set() for of_states in (False, True) for on_host in (False, True)
        }
        self.last_token = np.zeros(rows.max_requests, dtype=np.int32)
        self.queue: deque[SimulatedPass] = deque()  # launched, not yet run
        self.in_flight: deque[SimulatedPass] = deque()  # launched, not yet collected
        self.prepared: Pass | None = None  # to be launched next
        self.fail_launch = False
        self.fail_run = self.fail_draw = False
        self.fail_transfer: int | None = None  # transfers that are started before one fails
        self.poison_next = False
        self.pad_slot = 0
        self.weights = 0  # those that passes run with
        self.ends: dict[Lease, int] = {}  # positions launched, or found, of each lease that there was
        self.met: set[Lease] = set()  # those that were in a pass
        self.leases: list[Lease | None] = []  # of the answers of `booking`
        self.counted: deque[tuple[Booking, list[Lease | None]]] = deque(maxlen=8)  # the last passes
        self.given_up: set[Answer] = set()  # with a pass that could not be launched
        self.booking: Booking | None = None  # of the pass that is launched next, or was launched last
        self.verifies: frozenset[int] = frozenset()  # rows of it that have drafts
        self.newcomers: list[Answer] = []  # those of it that are in a pass for the first time with what they hold
        self.is_lost = False  # after the next pass that fails
        self.lines_of = own_lines  # how a pass reads: `SimulatedPass.lines`
        self.violation: Violation | None = None  # kept for `World.check`: the engine takes it for a failed pass
        self.tokens_launched: Counter[int] = Counter()

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        require("transfers: there are some", len(transfers) > 0)
        while transfers:
            if self.fail_transfer == 0:
                self.fail_transfer = None
                self._give_up()
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
        self.memory.make(transfer)
        # Sources that were freed in the meantime are overwritten as soon as nobody is to copy them.
        side = transfer.of_states, not transfer.to_host
        stale, memory = self.stale[side], self.memory.side(of_states=side[0], on_host=side[1])
        gone = sorted((set(transfer.sources.tolist()) & stale) - self._read_of(side, self.transfers))
        memory[gone] = POISON
        stale.difference_update(gone)

    def _read_of(self, side: tuple[bool, bool], transfers: Iterable[KVTransfer]) -> set[int]:
        """What transfers are still to read of KV or of states, on one side."""
        return {int(s) for t in transfers if (t.of_states, not t.to_host) == side for s in t.sources}

    def freed(self, slots: np.ndarray, booked: Iterable[KVTransfer], *, of_states: bool, on_host: bool) -> None:
        """Whoever still reads a free slot or state reads nonsense; transfers that are booked may read it yet."""
        side = of_states, on_host
        read = self._read_of(side, (*self.transfers, *booked))
        for slot in slots.tolist():
            if slot in read:
                self.stale[side].add(slot)
            else:
                self.memory.side(of_states=of_states, on_host=on_host)[slot] = POISON

    def settled(self, booked: Sequence[KVTransfer]) -> Memory:
        """What device and host will hold once all transfers are made, those that are only `booked` too."""
        memory = Memory(*(each.copy() for each in self.memory))
        for transfer in (*self.transfers, *booked):
            memory.make(transfer)
        return memory

    def count(self, booking: Booking | None) -> None:
        """A pass that is about to be launched, whether that succeeds or not."""
        if booking is None:
            return
        self.booking = booking
        batch = booking.pass_
        for before, leases in self.counted:
            if batch.req_pool_indices is before.pass_.req_pool_indices:
                require("8: the same array of rows is of the same requests", booking.answers is before.answers)
                require("8: and of what they hold", [answer.lease for answer in booking.answers] == leases)
        self.leases = [answer.lease for answer in booking.answers]
        self.counted.append((booking, self.leases))
        self.newcomers = []
        for i, (answer, lease) in enumerate(zip(booking.answers, self.leases, strict=True)):
            require("8: a pass holds what its requests hold", lease is not None)
            start, end = int(batch.prefix_lens[i]), int(batch.seq_lens[i])
            self.tokens_launched[id(answer)] += end - start
            if lease not in self.met:
                self.newcomers.append(answer)
            name = "8: positions are launched once, in order"
            require(name, start == self.ends[lease], (answer.request.index, start, end))
            require(
                "8: nothing is launched beyond the last token",
                end <= answer.request.max_slots,
                answer.request.index,
            )
            require("8: a pass holds what its requests hold", lease.row == batch.req_pool_indices[i])
            self.ends[lease] = end
            self.met.add(lease)
        self._check_sampling(booking)

    def _check_sampling(self, booking: Booking) -> None:
        """The draws of a pass have the parameters of its requests. All draw at random."""
        batch = booking.pass_
        expected = [
            (
                i,
                answer.request.seed,
                answer.sample_index + k,
                batch.seq_lens[i],
                answer.request.params.logprobs is not None,
            )
            for i, answer in enumerate(booking.answers)
            for k in range(batch.num_samples[i])
        ]
        arrays = batch.sampling.arrays
        none = np.zeros(0, dtype=np.int32)
        logprobs = np.isin(np.arange(len(expected)), arrays.get("logprob_rows", none))
        parameters = []
        for name in ("seeds", "sample_indices", "draw_positions"):
            parameters.append(arrays.get(name, np.zeros(len(expected), np.int64)))
        columns = (batch.sampling.logits_rows, *parameters, logprobs)
        drawn = list(zip(*columns, strict=False))
        require("8: a token is drawn for its own answer", drawn == expected, expected)

    def prepare(self, batch: Pass) -> None:
        waits = any(map(self.waits_for_masks, self.in_flight))
        self._require("19: a pass is prepared while the one before waits for masks", waits)
        self.prepared = batch

    def launch(self, batch: Pass) -> SimulatedPass:
        assert self.booking is not None, "the world has seen the pass"
        assert self.booking.pass_ is batch
        is_next = self.prepared is None or self.prepared is batch
        self._require("19: the pass that was prepared is the next one", is_next)
        self.prepared = None
        extended = [
            int(end - start)
            for answer, start, end in zip(self.booking.answers, batch.prefix_lens, batch.seq_lens, strict=True)
            if start < answer.extend_len
        ]
        self._require("10: a pass keeps to its prefill budget", sum(extended) <= self.prefill_budget)
        samples = int(batch.num_samples.sum())
        self._require("10: a pass keeps to its limit of samples", samples <= self.max_samples, samples)
        lines = self._planned(batch)
        if self.fail_launch:
            self.fail_launch = False
            self._give_up()
            raise SimulatedFailure("launch")
        rows = self.host_rows.req_to_token
        snapshots = [rows[r, :n].copy() for r, n in zip(batch.req_pool_indices, batch.seq_lens, strict=True)]
        poisoned = frozenset([batch.num_rows // 2]) if self.poison_next else frozenset()
        flight = SimulatedPass(
            self.booking, snapshots, lines, self.transfers_started, self.fail_run, poisoned, self.verifies
        )
        self.fail_run = self.poison_next = False
        waits = any(map(self.waits_for_masks, self.in_flight))
        self._require("19: no pass overtakes one that waits for masks", not waits)
        self.queue.append(flight)
        self.in_flight.append(flight)
        return flight

    def _give_up(self) -> None:
        """The pass at hand is never launched: its answers will end, whatever of theirs is in flight."""
        if self.booking is not None:
            self.given_up.update(self.booking.answers)

    def waits_for_masks(self, flight: SimulatedPass) -> bool:
        return flight.batch.sampling.masked is not None and flight.masks is None

    def mask_memory(self, num_masks: int, num_words: int) -> np.ndarray:
        return np.full((num_masks, num_words), 0x5A5A5A5A, np.int32)

    def draw_masked(self, handle: SimulatedPass, masks: np.ndarray) -> None:
        masked = handle.batch.sampling.masked
        self._require("19: masks are those of the masked draws", masked is not None and len(masks) == len(masked))
        self._require("19: masks come once, to a pass whose draws wait for them", handle.masks is None)
        handle.masks = masks.copy()
        if self.fail_draw:
            self.fail_draw = False
            while handle in self.queue:  # what was launched of it runs all the same
                self.run_next()
            self.in_flight.remove(handle)
            raise SimulatedFailure("draw")

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
        drawn: list[list[int]] = [[] for _ in range(batch.num_rows)]
        accepted = np.zeros(batch.num_rows, dtype=np.int32)
        finite = np.ones(batch.num_rows, dtype=bool)
        self.kv[self.pad_slot] = POISON  # what a padded row writes
        self._check_states(batch)
        began_with = self.states.copy()
        first_tokens = np.cumsum(batch.seq_lens - batch.prefix_lens) - (batch.seq_lens - batch.prefix_lens)
        for i in self._order(flight):
            answer, at = flight.booking.answers[i], int(first_tokens[i])
            start, end = int(batch.prefix_lens[i]), int(batch.seq_lens[i])
            row = int(batch.req_pool_indices[i])
            read = start_of(answer.request.namespace, self.weights)
            history, reads = [], []
            slots = self.req_to_token[flight.lines[i], np.arange(end)]
            name = "17: what is read for several is what each has on the device"
            self._require(name, np.array_equal(slots, self.req_to_token[row, :end]), answer.request.index)
            for position, slot in enumerate(slots.tolist()):
                if position == start and batch.state_reads is not None and not self._tainted(flight, i):
                    begun, zeros = int(batch.state_reads[i]), start_of(answer.request.namespace, self.weights)
                    got = int(began_with[begun]) if begun else zeros
                    self._require("20: a row begins with the state of its prefix", got == read, (i, begun, start))
                if position >= start:
                    token = int(batch.input_ids[at])
                    token = int(self.last_token[-token - 1]) if token < 0 else token
                    self._require("7: a new token is written where its row says", slot == batch.out_cache_loc[at])
                    bad = i in flight.poisoned and position == end - 1
                    self.kv[slot] = NOT_FINITE if bad else kv_of(read, token)
                    at += 1
                history.append(int(self.kv[slot]))
                read = read_on(read, history[-1])
                if position >= start:
                    reads.append(read)
            if batch.state_writes is not None:
                self.states[int(batch.state_writes[i])] = NOT_FINITE if i in flight.poisoned else read
            known = answer.tokens()[:end]
            if i in flight.poisoned or NOT_FINITE in history:
                finite[i] = False
            elif not self._tainted(flight, i):
                expected = histories(answer.request.namespace, known, self.weights)
                got = history[: len(known)]
                self._require(
                    "7: what is read is the KV of the own history",
                    got == expected,
                    (answer.request.index, start, end),
                )
            if i in flight.verifies:  # a token is drawn after each position, and taken while the drafts were right
                draws = [draw(read, answer.sample_index) for read in reads]
                drafts = batch.input_ids[at - len(reads) + 1 : at].tolist()
                wrong = [k for k, (token, draft) in enumerate(zip(draws, drafts, strict=False)) if token != draft]
                accepted[i] = wrong[0] + 1 if wrong else len(draws)
            else:
                draws = [
                    draw(read, answer.sample_index + k, self._allowed(flight, i, k))
                    for k in range(batch.num_samples[i])
                ]
                accepted[i] = len(draws)
            if draws:
                self.last_token[row] = draws[accepted[i] - 1 if i in flight.verifies else 0]
            drawn[i] = draws
        asked = [  # whose log-probabilities are wanted
            token
            for answer, draws in zip(flight.booking.answers, drawn, strict=True)
            for token in draws
            if answer.request.params.logprobs is not None
        ]
        flight.result = PassResult(
            np.array([token for draws in drawn for token in draws], dtype=np.int32),
            accepted,
            finite,
            logprobs_of(asked) if asked else None,
            logprobs_of(batch.scored_targets.tolist()),
        )

    def _check_states(self, batch: Pass) -> None:
        """No row leaves a state that another one of the pass begins with, or leaves."""
        if batch.state_reads is None or batch.state_writes is None:
            return
        reads, writes = batch.state_reads.tolist(), batch.state_writes.tolist()
        self._require("20: each row leaves a state of its own", len({*writes} - {0}) == len(writes), writes)
        others = [read for i, read in enumerate(reads) if read in writes and writes.index(read) != i]
        self._require("20: no row overwrites what another one begins with", not others, others)

    def _allowed(self, flight: SimulatedPass, i: int, k: int) -> Sequence[int]:
        """The tokens that the k-th draw of row `i` may have."""
        masked, counts = flight.batch.sampling.masked, flight.batch.num_samples
        if masked is None:
            return range(VOCAB)
        places = np.flatnonzero(masked == counts[:i].sum() + k)
        has_form = flight.booking.answers[i].request.form is not None
        self._require("19: the draws of answers with a form are masked", has_form == bool(len(places)))
        if not has_form:
            return range(VOCAB)
        assert flight.masks is not None
        return allowed_by(flight.masks[places[0]], VOCAB)

    def _order(self, flight: SimulatedPass) -> list[int]:
        """The rows of a pass, each after those that write what it reads.

        A layer writes the KV of all new tokens before attention reads any. Here a token is a hash of all before
        it, of all layers at once: it is known when theirs are.
        """
        batch = flight.batch
        ends = np.cumsum(batch.seq_lens - batch.prefix_lens)
        unwritten = [set(new.tolist()) for new in np.split(batch.out_cache_loc, ends[:-1])]
        prefixes = [
            set(self.req_to_token[line, np.arange(len(line))][:start].tolist())
            for line, start in zip(flight.lines, batch.prefix_lens.tolist(), strict=True)
        ]
        order: list[int] = []
        left = list(range(batch.num_rows))
        while left:
            able = [i for i in left if not any(prefixes[i] & unwritten[k] for k in left if k != i)]
            self._require("7: no two rows of a pass wait for one another", bool(able), left)
            order += able
            left = [i for i in left if i not in able]
        return order

    def _tainted(self, flight: SimulatedPass, i: int) -> bool:
        """Whether an earlier pass that this one builds on failed; its result will be thrown away."""
        answer = flight.booking.answers[i]
        if answer in self.given_up:
            return True
        for earlier in self.in_flight:
            if earlier is flight:
                break
            if answer in earlier.booking.answers and (
                earlier.error is not None or earlier.booking.answers.index(answer) in earlier.poisoned
            ):
                return True
        return answer.log.finish_reason is FinishReason.ERROR
