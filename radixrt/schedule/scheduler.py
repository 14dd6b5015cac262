"""Decides what each pass computes: continuous batching with chunked prefill over a prefix cache.

The scheduler holds no memory (the cache does) and computes nothing (the runner does). It plans a pass while the
one before is in flight, so it learns each sampled token one pass late: an answer that has just sampled its end
token may be in one more pass, whose result for it is thrown away.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from memory_pool.slot_allocator import Slots
from radixrt.arrays import Int32Array
from radixrt.cache.prefix_cache import PrefixCache, sort_key
from radixrt.errors import SchedulerError
from radixrt.output import FinishReason
from radixrt.schedule.admission import Admission, ExtendChunk
from radixrt.schedule.answer import Answer, RequestLog, place_of, rows_of
from radixrt.schedule.booking import Booking, Bookkeeper
from radixrt.schedule.lanes import Lanes
from radixrt.schedule.masks import PassForms
from radixrt.schedule.passes import Pass, SamplingInputs
from radixrt.schedule.policy import SchedulePolicy, SchedulerConfig
from radixrt.schedule.request import Request

_NONE = np.zeros(0, dtype=np.int32)


class Scheduler:
    """Admits, extends, decodes, retracts and ends answers: `waiting` by `Answer.place`, `running` by admission."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        self.cache, self.config = cache, config
        self._admission = admission = Admission(cache, config)
        self._bookkeeper = Bookkeeper(cache, admission)
        self.waiting, self.retract = admission.waiting, admission.retract
        self.process, self.fail = self._bookkeeper.process, self._bookkeeper.fail
        self.take_forced = self._bookkeeper.take_forced
        self._num_arrivals = 0
        # Which answers decode and which extend: found anew after a change of the running ones, after a chunk, and
        # once a decoding answer has launched its last token.
        self._decodes: tuple[Answer, ...] = ()
        self._decode_rows = _NONE  # theirs
        self._extends: tuple[Answer, ...] = ()
        self._lanes = Lanes(config.num_lanes, cache, admission.table) if config.num_lanes > 1 else None
        self._forms: deque[PassForms] = deque(maxlen=config.num_lanes)  # of the passes that were planned last
        self._grouped_at = 0  # `Admission.changes` then
        self._passes_left = 0  # until one of the decodes has launched its last token
        self._device_waits = True  # as no pass could be planned, when one was wanted last

    @property
    def running(self) -> list[Answer]:
        return list(self._admission.running)

    @property
    def num_running(self) -> int:
        return len(self._admission.running)

    @property
    def num_retractions(self) -> int:
        return self._admission.num_retractions

    def pace(self, paced: Callable[[Iterable[Any]], Iterable[Any]]) -> None:
        """From now on, walk long lists of answers by way of `paced`."""
        self._admission.paced = paced

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._admission.running)

    @property
    def sorts(self) -> bool:
        """Whether requests that are known together are sorted by their tokens."""
        return self.config.policy is SchedulePolicy.LPM

    def refusal(self, request: Request) -> str | None:
        """Why a request can never run, or None if it can."""
        if request.max_slots > self.cache.slots.capacity:
            return (
                f"needs up to {request.max_slots} KV slots ({request.prompt_len} prompt tokens + max_new_tokens "
                f"{request.max_new_tokens} - 1), but the pool has {self.cache.slots.capacity}: shorten it, lower "
                "max_new_tokens, or raise max_total_tokens or memory_fraction"
            )
        return None

    def check(self, requests: Iterable[Request]) -> None:
        """Raise ValueError where one can never run: see `refusal`."""
        capacity = self.cache.slots.capacity
        for request in requests:
            if request.max_slots > capacity:
                raise ValueError(f"request {request.index} {self.refusal(request)}")

    def new_arrivals(self, count: int) -> int:
        """The first of so many `Answer.arrival`s one after the other, for requests that are submitted later."""
        self._num_arrivals += count
        return self._num_arrivals - count

    def room(self, place: tuple[int, int]) -> int:
        """How many answers from an `Answer.place` on may wait before the next ones are not even looked at."""
        before = bisect.bisect_left(self.waiting, place, key=place_of)
        return max(0, self._max_ranked + self._admission.look_ahead(self._device_waits) - before)

    @property
    def _max_ranked(self) -> int:
        """Answers at the head of the queue that are considered for the coming pass."""
        config = self.config
        return min(config.first_ranked, config.max_ranked) if self._device_waits else config.max_ranked

    def submit_all(
        self,
        requests: Iterable[Request],
        *,
        in_order: bool = False,
        is_sorted: bool = False,
        submitted_at: float | None = None,
        arrival: int | None = None,
    ) -> list[Answer]:
        """Queue requests that are known together, all or none. Returns the first answer of each.

        Under LPM they queue in lexicographic order of their tokens, the depth-first order of their radix tree:
        those that share a prefix come one after the other, which wants the least memory for the most hits (Zheng
        et al. 2024, theorem 3.1). With `is_sorted` they are in that order already. With `in_order` they are served
        first come, first served, as they are given. Those of a lower `priority` go first all the same.
        `submitted_at`: seconds of time.perf_counter; None: now. `arrival`: the first, of `new_arrivals`; None: the
        next one.
        Raises ValueError where one can never run: see `refusal`.
        """
        requests = list(requests)
        self.check(requests)
        at = time.perf_counter() if submitted_at is None else submitted_at
        first = self.new_arrivals(len(requests)) if arrival is None else arrival
        numbers: Sequence[int] = range(first, first + len(requests))  # by request
        if self.sorts and not (in_order or is_sorted):
            order = sorted(range(len(requests)), key=lambda i: sort_key(requests[i].prompt_ids))
            numbers = [number for _, number in sorted(zip(order, numbers, strict=True))]
        answers = [
            Answer(request, number, RequestLog(at), in_order, request.first_answer)
            for request, number in zip(requests, numbers, strict=True)
        ]
        last, queued = self.waiting[-1:], sorted(answers, key=place_of)  # in no time if they are in order
        self.waiting.extend(queued)
        if last and queued and last[0].place > queued[0].place:
            self.waiting.sort(key=place_of)
        return answers

    def next_pass(self) -> Booking | None:
        """Plan a pass. None if nothing is left to do, or all of it waits for passes in flight.

        Raises SchedulerError where requests wait, nothing is in flight, and still nothing can run.
        """
        booking = self._plan()
        while booking is None and self.running and not self.cache.in_flight:
            # Running answers hold all memory, and none has what it needs for its next token: the last yields.
            self.retract(max(self.running, key=place_of))
            booking = self._plan()
        if booking is None and self.waiting and not self.cache.in_flight:
            booking = self._plan()  # succeeds unless slots are refused again that should be there
            if booking is None:
                count, stats = len(self.waiting), self.cache.stats()
                raise SchedulerError(f"{count} requests wait and none can be admitted: {stats}")
        self._device_waits = booking is None
        return booking

    def abort(self, answer: Answer) -> bool:
        """End an answer now; what it has computed stays in the cache. False if it had ended before."""
        if answer.finished:
            return False
        self._bookkeeper.finish(answer, FinishReason.ABORT)
        return True

    def _plan(self) -> Booking | None:
        self._make_way()
        admission, retractions, budget = self._admission, self.num_retractions, self.config.chunked_prefill_size
        self._group()
        decodes, rows = self._in_turn()
        if len(decodes) > self.cache.available:
            self._make_room(len(decodes))
            self._group()
            decodes, rows = self._in_turn()
        # Other running answers only wait for their last token.
        places = self.config.max_running_requests - len(self._decodes) - len(self._extends)
        decodes, rows, slots = self._with_slots(decodes, rows)
        self._passes_left -= 1
        chunks: list[ExtendChunk] = []
        for answer in self._extends:
            lease, chunk = answer.lease, None
            assert lease is not None  # it runs
            if budget > 0:
                chunk = ExtendChunk.next_of(answer, lease, answer.extend_len, self.cache, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= len(chunk.slots)
        if self.num_retractions == retractions:  # an answer that has just yielded does not come back at once
            chunks += admission.admit(budget, places, self._max_ranked, admission.look_ahead(self._device_waits))
        if not chunks and not decodes and self._lanes is not None and self.cache.in_flight <= 1:
            # Nothing else is left to be computed beside the pass in flight.
            decodes, rows, slots = self._with_slots(*self._in_turn(waits=True))
        if not chunks and not decodes:
            return None
        admission.estimate.pass_scheduled()
        if chunks:
            self._passes_left = 0
        return self._compose(chunks, decodes, rows, slots)

    def _in_turn(self, *, waits: bool = False) -> tuple[tuple[Answer, ...], Int32Array]:
        """The decodes of the coming pass, and their rows: all, or those of a lane."""
        if self._lanes is None:
            return self._decodes, self._decode_rows
        num_running = self.num_running - len(self._extends)
        turn = self._lanes.next_turn(self._decodes, self._decode_rows, num_running, waits=waits)
        return turn.answers, turn.rows

    def _with_slots(
        self, decodes: tuple[Answer, ...], rows: Int32Array
    ) -> tuple[tuple[Answer, ...], Int32Array, Slots]:
        """As many of the decodes as there are slots for, with their rows and slots `[n]`."""
        if len(decodes) > self.cache.available:
            decodes, rows = decodes[: self.cache.available], rows[: self.cache.available]
        slots = self.cache.extend_each(rows)
        return ((), _NONE, _NONE) if slots is None else (decodes, rows, slots)

    def _group(self) -> None:
        """Find out which answers decode and which extend in the next pass, unless that is known."""
        changes = self._admission.changes
        if self._grouped_at == changes and self._passes_left > 0:
            return
        running, rows, table = self._admission.running, self._admission.running_rows(), self._admission.table
        extends = table.allocated_lens[rows] < table.extend_lens[rows]
        remaining = table.max_lens[rows] - table.total_lens(rows)
        decodes = ~extends & (remaining > 0)
        self._extends = tuple(itertools.compress(running, extends.tolist()))
        found = tuple(itertools.compress(running, decodes.tolist()))
        if found != self._decodes:  # the same ones hold what they held: who was retracted was not here meanwhile
            self._decodes, self._decode_rows = found, rows[decodes]
        self._passes_left = int(remaining[decodes].min()) if decodes.any() else 0
        self._grouped_at = changes

    def _make_way(self) -> None:
        """Retract answers that yield, the least urgent and of these the latest, for a more urgent one that found
        no place or no memory in the last pass.
        """
        admission, urgent = self._admission, self._admission.refused
        admission.refused = None
        if urgent is None or not admission.num_yielding or urgent.finished:
            return
        self._group()
        priority, holders = urgent.request.priority, (*self._decodes, *self._extends)
        yielding = [one for one in holders if one.request.yields and one.request.priority > priority]
        yielding.sort(key=place_of)
        places = self.config.max_running_requests - len(holders)
        while yielding and (places <= 0 or admission.lacks_memory(urgent)):
            self.retract(yielding.pop())
            places += 1

    def _make_room(self, per_pass: int) -> None:
        """Retract answers until the slots available, or about to be, last for a few passes: the least urgent, and
        of these the latest arrivals.
        """
        if self.cache.available + self.cache.incoming >= per_pass:
            return  # enough is on its way: decodes that get no slot sit out a pass
        in_order = sorted(self.running, key=place_of)
        self._admission.estimate.fell_short()
        wanted = len(self._decodes) * self.config.room_passes
        while len(in_order) > 1 and self.cache.available + self.cache.incoming < wanted:
            self.retract(in_order.pop())

    def _compose(
        self, chunks: list[ExtendChunk], decodes: tuple[Answer, ...], rows: Int32Array, slots: Slots
    ) -> Booking:
        """A pass of chunks, the longer ones first, then of decodes with their rows and slots `[N]`."""
        table, answers, count = self._admission.table, decodes, len(decodes)
        seq_lens = table.allocated_lens.take(rows)
        prefix_lens = seq_lens - 1
        # The token at a decode's end may be known to the device alone.
        input_ids = ~rows
        is_known = prefix_lens < table.known_lens.take(rows)
        if is_known.any():
            input_ids = np.where(is_known, table.tokens[rows, prefix_lens], input_ids)
        columns: dict[str, Any] = {
            "req_pool_indices": rows,
            "prefix_lens": prefix_lens,
            "seq_lens": seq_lens,
            "input_ids": input_ids,
            "out_cache_loc": slots,
            "num_samples": np.ones(count, dtype=np.int32),
            "num_scored": np.zeros(count, dtype=np.int32),
            "scored": _NONE,
            "scored_targets": _NONE,
        }
        if self.cache.states is not None:
            columns["state_reads"], columns["state_writes"] = self.cache.states.step_each(rows)
        if chunks:
            chunks.sort(key=lambda chunk: len(chunk.slots) == 1)  # stable
            answers = (*(chunk.answer for chunk in chunks), *decodes)
            extends = self._extend_columns(chunks, count)
            columns = {name: np.concatenate([column, columns[name]]) for name, column in extends.items()}
        draws = [columns[name] for name in ("req_pool_indices", "seq_lens", "num_samples")]
        sampling = self._admission.sampling.prepare(answers, *draws)
        if self._lanes is not None:
            self._lanes.drawn(columns["req_pool_indices"][columns["num_samples"] > 0])
        pass_ = Pass(
            num_extends=sum(len(chunk.slots) > 1 for chunk in chunks),
            row_changes=self.cache.rows.take_changes(),
            sampling=sampling,
            num_top_scored=max((chunk.answer.request.params.prompt_logprobs or 0 for chunk in chunks), default=0),
            extended_tokens=sum(len(chunk.slots) for chunk in chunks),
            **columns,
        )
        return Booking(pass_, answers, self._forms_of(answers, sampling))

    def _forms_of(self, answers: tuple[Answer, ...], sampling: SamplingInputs) -> PassForms | None:
        """The forms of a pass with masked draws: those of a pass before, if that was of the same answers."""
        if sampling.masked is None:
            if len(self._forms) == self._forms.maxlen:
                self._forms.popleft()
            return None
        forms = next((forms for forms in self._forms if forms.answers is answers), None)
        if forms is None:
            forms = PassForms(answers, sampling)
        else:
            self._forms.remove(forms)
        self._forms.append(forms)
        return forms

    def _extend_columns(self, chunks: Sequence[ExtendChunk], num_decodes: int) -> dict[str, Int32Array]:
        """The columns of a `Pass`, of its chunks alone."""

        def column(values: Iterable[int]) -> Int32Array:
            return np.fromiter(values, np.int32, len(chunks))

        starts, lens = column(chunk.start for chunk in chunks), column(len(chunk.slots) for chunk in chunks)
        scored = [chunk.scored_positions() for chunk in chunks]
        offsets = np.cumsum(lens, dtype=np.int32) - lens - starts  # from a position to its token in the pass
        return {
            "req_pool_indices": rows_of([chunk.answer for chunk in chunks]),
            "prefix_lens": starts,
            "seq_lens": starts + lens,
            "input_ids": np.concatenate([chunk.answer.tokens(chunk.end)[chunk.start :] for chunk in chunks]),
            "out_cache_loc": np.concatenate([chunk.slots for chunk in chunks]),
            "num_samples": self._limited(column(chunk.num_samples for chunk in chunks), num_decodes),
            "num_scored": column(map(len, scored)),
            **self._scored_columns(chunks, scored, offsets),
            **self._state_columns(chunks),
        }

    def _state_columns(self, chunks: Sequence[ExtendChunk]) -> dict[str, Int32Array]:
        if self.cache.states is None:
            return {}
        reads, writes = np.array([chunk.states for chunk in chunks], np.int32).T
        return {"state_reads": reads, "state_writes": writes}

    def _scored_columns(
        self, chunks: Sequence[ExtendChunk], scored: Sequence[Int32Array], offsets: Int32Array
    ) -> dict[str, Int32Array]:
        """The new tokens that are `scored`, by their positions in each chunk, and the prompts' next tokens."""
        tokens, targets = [_NONE], [_NONE]
        for chunk, at, offset in zip(chunks, scored, offsets, strict=True):
            if len(at):  # seldom
                tokens.append(at + offset)
                targets.append(chunk.answer.request.prompt_ids[at + 1])
        return {"scored": np.concatenate(tokens), "scored_targets": np.concatenate(targets)}

    def _limited(self, num_samples: Int32Array, num_decodes: int) -> Int32Array:
        """Leave to later passes the first tokens of answers for which this one has no rows of logits."""
        ones = np.minimum(num_samples, 1)
        left = self.config.max_samples_per_pass - num_decodes - ones.sum()
        others = np.minimum(np.cumsum(num_samples - ones), left).astype(np.int32)  # up to each chunk
        return np.asarray(ones + np.diff(others, prepend=np.int32(0)), np.int32)
