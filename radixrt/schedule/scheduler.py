"""Decides what each pass computes: continuous batching with chunked prefill over a prefix cache.

The scheduler holds no memory (the cache does) and computes nothing (the runner does). It plans a pass while the
one before is still in flight, so it learns each sampled token one pass late: a request that has just sampled its
end token may be in one more pass, whose result for it is thrown away.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from memory_pool.slot_allocator import Slots
from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.errors import SchedulerError
from radixrt.output import FinishReason, TokenLogprob
from radixrt.schedule.batch import Logprobs, PassResult, ScheduleBatch
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy, admission_order, is_overdue
from radixrt.schedule.request import Request, RequestState

LOADED_CHUNKS = 4  # a pass waits for no more than about this many chunks of tokens from the host
PASSES_OF_ROOM = 4  # once requests must be retracted, make room for this many decode passes


@dataclass(frozen=True)
class _Piece:
    """One request's part of a pass: its tokens [start, start + len(slots)), and how many are sampled after."""

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

    def submit_all(self, requests: Iterable[Request]) -> None:
        """Queue requests that are known together.

        Under LPM they queue in lexicographic order of their tokens, the depth-first order of their radix tree:
        those that share a prefix come one after the other, which wants the least memory for the most hits (Zheng
        et al. 2024, theorem 3.1).
        """
        requests = list(requests)
        for request in requests:  # all or none
            self._check(request)
        if len({id(request) for request in requests}) < len(requests):
            raise ValueError("a request is submitted twice")
        if self.policy is SchedulePolicy.LPM:
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

    def next_batch(self) -> ScheduleBatch | None:
        """Plan a pass. None if nothing is left to do, or all of it waits for passes in flight.

        Raises:
            SchedulerError: requests wait, nothing is in flight, and still nothing can run.
        """
        batch = self._plan()
        alone = False
        while batch is None and self.has_work and not self.cache.in_flight:
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
            batch = self._plan()
        return batch

    def process(self, batch: ScheduleBatch, result: PassResult) -> list[Request]:
        """Book what a pass computed; passes are processed in order. Returns the requests that ended."""
        ended: list[Request] = []
        first_samples = np.cumsum(batch.num_samples) - batch.num_samples
        first_scored = np.cumsum(batch.num_scored) - batch.num_scored
        wanted = np.array([r.params.logprobs is not None for r in batch.requests]) * batch.num_samples
        first_logprob = np.cumsum(wanted) - wanted
        for i, request in enumerate(batch.requests):
            request.passes_in_flight -= 1
            if request.finished:
                continue
            holds = request.lease is batch.leases[i]  # False: retracted since; its token is good all the same
            if not result.finite[i]:
                why = "the model computed values that are not finite"
                if request.params.allowed_token_ids is not None or request.bad_words:
                    why += ", or allowed_token_ids and bad_words left no token to draw"
                self._end(request, FinishReason.ERROR, why)
                ended.append(request)
                continue
            if holds:
                request.computed = int(batch.seq_lens[i])
                if request.computed <= request.extend_end:
                    self.cache.commit(batch.leases[i], request.tokens(request.extend_end), request.computed)
            if batch.num_scored[i]:
                self._book_prompt_logprobs(request, batch, result, int(first_scored[i]), int(batch.num_scored[i]))
            if batch.num_samples[i]:
                request.samples_in_flight -= 1
                ended += self._book_samples(
                    request, result, int(first_samples[i]), int(first_logprob[i]), int(batch.num_samples[i])
                )
            elif holds and request.computed == request.extend_end and not request.max_new_tokens:
                self._end(request, FinishReason.LENGTH)
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
        return self._batch(self._limit_samples(pieces))

    def _limit_samples(self, pieces: list[_Piece]) -> list[_Piece]:
        """Leave to later passes the first tokens of answers for which this one has no rows of logits."""
        left = self.max_samples_per_pass - sum(piece.num_samples > 0 for piece in pieces)  # each samples one
        limited = []
        for piece in pieces:
            if piece.num_samples > 1:
                piece = replace(piece, num_samples=1 + min(piece.num_samples - 1, left))
                left -= piece.num_samples - 1
            limited.append(piece)
        return limited

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
            _Piece(r, lease, r.launched, slots[i : i + 1], 1)
            for i, (r, lease) in enumerate(zip(requests, leases, strict=True))
        ]

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
        slots = self.cache.extend(lease, count)
        if slots is None:
            return None
        is_last = request.launched + count == request.extend_end
        num_samples = request.num_answers if is_last and request.remaining else 0
        return _Piece(request, lease, request.launched, slots, num_samples)

    def _admissions(self, budget: int, promised: int) -> list[_Piece]:
        """Admit waiting requests while budget, rows and the memory that is not `promised` to others last."""
        pieces: list[_Piece] = []
        active = self._active()
        loads = LOADED_CHUNKS * self.chunked_prefill_size
        if budget <= 0 or not self.waiting or active >= self.max_running_requests:
            return pieces
        for request in admission_order(self.policy, self.waiting, self._match_length):
            if budget <= 0 or active >= self.max_running_requests or loads <= 0:
                break
            oldest = self.waiting[0]
            if request is not oldest and is_overdue(oldest):
                break
            if request.passes_in_flight:
                continue  # just retracted: what it has in flight is still to come
            tokens, limit = request.tokens(), request.match_limit
            if self.cache.is_awaited(self.cache.match(request.namespace, tokens, limit), tokens, limit):
                # A follower: its leader is computing what it needs next. Room is kept for it, or leaders of other
                # prefixes would evict this one before it comes.
                promised += self._estimate.expected(request)
                continue
            # Whoever runs alone runs to its end: submit has checked that it fits.
            reserve = promised + self._demand(request) - len(tokens) if self.running else 0
            lease = self.cache.acquire(request.namespace, tokens, limit, reserve)
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
            promised += self._demand(request) - len(piece.slots)
        return pieces

    def _demand(self, request: Request) -> int:
        """Slots that a request is still expected to ask for; its last token never wants one."""
        ahead = max(0, self._estimate.expected(request) - 1)
        return min(request.total + ahead, request.most_slots) - request.launched

    def _match_length(self, request: Request) -> int:
        """Tokens of a waiting request that are in the cache, looked up anew when the tree has changed."""
        seen = (self.cache.tree.version, request.num_known)
        if request.matched_at != seen:
            match = self.cache.match(request.namespace, request.tokens(), request.match_limit)
            request.matched_at, request.match_length = seen, match.length
        return request.match_length

    def _active(self) -> int:
        """Running requests that will be in another pass; the others only wait for their last token."""
        return sum(r.is_extending or r.remaining > 0 for r in self.running)

    def _leave_queue(self, request: Request) -> None:
        at = bisect.bisect_left(self.waiting, request.arrival, key=lambda r: r.arrival)
        while self.waiting[at] is not request:  # the answers to one prompt arrive together
            at += 1
        del self.waiting[at]

    def _batch(self, pieces: list[_Piece]) -> ScheduleBatch:
        pieces.sort(key=lambda p: len(p.slots) == 1)  # stable: the longer extends come first
        now = time.perf_counter()
        ids: list[np.ndarray] = []
        scored: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        first = 0  # of the piece's tokens among all
        for piece in pieces:
            request, end = piece.request, piece.end
            if end > request.num_known:  # the token at its end is known to the device alone
                ids.append(np.array([-(piece.lease.row + 1)], dtype=np.int32))
            else:
                ids.append(request.tokens(end)[piece.start :])
            positions = _scored_positions(piece)
            scored.append(positions - piece.start + first)
            targets.append(request.tokens()[positions + 1])
            first += len(piece.slots)
            again = max(0, min(end, request.launched_ever) - piece.start)  # lost to a retraction
            request.recomputed_tokens += again
            self.cache.count(recomputed=again)
            request.launched = end
            request.launched_ever = max(request.launched_ever, end)
            request.samples_in_flight += piece.num_samples > 0
            request.passes_in_flight += 1
            if request.launched_at is None:
                request.launched_at = now
        return ScheduleBatch(
            requests=tuple(p.request for p in pieces),
            leases=tuple(p.lease for p in pieces),
            num_extends=sum(len(p.slots) > 1 for p in pieces),
            req_pool_indices=np.array([p.lease.row for p in pieces], dtype=np.int32),
            prefix_lens=np.array([p.start for p in pieces], dtype=np.int32),
            seq_lens=np.array([p.end for p in pieces], dtype=np.int32),
            input_ids=np.concatenate(ids),
            out_cache_loc=np.concatenate([p.slots for p in pieces]),
            num_samples=np.array([p.num_samples for p in pieces], dtype=np.int32),
            scored=np.concatenate(scored).astype(np.int32),
            scored_targets=np.concatenate(targets),
            num_scored=np.array([len(s) for s in scored], dtype=np.int32),
            row_changes=self.cache.rows.take_changes(),
            admitted=tuple((p.lease.row, p.request) for p in pieces if p.start == p.lease.matched),
        )

    # -- the life of a request -----------------------------------------------------------------------------

    def _admit(self, request: Request, lease: Lease) -> None:
        request.state = RequestState.RUNNING
        request.lease = lease
        request.extend_end = request.num_known
        request.launched = request.computed = lease.matched
        self.running.append(request)

    def _book_samples(
        self, request: Request, result: PassResult, first: int, first_logprob: int, count: int
    ) -> list[Request]:
        """Book `count` samples of a request: one, or the first ones of its answers. Returns who ended."""
        forked = tuple(request.fork(k) for k in range(1, request.num_answers))
        if forked:
            request.children = forked
        for child in forked:
            bisect.insort(self.waiting, child, key=lambda r: r.arrival)
        ended = []
        for k, one in enumerate((request, *forked)[:count]):
            token_id, num_top = int(result.token_ids[first + k]), one.params.logprobs
            if result.logprobs is not None and num_top is not None:
                one.logprobs.append(_logprob(result.logprobs, first_logprob + k, token_id, num_top))
            reason = self._book_token(one, token_id)
            if reason is not None:
                self._end(one, reason)
                ended.append(one)
        return ended

    def _book_token(self, request: Request, token_id: int) -> FinishReason | None:
        """Append a sampled token. Returns why the request ends with it, if it does."""
        request.append(token_id)
        if request.first_token_at is None:
            request.first_token_at = time.perf_counter()
        if token_id in request.stop_ids:
            request.matched = token_id
            return FinishReason.STOP
        if request.text_stop is not None and request.text_stop.push(token_id):
            request.matched = request.text_stop.matched
            return FinishReason.STOP
        if request.num_output >= request.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _book_prompt_logprobs(
        self, request: Request, batch: ScheduleBatch, result: PassResult, first: int, count: int
    ) -> None:
        logprobs, num_top = result.prompt_logprobs, request.params.prompt_logprobs
        assert logprobs is not None  # the batch asked for them
        assert num_top is not None  # and so did the request
        for i in range(first, first + count):
            request.prompt_logprobs.append(_logprob(logprobs, i, int(batch.scored_targets[i]), num_top))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.state is RequestState.RUNNING:
            self._let_go(request)
        else:
            self._leave_queue(request)
        if request.num_output:
            self._estimate.ended(request)
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


def _scored_positions(piece: _Piece) -> np.ndarray:
    """Positions of a piece's tokens after which the prompt's next token is to be scored: int64, ascending."""
    scored = piece.request.next_scored
    if scored is None:
        return np.zeros(0, dtype=np.int64)
    # A pass before this one, still in flight, may score some of them: positions are launched once, in order.
    return np.arange(max(piece.start, scored - 1), min(piece.end, piece.request.prompt_len - 1))


def _logprob(logprobs: Logprobs, i: int, token_id: int, num_top: int) -> TokenLogprob:
    top = zip(logprobs.top_ids[i, :num_top].tolist(), logprobs.top[i, :num_top].tolist(), strict=True)
    return TokenLogprob(token_id, float(logprobs.chosen[i]), int(logprobs.ranks[i]), tuple(top))
