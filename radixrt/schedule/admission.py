"""Who waits and who runs, and how an answer goes from one to the other: memory that is promised, and leaders."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memory_pool.slot_allocator import Slots
from radixrt.arrays import Int32Array
from radixrt.cache.lease import Lease
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import Node, common_prefix
from radixrt.cache.states import States
from radixrt.schedule.answer import Answer, place_of
from radixrt.schedule.neighbours import Neighbours
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy, SchedulerConfig, admission_order
from radixrt.schedule.request_table import RequestTable
from radixrt.schedule.sampling_table import SamplingTable

_NONE = np.zeros(0, np.int32)
MAX_TOLD = 16  # answers that wait, which are asked for their leaders where none is admitted
MAX_ASKED = 256  # answers, for where they part


class ExtendChunk(NamedTuple):
    """Known tokens [start, end), one at least, of an answer's extend that one pass computes."""

    answer: Answer
    start: int
    end: int
    slots: Slots
    num_samples: int  # after the last token
    states: tuple[int, int]  # that it begins with and leaves, where there are some

    @classmethod
    def next_of(
        cls, answer: Answer, lease: Lease, extend_len: int, cache: PrefixCache, budget: int
    ) -> ExtendChunk | None:
        """The next tokens of an answer's extend over `extend_len`, as many as the budget allows; None if there are
        no slots for them.
        """
        log, start = answer.log, lease.allocated_len
        end = min(start + budget, extend_len)
        stop = None
        if lease.stops:
            stop = next((stop for stop in lease.stops if stop > start), None)
            end = end if stop is None else min(end, stop)
        slots = cache.extend(lease, end - start)
        if slots is None:
            return None
        states = (0, 0) if cache.states is None else cache.next_states(lease, end if end == stop else None)
        if answer.launched_len > start:  # lost to a retraction
            recomputed = min(end, answer.launched_len) - start
            log.recomputed_tokens += recomputed
            cache.recomputed_tokens += recomputed
        if log.launched_at is None:
            log.launched_at = time.perf_counter()
        return cls(answer, start, end, slots, answer.num_answers if end == extend_len else 0, states)

    def scored_positions(self) -> Int32Array:
        """Positions after which the prompt's next token is to be scored, ascending."""
        scored = self.answer.next_scored
        if scored is None:
            return _NONE
        # A pass before this one, still in flight, may score some of them: positions are launched once, in order.
        first, end = max(self.start, scored - 1), min(self.end, self.answer.request.prompt_len - 1)
        return np.arange(first, end, dtype=np.int32)


class Admission:
    """The answers that have not ended. Lets them run while memory lasts that is not promised to others.

    An answer that runs alone is never refused memory: its request was checked to fit into the pool.
    """

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        rows = cache.rows
        self.waiting: list[Answer] = []  # by `Answer.place`
        self.running: dict[Answer, int] = {}  # with their rows, in order of admission
        self.table = RequestTable(rows.max_requests, rows.max_context_len, cache.allocated_lens)
        self.sampling = SamplingTable(rows.max_requests)
        self.estimate = OutputEstimate()
        self.changes = 0  # times that an answer has begun or stopped running
        self.num_yielding = 0  # running answers that make way for more urgent ones
        self.refused: Answer | None = None  # the first one that found no place or no memory, in the last pass
        self._rows = np.zeros(0, np.int32)  # of `running`, as they were at some number of changes
        self._rows_at = 0
        self.num_retractions = 0
        self.paced: Callable[[Iterable[Any]], Iterable[Any]] = iter  # walks a long list
        self._neighbours = Neighbours()  # of those that wait, where states are kept
        self._cache, self._config = cache, config
        if cache.states is not None:
            cache.states.next_use = self._next_use

    def look_ahead(self, device_waits: bool) -> int:
        """Answers that wait behind those which are considered: they are asked where they part if states are kept,
        else the last of them may be a scout; no more than are needed where the device waits for the pass.
        """
        if self._cache.keeps_states:
            return MAX_ASKED
        scouts = self._config.policy is SchedulePolicy.LPM and self._cache.states is None and not device_waits
        return 2 * self._config.max_ranked if scouts else 0  # two passes begin with no more

    def admit(self, budget: int, places: int, max_ranked: int, look_ahead: int) -> list[ExtendChunk]:
        """Admit at most `places` of the first `max_ranked` answers that wait, and a scout from `look_ahead` behind
        them. Returns their first chunks, of at most `budget` tokens in all.
        """
        chunks: list[ExtendChunk] = []
        begun: list[Lease] = []  # of each chunk's answer
        cache, config, waiting = self._cache, self._config, self.waiting
        self.refused = waiting[0] if waiting and places <= 0 else None
        if not waiting or budget <= 0 or places <= 0:
            if cache.keeps_states:
                self._tell_leaders()
            return chunks
        promised = self._promised()
        if cache.states is not None and cache.keeps_states:
            # What goes is free only once passes in flight have ended: for those that begin with the next one, too.
            count = self._num_fitting(budget, places) * (1 + cache.in_flight)
            cache.states.make_room(count, cache.passes, ends_only=True)
            self._neighbours.add(waiting[: max_ranked + look_ahead])
        more_urgent = 0  # answers at the head of the queue that were passed over
        followers: set[Answer] = set()  # who wait for what others compute: nobody overtakes them meanwhile
        loads = config.max_loaded_chunks * config.chunked_prefill_size
        scouts = self._scouts(max_ranked, look_ahead, promised)
        for answer in self.paced([*scouts, *admission_order(config, waiting[:max_ranked], cache)]):
            if budget <= 0 or places <= 0 or loads <= 0:
                self.refused = answer if places <= 0 else None
                break
            while (oldest := waiting[more_urgent]).request.priority < answer.request.priority:
                more_urgent += 1
            if answer is not oldest and config.is_overdue(oldest) and oldest not in followers:
                break
            if answer.resumable_after > cache.passes_ended:
                continue  # just retracted: its tokens in flight are still to come
            match = answer.match_in(cache)
            # Slots that it is expected to take in all; its last token never wants one.
            ahead = max(0, self.estimate.expected(answer) - 1)
            demand = min(answer.known_len + ahead, answer.request.max_slots)
            loan = None
            if match.has_leader() and (loan := match.loan()) is None:
                # A follower: its leader is computing what it needs next, and not in this pass alone. Room is kept
                # for the rest of it, or leaders of other prefixes would take that, and evict this prefix before it
                # comes.
                followers.add(answer)
                promised += max(0, demand - match.leader_match_len)
                if cache.keeps_states:
                    match.keep_where_it_parts()
                continue
            tokens = answer.tokens()
            reserve = promised + demand - len(tokens) if self.running or begun else 0
            lease = cache.acquire(answer.request.namespace, tokens, match.match(), reserve, loan)
            if lease is None:
                self.refused = answer
                break
            loads -= lease.loaded
            if cache.states is not None and cache.keeps_states:
                self._set_stops(answer, lease, cache.states)
            chunk = ExtendChunk.next_of(answer, lease, len(tokens), cache, budget)
            if chunk is None:
                cache.release(lease)
                answer.resumable_after = cache.passes_launched
                break
            self.leave_queue(answer)
            begun.append(lease)
            if answer is not oldest and oldest not in followers:
                oldest.times_skipped += 1
            if answer.log.cached_tokens is None:  # hits are counted once, at the first admission
                answer.log.cached_tokens = lease.matched
                cache.prompt_tokens += answer.request.prompt_len
                cache.cached_tokens += lease.matched
            chunks.append(chunk)
            cache.lend(lease)
            places -= 1
            budget -= len(chunk.slots)
            promised += demand - chunk.end
        if chunks:
            self._run([chunk.answer for chunk in chunks], begun)
        return chunks

    def _scouts(self, max_ranked: int, look_ahead: int, promised: int) -> list[Answer]:
        """The last answer that waits so far behind those which are considered, if it is the first to compute much
        that the one before it begins with, too; else none.

        It goes before all: those that begin with the same tokens would fill the queue later, and wait for the pass
        that computes them, and so would the device. Only where the order is free, and memory is not short.
        """
        waiting, cache, config, place = self.waiting, self._cache, self._config, max_ranked + look_ahead
        if not look_ahead or cache.states is not None or not 1 < place <= len(waiting):
            return []
        (before, scout), oldest = waiting[place - 2 : place], waiting[0]
        is_free = scout.request.priority == oldest.request.priority and not scout.in_order
        length = min(len(scout.tokens()), len(before.tokens()))
        if not is_free or config.is_overdue(oldest) or 2 * (promised + length) > cache.slots.num_free:
            return []
        shared = common_prefix(scout.tokens()[:length], before.tokens()[:length])
        return [scout] if shared >= scout.match_in(cache).length() + config.least_scouted else []

    def _num_fitting(self, budget: int, places: int) -> int:
        """About how many of those that wait begin with a pass of so many tokens."""
        count = 0
        for answer in self.waiting[:places]:
            if budget <= 0:
                break
            budget -= answer.known_len - answer.match_in(self._cache).usable_length()
            count += 1
        return count

    def _tell_leaders(self) -> None:
        """Let the first that wait for a leader tell it where they part from it: until then it may fill passes."""
        for answer in self.waiting[:MAX_TOLD]:
            match = answer.match_in(self._cache)
            if match.has_leader():
                match.keep_where_it_parts()

    def _set_stops(self, answer: Answer, lease: Lease, states: States) -> None:
        """Let a lease leave states where answers that wait part from it, and for its own forks."""
        stops, end = set(lease.stops), answer.known_len
        if answer.num_answers > 1:
            stops.add(end)
            if 4 * answer.num_answers > self._config.max_samples_per_pass:
                stops.add(end - 1)  # first tokens may find no place among the samples of its pass
        least_gain = max(1, states.least_gain // 4)  # these are sure to come
        stops.update(self._neighbours.partings(answer, lease.matched, least_gain))
        lease.stops = sorted(stop for stop in stops if stop > lease.matched)

    def lacks_memory(self, answer: Answer) -> bool:
        """Whether a waiting answer would find too little memory, once the passes in flight have ended."""
        ahead = max(0, self.estimate.expected(answer) - 1)
        demand = min(answer.known_len + ahead, answer.request.max_slots)
        promised = self._promised() if self.running else 0
        return demand + promised > self._cache.available + self._cache.incoming

    def extend_again(self, answer: Answer, count: int) -> None:
        """Let an answer extend, before it decodes again, over what it knows and `count` tokens that it is about to
        get.
        """
        if answer.lease is not None:
            answer.extended_len = answer.computed_len
            self.table.extend_lens[answer.lease.row] = answer.known_len + count
            self.changes += 1

    def running_rows(self) -> Int32Array:
        """`[n]`, of `running`; the same array until that changes."""
        if self._rows_at != self.changes:
            rows, count = self.running.values(), len(self.running)
            self._rows, self._rows_at = np.fromiter(rows, np.int32, count), self.changes
        return self._rows

    def _next_use(self, node: Node) -> int | None:
        """How many answers wait before the first one that may begin with a node's state; None: none may."""
        answer = self._neighbours.first_user(node)
        return None if answer is None else bisect.bisect_left(self.waiting, answer.place, key=place_of)

    def enqueue(self, answer: Answer) -> None:
        """Put an answer in its place in the queue, after those that share it."""
        bisect.insort(self.waiting, answer, key=place_of)
        if self._cache.keeps_states:
            self._neighbours.add([answer])

    def leave_queue(self, answer: Answer) -> None:
        is_first = self.waiting[0] is answer  # as mostly
        at = 0 if is_first else bisect.bisect_left(self.waiting, answer.place, key=place_of)
        while self.waiting[at] is not answer:  # the answers to one prompt arrive together
            at += 1
        del self.waiting[at]
        self._neighbours.remove(answer)

    def retract(self, answer: Answer) -> None:
        """Take a running answer back to its place in the queue. Its output stays, its KV becomes evictable."""
        self.release(answer, comes_back=True)
        self.enqueue(answer)
        answer.log.retractions += 1
        self.num_retractions += 1

    def release(
        self,
        answer: Answer,
        reusable_len: int | None = None,
        *,
        comes_back: bool = False,
        is_sound: bool = True,
    ) -> None:
        """Stop running an answer; publish what it has computed, at most `reusable_len` tokens. `is_sound`: what
        passes in flight compute of it is of use.
        """
        lease, published = answer.lease, answer.computed_len
        assert lease is not None  # it runs
        if reusable_len is not None:
            published = min(published, reusable_len)
        if published > lease.committed:
            self._cache.commit(lease, answer.tokens(published), published)
        computed = answer.tokens() if is_sound and self._cache.keeps_states else None
        self._cache.release(lease, reusable_len, computed=computed, comes_back=comes_back)
        answer.stop()
        answer.resumable_after = self._cache.passes_launched
        del self.running[answer]
        self.num_yielding -= answer.request.yields
        self.changes += 1

    def _run(self, answers: Sequence[Answer], leases: Sequence[Lease]) -> None:
        """Let answers that waited run, each with what it holds."""
        rows = [lease.row for lease in leases]
        self.table.begin(rows, [answer.request for answer in answers], [lease.tokens for lease in leases])
        for answer, lease in zip(answers, leases, strict=True):
            answer.run(lease, self.table)
            self.sampling.admit(lease.row, answer)
            self.running[answer] = lease.row
            self.num_yielding += answer.request.yields
        self.changes += len(answers)

    def _promised(self) -> int:
        """Slots that all running answers are still expected to ask for."""
        table, rows = self.table, self.running_rows()
        total_lens, max_lens, prompt_lens = table.total_lens(rows), table.max_lens[rows], table.prompt_lens[rows]
        num_output = table.known_lens[rows] - prompt_lens
        expected = self.estimate.expected_each(max_lens - total_lens, num_output, table.may_stop[rows])
        demands = np.minimum(total_lens + np.maximum(0, expected - 1), np.maximum(max_lens - 1, prompt_lens))
        return int((demands - table.allocated_lens[rows]).sum())
