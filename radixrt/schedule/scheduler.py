"""Decides what each pass computes: continuous batching with chunked prefill over a prefix cache.

The scheduler holds no memory (the cache does) and computes nothing (the runner does). It plans a pass while the
one before is still in flight, so it learns each sampled token one pass late: a request that has just sampled its
end token may be in one more pass, whose result for it is thrown away.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass

import numpy as np

from memory_pool.slot_allocator import Slots
from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.errors import SchedulerError
from radixrt.output import FinishReason
from radixrt.schedule.batch import PassResult, ScheduleBatch
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy, admission_order, is_overdue
from radixrt.schedule.request import Request, RequestState

PASSES_OF_ROOM = 4  # once requests must be retracted, make room for this many decode passes


@dataclass(frozen=True)
class _Piece:
    """One request's part of a pass: its tokens [start, start + len(slots)), and whether one is sampled after."""

    request: Request
    lease: Lease
    start: int
    slots: Slots
    samples: bool


class Scheduler:
    """Admits, extends, decodes, retracts and ends requests.

    Args:
        cache: prefixes, rows and slots.
        max_running_requests: requests that run at once.
        chunked_prefill_size: tokens of prompts that one pass computes at most; longer ones take several passes.
        policy: order of admission.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_running_requests: int,
        chunked_prefill_size: int,
        policy: SchedulePolicy = SchedulePolicy.LPM,
    ) -> None:
        self.cache = cache
        self.max_running_requests = max_running_requests
        self.chunked_prefill_size = chunked_prefill_size
        self.policy = policy
        self.waiting: list[Request] = []  # in order of arrival
        self.running: list[Request] = []  # in order of admission
        self.num_retractions = 0
        self._estimate = OutputEstimate()
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def refusal(self, request: Request) -> str | None:
        """Why a request can never run, or None if it can."""
        if request.most_slots > self.cache.slots.capacity:
            return (
                f"needs up to {request.most_slots} KV slots ({request.prompt_len} prompt tokens + max_new_tokens "
                f"{request.max_new_tokens} - 1), but the pool has {self.cache.slots.capacity}: shorten it, lower "
                "max_new_tokens, or raise max_total_tokens or memory_fraction"
            )
        return None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run (`refusal` says why), or it was submitted before.
        """
        if request.arrival >= 0:
            raise ValueError(f"request {request.index} was submitted before")
        refusal = self.refusal(request)
        if refusal is not None:
            raise ValueError(f"request {request.index} {refusal}")
        request.arrival = self._arrivals
        request.submitted_at = time.perf_counter()
        self._arrivals += 1
        self.waiting.append(request)

    # -- one pass ------------------------------------------------------------------------------------------

    def next_batch(self) -> ScheduleBatch | None:
        """Plan a pass. None if nothing is left to do, or all of it waits for passes in flight.

        Raises:
            SchedulerError: requests wait, nothing is in flight, and still nothing can run.
        """
        batch = self._plan()
        alone = False
        while batch is None and self.has_work and not self.cache.in_flight:
            # Running requests hold all memory, and none has what it needs for its next token: the latest yields.
            if self.running:
                self.retract(max(self.running, key=lambda r: r.arrival))
            elif alone:
                raise SchedulerError(
                    f"{len(self.waiting)} requests wait and none can be admitted: {self.cache.stats()}"
                )
            else:
                alone = True
            batch = self._plan()
        return batch

    def process(self, batch: ScheduleBatch, result: PassResult) -> list[Request]:
        """Book what a pass computed; passes are processed in order. Returns the requests that ended."""
        ended: list[Request] = []
        for i, request in enumerate(batch.requests):
            if request.finished:
                continue
            holds = request.lease is batch.leases[i]  # False: retracted since; its token is good all the same
            if not result.finite[i]:
                self._end(request, FinishReason.ERROR, "the model computed values that are not finite")
                ended.append(request)
                continue
            if holds:
                request.computed = int(batch.seq_lens[i])
                if request.computed <= request.extend_end:
                    self.cache.commit(batch.leases[i], request.tokens(request.extend_end), request.computed)
            if batch.samples[i]:
                request.samples_in_flight -= 1
                reason = self._book_token(request, int(result.token_ids[i]))
                if reason is not None:
                    self._end(request, reason)
                    ended.append(request)
        return ended

    def fail(self, batch: ScheduleBatch, cause: Exception) -> list[Request]:
        """End the requests of a pass that raised. Returns them."""
        ended = [r for r in batch.requests if not r.finished]
        for request in ended:
            request.cause = cause
            self._end(request, FinishReason.ERROR, f"its pass failed: {type(cause).__name__}: {cause}")
        return ended

    def abort(self, request: Request) -> bool:
        """End a request now; what it has computed stays in the cache. False if it had ended before."""
        if request.finished:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    def retract(self, request: Request) -> None:
        """Take a running request back to its place in the queue. Its output stays, its KV becomes evictable."""
        self._let_go(request)
        request.state = RequestState.WAITING
        request.retractions += 1
        self.num_retractions += 1
        self._estimate.retracted()
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    # -- planning ------------------------------------------------------------------------------------------

    def _plan(self) -> ScheduleBatch | None:
        retractions = self.num_retractions
        pieces = self._decodes()
        budget = self.chunked_prefill_size
        for request in self.running:
            if budget > 0 and request.is_extending:
                piece = self._chunk(request, budget)
                if piece is not None:
                    pieces.append(piece)
                    budget -= len(piece.slots)
        if self.num_retractions == retractions:  # whoever has just yielded does not come back at once
            granted = sum(len(piece.slots) for piece in pieces)
            promised = sum(self._demand(request) for request in self.running) - granted
            pieces.extend(self._admissions(budget, promised))
        if not pieces:
            return None
        self._estimate.pass_scheduled()
        return self._batch(pieces)

    def _decodes(self) -> list[_Piece]:
        def ready() -> list[Request]:
            return [r for r in self.running if not r.is_extending and r.remaining > 0]

        requests = ready()
        if len(requests) > self.cache.available:
            self._make_room(len(requests))
            requests = ready()[: self.cache.available]
        leases = [r.lease for r in requests if r.lease is not None]
        slots = self.cache.extend_each(leases)
        if slots is None:
            return []
        return [
            _Piece(r, lease, r.launched, slots[i : i + 1], True)
            for i, (r, lease) in enumerate(zip(requests, leases, strict=True))
        ]

    def _make_room(self, per_pass: int) -> None:
        """Retract the latest arrivals until what is, or is about to be, available lasts for a few passes."""
        if self.cache.available + self.cache.incoming >= per_pass:
            return  # enough is on its way: those that get no slot sit out a pass
        by_arrival = sorted(self.running, key=lambda r: r.arrival)
        while len(by_arrival) > 1 and self.cache.available + self.cache.incoming < per_pass * PASSES_OF_ROOM:
            self.retract(by_arrival.pop())

    def _chunk(self, request: Request, budget: int) -> _Piece | None:
        """The next tokens of an extend: as many as the budget allows. None if there are no slots for them."""
        lease = request.lease
        assert lease is not None  # it runs
        count = min(budget, request.extend_end - request.launched)
        slots = self.cache.extend(lease, count)
        if slots is None:
            return None
        return _Piece(request, lease, request.launched, slots, request.launched + count == request.extend_end)

    def _admissions(self, budget: int, promised: int) -> list[_Piece]:
        """Admit waiting requests while budget, rows and the memory that is not `promised` to others last."""
        pieces: list[_Piece] = []
        if budget <= 0 or not self.waiting or len(self.running) >= self.max_running_requests:
            return pieces
        order = admission_order(
            self.policy, self.waiting, lambda r: self.cache.match(r.namespace, r.tokens()).length
        )
        for request in order:
            if budget <= 0 or len(self.running) >= self.max_running_requests:
                break
            oldest = self.waiting[0]
            if request is not oldest and is_overdue(oldest):
                break
            if request.samples_in_flight:
                continue  # just retracted: its last token is still to come
            tokens = request.tokens()
            if self.cache.is_awaited(self.cache.match(request.namespace, tokens), tokens):
                continue  # a follower: its leader is computing what it needs next
            # Whoever runs alone runs to its end: submit has checked that it fits.
            reserve = promised + self._demand(request) - len(tokens) if self.running else 0
            lease = self.cache.acquire(request.namespace, tokens, reserve)
            if lease is None:
                break
            self._admit(request, lease)
            piece = self._chunk(request, budget)
            if piece is None:
                self._let_go(request)
                request.state = RequestState.WAITING
                break
            if request is not oldest:
                oldest.overtaken += 1
            self.waiting.remove(request)
            if request.cached_tokens is None:  # hits are counted once, at the first admission
                request.cached_tokens = lease.matched
                self.cache.count(prompt=request.prompt_len, cached=lease.matched)
            pieces.append(piece)
            budget -= len(piece.slots)
            promised += self._demand(request) - len(piece.slots)
        return pieces

    def _demand(self, request: Request) -> int:
        """Slots that a request is still expected to ask for; its last token never wants one."""
        if request.remaining == 0:
            return 0
        return request.total - request.launched + self._estimate.expected(request) - 1

    def _batch(self, pieces: list[_Piece]) -> ScheduleBatch:
        pieces.sort(key=lambda p: len(p.slots) == 1)  # stable: the longer extends come first
        now = time.perf_counter()
        ids: list[np.ndarray] = []
        for piece in pieces:
            request, end = piece.request, piece.start + len(piece.slots)
            if end > request.num_known:  # the token at its end is known to the device alone
                ids.append(np.array([-(piece.lease.row + 1)], dtype=np.int32))
            else:
                ids.append(request.tokens(end)[piece.start :])
            again = max(0, min(end, request.launched_ever) - piece.start)  # lost to a retraction
            request.recomputed_tokens += again
            self.cache.count(recomputed=again)
            request.launched = end
            request.launched_ever = max(request.launched_ever, end)
            request.samples_in_flight += piece.samples
            if request.launched_at is None:
                request.launched_at = now
        return ScheduleBatch(
            requests=tuple(p.request for p in pieces),
            leases=tuple(p.lease for p in pieces),
            num_extends=sum(len(p.slots) > 1 for p in pieces),
            req_pool_indices=np.array([p.lease.row for p in pieces], dtype=np.int32),
            prefix_lens=np.array([p.start for p in pieces], dtype=np.int32),
            seq_lens=np.array([p.start + len(p.slots) for p in pieces], dtype=np.int32),
            input_ids=np.concatenate(ids),
            out_cache_loc=np.concatenate([p.slots for p in pieces]),
            samples=np.array([p.samples for p in pieces], dtype=np.bool_),
            row_changes=self.cache.rows.take_changes(),
        )

    # -- the life of a request -----------------------------------------------------------------------------

    def _admit(self, request: Request, lease: Lease) -> None:
        request.state = RequestState.RUNNING
        request.lease = lease
        request.extend_end = request.num_known
        request.launched = request.computed = lease.matched
        self.running.append(request)

    def _book_token(self, request: Request, token_id: int) -> FinishReason | None:
        """Append a sampled token. Returns why the request ends with it, if it does."""
        request.append(token_id)
        if request.first_token_at is None:
            request.first_token_at = time.perf_counter()
        if token_id in request.stop_ids:
            return FinishReason.STOP
        if request.num_output >= request.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.state is RequestState.RUNNING:
            self._let_go(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        request.finished_at = time.perf_counter()

    def _let_go(self, request: Request) -> None:
        """Publish what a running request has computed, and release all it holds."""
        lease = request.lease
        assert lease is not None  # it runs
        self.cache.commit(lease, request.tokens(request.computed), request.computed)
        self.cache.release(lease)
        self.running.remove(request)
        request.lease = None
        request.extend_end = request.launched = request.computed = 0
