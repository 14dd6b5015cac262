"""Decides what each pass computes: continuous batching with chunked prefill over a prefix cache.

The scheduler holds no memory (the cache does) and computes nothing (the runner does). It plans a pass while the
one before is in flight, so it learns each sampled token one pass late: an answer that has just sampled its end
token may be in one more pass, whose result for it is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import compress

import numpy as np

from memory_pool.slot_allocator import Slots
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.errors import SchedulerError
from radixrt.output import FinishReason
from radixrt.schedule.admission import Admission
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.booking import Booking, Bookkeeper
from radixrt.schedule.composer import DecodeGroup, ExtendChunk, compose
from radixrt.schedule.passes import PassResult
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy, SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.roster import Roster


class Scheduler:
    """Admits, extends, decodes, retracts and ends answers: `waiting` by arrival, `running` by admission."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        self.cache, self.config = cache, config
        self._roster = Roster(cache)
        self.waiting, self.running = self._roster.waiting, self._roster.running
        self._estimate = OutputEstimate()
        self._admission = Admission(cache, self._roster, config, self._estimate)
        self._bookkeeper = Bookkeeper(cache, self._roster, self._estimate)
        self._arrivals = 0
        # Which answers decode and which extend: found anew after a change of the running ones, after a chunk, and
        # once a decoding answer has launched its last token.
        self._decodes = DecodeGroup.of(())
        self._extends: tuple[Answer, ...] = ()
        self._grouped_at = 0  # `Roster.changes` then
        self._passes_left = 0  # until one of the decodes has launched its last token

    @property
    def num_retractions(self) -> int:
        return self._roster.num_retractions

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def refusal(self, request: Request) -> str | None:
        """Why a request can never run, or None if it can."""
        if request.max_slots > self.cache.slots.capacity:
            return (
                f"needs up to {request.max_slots} KV slots ({request.prompt_len} prompt tokens + max_new_tokens "
                f"{request.max_new_tokens} - 1), but the pool has {self.cache.slots.capacity}: shorten it, lower "
                "max_new_tokens, or raise max_total_tokens or memory_fraction"
            )
        return None

    def submit_all(self, requests: Iterable[Request], *, in_order: bool = False) -> list[Answer]:
        """Queue requests that are known together, all or none. Returns the first answer of each.

        Under LPM they queue in lexicographic order of their tokens, the depth-first order of their radix tree:
        those that share a prefix come one after the other, which wants the least memory for the most hits (Zheng
        et al. 2024, theorem 3.1). With `in_order` they are served first come, first served, as they are given.

        Raises:
            ValueError: one can never run; `refusal` says why.
        """
        requests = list(requests)
        for request in requests:
            if (refusal := self.refusal(request)) is not None:
                raise ValueError(f"request {request.index} {refusal}")
        now = time.perf_counter()
        answers = queued = [Answer(request, -1, RequestLog(submitted_at=now), in_order) for request in requests]
        if self.config.policy is SchedulePolicy.LPM and not in_order:
            queued = sorted(answers, key=lambda answer: answer.request.prompt_ids.astype(">i4").tobytes())
        for answer in queued:
            answer.arrival = self._arrivals
            self._arrivals += 1
        self.waiting.extend(queued)
        return answers

    def next_pass(self) -> Booking | None:
        """Plan a pass. None if nothing is left to do, or all of it waits for passes in flight.

        Raises SchedulerError where requests wait, nothing is in flight, and still nothing can run.
        """
        booking, planned_anew = self._plan(), False
        while booking is None and self.has_work and not self.cache.in_flight:
            # Running answers hold all memory, and none has what it needs for its next token: the latest yields.
            # Where nothing runs, planning anew succeeds unless slots were refused that should be there.
            if self.running:
                self.retract(max(self.running, key=lambda answer: answer.arrival))
            elif planned_anew:
                raise SchedulerError(
                    f"{len(self.waiting)} requests wait and none can be admitted: {self.cache.stats()}"
                )
            else:
                planned_anew = True
            booking = self._plan()
        return booking

    def process(self, booking: Booking, result: PassResult) -> list[Answer]:
        """Book what a pass computed; passes are processed in order. Returns the answers that ended."""
        return self._bookkeeper.process(booking, result)

    def fail(self, booking: Booking, cause: Exception) -> list[Answer]:
        """End the answers of a pass that raised. Returns them."""
        return self._bookkeeper.fail(booking, cause)

    def abort(self, answer: Answer) -> bool:
        """End an answer now; what it has computed stays in the cache. False if it had ended before."""
        if not answer.finished:
            self._bookkeeper.finish(answer, FinishReason.ABORT)
            return True
        return False

    def retract(self, answer: Answer) -> None:
        """Take a running answer back to its place in the queue. Its output stays, its KV becomes evictable."""
        self._roster.retract(answer)

    def _plan(self) -> Booking | None:
        retractions, budget = self.num_retractions, self.config.chunked_prefill_size
        decodes, slots = self._decode()
        # Other running answers only wait for their last token.
        places = self.config.max_running_requests - len(self._decodes) - len(self._extends)
        chunks: list[ExtendChunk] = []
        for answer in self._extends:
            chunk = ExtendChunk.next_of(answer, self.cache, budget) if budget > 0 else None
            if chunk is not None:
                chunks.append(chunk)
                budget -= len(chunk.slots)
        if self.num_retractions == retractions:  # an answer that has just yielded does not come back at once
            chunks += self._admission.admit(budget, places)
        if not chunks and not decodes:
            return None
        self._estimate.pass_scheduled()
        if chunks:
            self._passes_left = 0
            chunks = self._limit_samples(chunks, len(decodes))
        roster, changes = self._roster, self.cache.rows.take_changes()
        return compose(chunks, decodes, slots, roster.table, roster.sampling, changes)

    def _limit_samples(self, chunks: list[ExtendChunk], num_decodes: int) -> list[ExtendChunk]:
        """Leave to later passes the first tokens of answers for which this one has no rows of logits."""
        left = self.config.max_samples - num_decodes - sum(chunk.num_samples > 0 for chunk in chunks)
        limited = []
        for chunk in chunks:
            if chunk.num_samples > 1:
                chunk = replace(chunk, num_samples=1 + min(chunk.num_samples - 1, left))
                left -= chunk.num_samples - 1
            limited.append(chunk)
        return limited

    def _decode(self) -> tuple[DecodeGroup, Slots]:
        """The answers that decode in this pass, and a slot for each."""
        self._group()
        if len(self._decodes) > self.cache.available:
            self._make_room(len(self._decodes))
            self._group()
        decodes = self._decodes
        if len(decodes) > self.cache.available:
            decodes = DecodeGroup.of(decodes.answers[: self.cache.available])
        slots = self.cache.extend_each(decodes.rows)
        if slots is None:
            return DecodeGroup.of(()), np.zeros(0, dtype=np.int32)
        self._passes_left -= 1
        return decodes, slots

    def _group(self) -> None:
        """Find out which answers decode and which extend in the next pass, unless that is known."""
        if self._grouped_at == self._roster.changes and self._passes_left > 0:
            return
        running, rows, table = self.running, self._roster.running_rows(), self._roster.table
        extends = table.allocated_lens[rows] < table.extend_lens[rows]
        remaining = table.max_lens[rows] - table.total_lens(rows)
        decodes = ~extends & (remaining > 0)
        self._extends = tuple(compress(running, extends.tolist()))
        found = DecodeGroup.of(tuple(compress(running, decodes.tolist())))
        if (found.answers, found.leases) != (self._decodes.answers, self._decodes.leases):
            self._decodes = found
        self._passes_left = int(remaining[decodes].min()) if decodes.any() else 0
        self._grouped_at = self._roster.changes

    def _make_room(self, per_pass: int) -> None:
        """Retract the latest arrivals until the slots available, or about to be, last for a few passes."""
        if self.cache.available + self.cache.incoming >= per_pass:
            return  # enough is on its way: decodes that get no slot sit out a pass
        by_arrival = sorted(self.running, key=lambda answer: answer.arrival)
        self._estimate.fell_short()
        wanted = per_pass * self.config.room_passes
        while len(by_arrival) > 1 and self.cache.available + self.cache.incoming < wanted:
            self.retract(by_arrival.pop())
