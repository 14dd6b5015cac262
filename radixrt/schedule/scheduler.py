"""Decides what each pass computes: continuous batching with chunked prefill over a prefix cache.

The scheduler holds no memory (the cache does) and computes nothing (the runner does). It plans a pass while the
one before is still in flight, so it learns each sampled token one pass late: a request that has just sampled its
end token may be in one more pass, whose result for it is thrown away.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from memory_pool.slot_allocator import Slots
from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.errors import SchedulerError
from radixrt.output import FinishReason, TokenLogprob
from radixrt.schedule.booking import Booking
from radixrt.schedule.decodes import Decodes
from radixrt.schedule.passes import Int32Array, Logprobs, Pass, PassResult
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy, admission_order, is_overdue
from radixrt.schedule.progress import Progress
from radixrt.schedule.request import Request, RequestState
from radixrt.schedule.sampling_table import SamplingTable, prepare_sampling

LOADED_CHUNKS = 4  # a pass waits for no more than about this many chunks of tokens from the host
PASSES_OF_ROOM = 4  # once requests must be retracted, make room for this many decode passes

_NO_TOKENS = np.zeros(0, dtype=np.int32)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Piece:
    """An extend's part of a pass: its tokens [start, start + len(slots)), and how many are sampled after."""

    request: Request
    lease: Lease
    start: int
    slots: Slots
    num_samples: int

    @property
    def end(self) -> int:
        return self.start + len(self.slots)


class Scheduler:
    """Admits, extends, decodes, retracts and ends requests.

    Args:
        cache: prefixes, rows and slots.
        max_running_requests: requests that run at once.
        chunked_prefill_size: tokens of prompts that one pass computes at most; longer ones take several passes.
        policy: order of admission.
        max_samples_per_pass: tokens that one pass samples at most, each from a row of logits of its own; at least
            max_running_requests, since every request that runs may sample one. None is twice that: as many again
            for the first tokens of n answers. Answers beyond it compute the prompt's last token once more.

    Raises:
        ValueError: max_samples_per_pass is less than max_running_requests.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_running_requests: int,
        chunked_prefill_size: int,
        policy: SchedulePolicy = SchedulePolicy.LPM,
        max_samples_per_pass: int | None = None,
    ) -> None:
        if max_samples_per_pass is None:
            max_samples_per_pass = 2 * max_running_requests
        if max_samples_per_pass < max_running_requests:
            raise ValueError(
                f"max_samples_per_pass is {max_samples_per_pass}; it must be at least max_running_requests, "
                f"{max_running_requests}"
            )
        self.cache = cache
        self.max_running_requests = max_running_requests
        self.chunked_prefill_size = chunked_prefill_size
        self.policy = policy
        self.max_samples_per_pass = max_samples_per_pass
        self.waiting: list[Request] = []  # in order of arrival
        self.running: list[Request] = []  # in order of admission
        self.num_retractions = 0
        rows = cache.rows
        self._progress = Progress(rows.max_requests, rows.max_context_len, cache.allocated_lens)
        self._sampling = SamplingTable(rows.max_requests)
        self._estimate = OutputEstimate()
        self._arrivals = 0
        # Who decodes and who extends: found anew when a request comes or goes, has extended or has launched all.
        self._decodes = Decodes.of(())
        self._extends: tuple[Request, ...] = ()
        self._is_current = True
        self._decodes_last = 0  # passes, if each decodes all of them

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

    def submit_all(self, requests: Iterable[Request], *, in_order: bool = False) -> None:
        """Queue requests that are known together.

        Under LPM they queue in lexicographic order of their tokens, the depth-first order of their radix tree:
        those that share a prefix come one after the other, which wants the least memory for the most hits (Zheng
        et al. 2024, theorem 3.1). With `in_order` they queue as they are given, and are served first come, first
        served: for who has planned that.
        """
        requests = list(requests)
        for request in requests:  # all or none
            self._check(request)
        if len({id(request) for request in requests}) < len(requests):
            raise ValueError("a request is submitted twice")
        if in_order:
            for request in requests:
                request.in_order = True
        elif self.policy is SchedulePolicy.LPM:
            requests = sorted(requests, key=lambda r: r.tokens().astype(">i4").tobytes())
        for request in requests:
            self.submit(request)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run (`refusal` says why), or it was submitted before.
        """
        self._check(request)
        request.arrival = self._arrivals
        request.submitted_at = time.perf_counter()
        self._arrivals += 1
        self.waiting.append(request)

    def _check(self, request: Request) -> None:
        if request.arrival >= 0:
            raise ValueError(f"request {request.index} was submitted before")
        refusal = self.refusal(request)
        if refusal is not None:
            raise ValueError(f"request {request.index} {refusal}")

    # -- one pass ------------------------------------------------------------------------------------------

    def next_pass(self) -> Booking | None:
        """Plan a pass. None if nothing is left to do, or all of it waits for passes in flight.

        Raises:
            SchedulerError: requests wait, nothing is in flight, and still nothing can run.
        """
        booking = self._plan()
        alone = False
        while booking is None and self.has_work and not self.cache.in_flight:
            # Running requests hold all memory, and none has what it needs for its next token: the latest yields.
            # Where nothing runs, planning anew succeeds unless slots were refused that should be there.
            if self.running:
                self.retract(max(self.running, key=lambda r: r.arrival))
            elif alone:
                raise SchedulerError(
                    f"{len(self.waiting)} requests wait and none can be admitted: {self.cache.stats()}"
                )
            else:
                alone = True
            booking = self._plan()
        return booking

    def process(self, booking: Booking, result: PassResult) -> list[Request]:
        """Book what a pass computed; passes are processed in order. Returns the requests that ended."""
        batch = booking.pass_
        progress, rows = self._progress, batch.req_pool_indices
        first_samples = np.cumsum(batch.num_samples, dtype=np.int32) - batch.num_samples
        # The tokens of requests that still run and decode are booked together; no row has changed hands by now.
        together = progress.runs[rows] & result.finite & (batch.prefix_lens >= progress.extend_end[rows])
        decoded = rows[together]
        alone = np.ones(len(rows), dtype=bool)  # who is to be looked at
        alone[together] = progress.append(decoded, result.token_ids[first_samples[together]])
        alone |= progress.is_special[rows]
        ended: list[Request] = []
        if not alone.any():
            return ended
        first_scored = np.cumsum(batch.num_scored) - batch.num_scored
        num_logprobs = np.where(progress.wants_logprobs[rows], batch.num_samples, 0)
        first_logprobs = np.cumsum(num_logprobs) - num_logprobs
        for i in np.flatnonzero(alone).tolist():
            request = booking.requests[i]
            if together[i]:
                if self._ends_with(request, int(request.tokens()[-1]), result, int(first_logprobs[i])):
                    ended.append(request)
                continue
            if request.finished:
                continue
            holds = request.lease is booking.leases[i]  # False: retracted since; its token is good all the same
            if not result.finite[i]:
                why = "the model computed values that are not finite"
                if request.params.allowed_token_ids is not None or request.bad_words:
                    why += ", or allowed_token_ids and bad_words left no token to draw"
                self._end(request, FinishReason.ERROR, why)
                ended.append(request)
                continue
            if holds and batch.prefix_lens[i] < request.extend_end:
                progress.extended[rows[i]] = batch.seq_lens[i]
                self.cache.commit(booking.leases[i], request.tokens(request.extend_end), request.computed)
            if batch.num_scored[i]:
                self._book_prompt_logprobs(request, batch, result, int(first_scored[i]), int(batch.num_scored[i]))
            if batch.num_samples[i]:
                samples = slice(int(first_samples[i]), int(first_samples[i] + batch.num_samples[i]))
                ended += self._book_samples(request, result, samples, int(first_logprobs[i]))
            elif holds and request.computed == request.extend_end and not request.max_new_tokens:
                self._end(request, FinishReason.LENGTH)
                ended.append(request)
        return ended

    def fail(self, booking: Booking, cause: Exception) -> list[Request]:
        """End the requests of a pass that raised. Returns them."""
        ended = [r for r in booking.requests if not r.finished]
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
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    # -- planning ------------------------------------------------------------------------------------------

    def _plan(self) -> Booking | None:
        retractions = self.num_retractions
        decodes, slots = self._decode()
        pieces: list[_Piece] = []
        budget = self.chunked_prefill_size
        active = len(self._decodes) + len(self._extends)  # the other running requests only wait for a last token
        for request in self._extends:
            piece = self._chunk(request, budget) if budget > 0 else None
            if piece is not None:
                pieces.append(piece)
                budget -= len(piece.slots)
        # Whoever has just yielded does not come back at once.
        may_admit = self.waiting and budget > 0 and active < self.max_running_requests
        if may_admit and self.num_retractions == retractions:
            pieces += self._admissions(budget, active)
        if not pieces and not decodes:
            return None
        self._estimate.pass_scheduled()
        return self._booked(decodes, slots, self._limit_samples(pieces, len(decodes)))

    def _limit_samples(self, pieces: list[_Piece], num_decodes: int) -> list[_Piece]:
        """Leave to later passes the first tokens of answers for which this one has no rows of logits."""
        # Each samples one.
        left = self.max_samples_per_pass - num_decodes - sum(piece.num_samples > 0 for piece in pieces)
        limited = []
        for piece in pieces:
            if piece.num_samples > 1:
                piece = replace(piece, num_samples=1 + min(piece.num_samples - 1, left))
                left -= piece.num_samples - 1
            limited.append(piece)
        return limited

    def _look_who_decodes(self) -> None:
        """Find out who decodes and who extends in the next pass, unless that is known."""
        if self._is_current and self._decodes_last > 0:
            return
        running, rows, progress = self.running, self._running_rows(), self._progress
        extends = progress.launched[rows] < progress.extend_end[rows]
        left = progress.limit[rows] - progress.total(rows)
        decodes = ~extends & (left > 0)
        self._extends = tuple(compress(running, extends.tolist()))
        found = Decodes.of(tuple(compress(running, decodes.tolist())))
        if (found.requests, found.leases) != (self._decodes.requests, self._decodes.leases):
            self._decodes = found
        self._decodes_last = int(left[decodes].min()) if decodes.any() else 0
        self._is_current = True

    def _running_rows(self) -> Int32Array:
        leases = [request.lease for request in self.running]
        return np.fromiter((lease.row for lease in leases if lease is not None), np.int32, len(leases))

    def _decode(self) -> tuple[Decodes, Slots]:
        """Who decodes in this pass, and a slot for each."""
        self._look_who_decodes()
        decodes = self._decodes
        if len(decodes) > self.cache.available:
            self._make_room(len(decodes))
            self._look_who_decodes()
            decodes = self._decodes.first(self.cache.available)
        slots = self.cache.extend_each(decodes.rows)
        if slots is None:
            return Decodes.of(()), _NO_TOKENS
        self._decodes_last -= 1
        return decodes, slots

    def _make_room(self, per_pass: int) -> None:
        """Retract the latest arrivals until what is, or is about to be, available lasts for a few passes."""
        if self.cache.available + self.cache.incoming >= per_pass:
            return  # enough is on its way: those that get no slot sit out a pass
        by_arrival = sorted(self.running, key=lambda r: r.arrival)
        self._estimate.fell_short()
        while len(by_arrival) > 1 and self.cache.available + self.cache.incoming < per_pass * PASSES_OF_ROOM:
            self.retract(by_arrival.pop())

    def _chunk(self, request: Request, budget: int) -> _Piece | None:
        """The next tokens of an extend: as many as the budget allows. None if there are no slots for them."""
        lease = request.lease
        assert lease is not None  # it runs
        count = min(budget, request.extend_end - request.launched)
        start = request.launched
        slots = self.cache.extend(lease, count)
        if slots is None:
            return None
        self._is_current = False
        samples = start + count == request.extend_end and request.num_known < request.limit
        return _Piece(request, lease, start, slots, request.num_answers if samples else 0)

    def _admissions(self, budget: int, active: int) -> list[_Piece]:
        """Admit waiting requests while budget, rows and the memory that is not promised to others last.

        `active` requests run that are in this pass or in one to come.
        """
        pieces: list[_Piece] = []
        promised = self._promised()
        loads = LOADED_CHUNKS * self.chunked_prefill_size
        for request in admission_order(self.policy, self.waiting, self._match_length):
            if budget <= 0 or active >= self.max_running_requests or loads <= 0:
                break
            oldest = self.waiting[0]
            if request is not oldest and is_overdue(oldest):
                break
            if request.let_go_at > self.cache.passes_ended:
                continue  # just retracted: what it has in flight is still to come
            pending_match = self._pending_match(request)
            if pending_match.has_leader():
                # A follower: its leader is computing what it needs next. Room is kept for the rest of it, or
                # leaders of other prefixes would take that, and evict this prefix before it comes.
                promised += max(0, self._demand(request) - pending_match.leader_match_len())
                continue
            tokens = request.tokens()
            # Whoever runs alone runs to its end: submit has checked that it fits.
            reserve = promised + self._demand(request) - len(tokens) if self.running else 0
            lease = self.cache.acquire(request.namespace, tokens, pending_match.match(), reserve)
            if lease is None:
                break
            loads -= lease.loaded
            self._admit(request, lease)
            piece = self._chunk(request, budget)
            if piece is None:
                self._let_go(request)
                request.state = RequestState.WAITING
                break
            if request is not oldest:
                oldest.overtaken += 1
            self._leave_queue(request)
            active += 1
            if request.cached_tokens is None:  # hits are counted once, at the first admission
                request.cached_tokens = lease.matched
                self.cache.count(prompt=request.prompt_len, cached=lease.matched)
            pieces.append(piece)
            budget -= len(piece.slots)
            promised += self._demand(request)
        return pieces

    def _promised(self) -> int:
        """Slots that all running requests are still expected to ask for: the sum of their demands."""
        progress, rows = self._progress, self._running_rows()
        total, limit, prompt_len = progress.total(rows), progress.limit[rows], progress.prompt_len[rows]
        num_output = progress.known[rows] - prompt_len
        expected = self._estimate.expected_each(limit - total, num_output, progress.may_stop[rows])
        most_slots = np.maximum(limit - 1, prompt_len)
        demand = np.minimum(total + np.maximum(0, expected - 1), most_slots) - progress.launched[rows]
        return int(demand.sum())

    def _demand(self, request: Request) -> int:
        """Slots that a request is still expected to ask for; its last token never wants one."""
        ahead = max(0, self._estimate.expected(request) - 1)
        return min(request.total + ahead, request.most_slots) - request.launched

    def _match_length(self, request: Request) -> int:
        """Tokens of a waiting request that are in the cache."""
        return self._pending_match(request).length()

    def _pending_match(self, request: Request) -> PendingMatch:
        """What a waiting request would find in the cache; its tokens and its limit are what they were."""
        if request.pending_match is None:
            request.pending_match = PendingMatch(
                self.cache, request.namespace, request.tokens(), request.match_limit
            )
        return request.pending_match

    def _leave_queue(self, request: Request) -> None:
        at = bisect.bisect_left(self.waiting, request.arrival, key=lambda r: r.arrival)
        while self.waiting[at] is not request:  # the answers to one prompt arrive together
            at += 1
        del self.waiting[at]

    def _booked(self, decodes: Decodes, slots: Slots, pieces: list[_Piece]) -> Booking:
        """A pass of decodes with their slots, and of pieces."""
        progress, rows = self._progress, decodes.rows
        ends = progress.launched[rows]
        starts = ends - 1
        # The token at a decode's end may be known to the device alone.
        are_unknown = starts >= progress.known[rows]
        ids = decodes.last_tokens
        if not are_unknown.all():
            ids = np.where(are_unknown, ids, progress.tokens[rows, starts])
        if not pieces:
            pass_ = Pass(
                num_extends=0,
                req_pool_indices=rows,
                prefix_lens=starts,
                seq_lens=ends,
                input_ids=ids,
                out_cache_loc=slots,
                num_samples=decodes.num_samples,
                scored=_NO_TOKENS,
                scored_targets=_NO_TOKENS,
                num_scored=decodes.num_scored,
                row_changes=self.cache.rows.take_changes(),
                sampling=prepare_sampling(self._sampling, decodes.requests, rows, ends, decodes.num_samples),
            )
            return Booking(pass_, decodes.requests, decodes.leases)
        pieces.sort(key=lambda p: len(p.slots) == 1)  # stable: the longer extends come first, then the decodes
        longer = sum(len(p.slots) > 1 for p in pieces)

        def column(values: Iterable[int], of_decodes: Int32Array) -> Int32Array:
            of_pieces = np.fromiter(values, np.int32, len(pieces))
            return np.concatenate([of_pieces[:longer], of_decodes, of_pieces[longer:]])

        def tokens(values: list[Int32Array], of_decodes: Int32Array) -> Int32Array:
            return np.concatenate([*values[:longer], of_decodes, *values[longer:]])

        requests, leases = [p.request for p in pieces], [p.lease for p in pieces]
        positions = [_scored_positions(p) for p in pieces]
        lengths = [len(p.slots) for p in pieces]
        firsts = np.cumsum(lengths) - lengths  # of each piece's tokens among all
        firsts[longer:] += len(decodes)
        self._count_launches(pieces)
        all_requests = (*requests[:longer], *decodes.requests, *requests[longer:])
        all_leases = (*leases[:longer], *decodes.leases, *leases[longer:])
        req_pool_indices = column((p.lease.row for p in pieces), rows)
        seq_lens = column((p.end for p in pieces), ends)
        num_samples = column((p.num_samples for p in pieces), decodes.num_samples)
        pass_ = Pass(
            num_extends=longer,
            req_pool_indices=req_pool_indices,
            prefix_lens=column((p.start for p in pieces), starts),
            seq_lens=seq_lens,
            input_ids=tokens([p.request.tokens(p.end)[p.start :] for p in pieces], ids),
            out_cache_loc=tokens([p.slots for p in pieces], slots),
            num_samples=num_samples,
            scored=np.concatenate(
                [
                    _NO_TOKENS,
                    *(
                        at - p.start + first
                        for p, at, first in zip(pieces, positions, firsts, strict=True)
                        if len(at)
                    ),
                ],
                dtype=np.int32,
                casting="same_kind",
            ),
            scored_targets=np.concatenate(
                [
                    _NO_TOKENS,
                    *(p.request.tokens()[at + 1] for p, at in zip(pieces, positions, strict=True) if len(at)),
                ]
            ),
            num_scored=column(map(len, positions), decodes.num_scored),
            num_top_scored=max((p.request.params.prompt_logprobs or 0 for p in pieces), default=0),
            row_changes=self.cache.rows.take_changes(),
            sampling=prepare_sampling(self._sampling, all_requests, req_pool_indices, seq_lens, num_samples),
            extended_tokens=sum(lengths),
        )
        return Booking(pass_, all_requests, all_leases)

    def _count_launches(self, pieces: list[_Piece]) -> None:
        """Count what is launched again. A decode computes what was never launched before."""
        now = time.perf_counter()
        for piece in pieces:
            request = piece.request
            again = max(0, min(piece.end, request.launched_before) - piece.start)  # lost to a retraction
            request.recomputed_tokens += again
            self.cache.count(recomputed=again)
            if request.launched_at is None:
                request.launched_at = now

    # -- the life of a request -----------------------------------------------------------------------------

    def _admit(self, request: Request, lease: Lease) -> None:
        request.state = RequestState.RUNNING
        request.run(lease, self._progress)
        self._sampling.admit(lease.row, request)
        self.running.append(request)
        self._is_current = False

    def _book_samples(
        self, request: Request, result: PassResult, samples: slice, first_logprob: int
    ) -> list[Request]:
        """Book samples of a request: one, or the first ones of its answers. Returns who ended.

        `first_logprob` is the row of the first one's log-probability, if they are wanted.
        """
        forked = tuple(request.fork(k) for k in range(1, request.num_answers))
        if forked:
            request.children = forked
        for child in forked:
            bisect.insort(self.waiting, child, key=lambda r: r.arrival)
        ended = []
        token_ids = result.token_ids[samples].tolist()
        for k, (one, token_id) in enumerate(zip((request, *forked), token_ids, strict=False)):
            self._book_token(one, token_id)
            if self._ends_with(one, token_id, result, first_logprob + k):
                ended.append(one)
        return ended

    def _book_token(self, request: Request, token_id: int) -> None:
        """Append a sampled token."""
        request.append(token_id)
        if request.first_token_at is None:
            request.first_token_at = time.perf_counter()

    def _ends_with(self, request: Request, token_id: int, result: PassResult, logprob: int) -> bool:
        """Book what is told of a request's latest token. Whether the request has ended with it.

        `logprob` is the row of its log-probability, if that is wanted.
        """
        num_top = request.params.logprobs
        if result.logprobs is not None and num_top is not None:
            request.logprobs.append(_logprob(result.logprobs, logprob, token_id, num_top))
        try:
            reason = self._why_ended(request, token_id)
        except Exception as error:  # of its text: one request's must not cost the others theirs
            _log.exception("the text of request %d cannot be made", request.index)
            self._end(request, FinishReason.ERROR, f"no text can be made of its answer: {error}")
            return True
        if reason is None:
            return False
        self._end(request, reason)
        return True

    def _why_ended(self, request: Request, token_id: int) -> FinishReason | None:
        """Why a request ends with its latest token, if it does."""
        if token_id in request.stop_ids:
            request.matched = token_id
            return FinishReason.STOP
        if request.text_stop is not None and request.text_stop.push(token_id):
            request.matched = request.text_stop.matched
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_output >= request.max_new_tokens else None

    def _book_prompt_logprobs(
        self, request: Request, batch: Pass, result: PassResult, first: int, count: int
    ) -> None:
        logprobs, num_top = result.prompt_logprobs, request.params.prompt_logprobs
        assert logprobs is not None  # the batch asked for them
        assert num_top is not None  # and so did the request
        for i in range(first, first + count):
            request.prompt_logprobs.append(_logprob(logprobs, i, int(batch.scored_targets[i]), num_top))
        request.pending_match = None  # more of it may come from the cache now

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.state is RequestState.RUNNING:
            # `keep` leaves out requests before it that still wait: rarely, for it has overtaken them.
            overtaken = bool(self.waiting) and self.waiting[0].arrival <= request.arrival
            self._let_go(request, None if overtaken else request.keep)
        else:
            self._leave_queue(request)
        if request.num_output:
            self._estimate.ended(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        request.finished_at = time.perf_counter()

    def _let_go(self, request: Request, keep: int | None = None) -> None:
        """Publish what a running request has computed, at most `keep` tokens, and release all it holds."""
        lease = request.lease
        assert lease is not None  # it runs
        published = request.computed if keep is None else min(request.computed, keep)
        self.cache.commit(lease, request.tokens(published), published)
        self.cache.release(lease, keep)
        self.running.remove(request)
        request.cease()
        request.let_go_at = self.cache.passes_launched
        self._is_current = False


def _scored_positions(piece: _Piece) -> np.ndarray:
    """Positions of a piece's tokens after which the prompt's next token is to be scored, ascending."""
    scored = piece.request.next_scored
    if scored is None:
        return _NO_TOKENS
    # A pass before this one, still in flight, may score some of them: positions are launched once, in order.
    return np.arange(max(piece.start, scored - 1), min(piece.end, piece.request.prompt_len - 1))


def _logprob(logprobs: Logprobs, i: int, token_id: int, num_top: int) -> TokenLogprob:
    top = zip(logprobs.top_ids[i, :num_top].tolist(), logprobs.top[i, :num_top].tolist(), strict=True)
    return TokenLogprob(token_id, float(logprobs.chosen[i]), int(logprobs.ranks[i]), tuple(top))
