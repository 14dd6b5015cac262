"""Whose a pass is, and how what it computed becomes tokens, log-probabilities and ends of answers."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.output import FinishReason, TokenLogprob
from radixrt.schedule.answer import Answer, AnswerState
from radixrt.schedule.passes import Int32Array, Logprobs, Pass, PassResult
from radixrt.schedule.policy import OutputEstimate
from radixrt.schedule.roster import Roster

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Booking:
    """A scheduled pass, the answer of each row, and its lease: positions count while the answer holds the same.

    While the same answers decode pass after pass, and nothing else is computed, the tuples are the same.
    """

    pass_: Pass
    answers: tuple[Answer, ...]
    leases: tuple[Lease, ...]


@dataclass(frozen=True)
class Bookkeeper:
    """Books what passes computed, and ends answers."""

    cache: PrefixCache
    roster: Roster
    estimate: OutputEstimate

    def process(self, booking: Booking, result: PassResult) -> list[Answer]:
        """Book what a pass computed; passes are processed in order. Returns the answers that ended."""
        pass_, table = booking.pass_, self.roster.table
        rows, first_samples = pass_.req_pool_indices, _firsts(pass_.num_samples)
        # Answers that still run and decoded one token are booked together; no row has changed hands by now.
        decoded = table.runs.take(rows) & result.finite & (pass_.prefix_lens >= table.extend_lens.take(rows))
        decoded &= pass_.num_samples == 1
        to_visit = np.ones(len(rows), dtype=bool)
        to_visit[decoded] = table.append(rows[decoded], result.token_ids[first_samples[decoded]])
        to_visit |= table.is_special.take(rows)
        ended: list[Answer] = []
        if not to_visit.any():
            return ended
        num_logprobs = np.where(table.wants_logprobs[rows], pass_.num_samples, 0)
        found = _Found(pass_, result, first_samples, _firsts(num_logprobs), _firsts(pass_.num_scored))
        for i in np.flatnonzero(to_visit).tolist():
            answer = booking.answers[i]
            if decoded[i]:
                if self._ends_with(answer, found.token_ids(i)[0], found, i):
                    ended.append(answer)
            elif not answer.finished:
                ended += self._book_row(answer, booking.leases[i], found, i)
        return ended

    def fail(self, booking: Booking, cause: Exception) -> list[Answer]:
        """End the answers of a pass that raised. Returns them."""
        ended = [answer for answer in booking.answers if not answer.finished]
        for answer in ended:
            answer.log.cause = cause
            self.finish(answer, FinishReason.ERROR, f"its pass failed: {type(cause).__name__}: {cause}")
        return ended

    def finish(self, answer: Answer, reason: FinishReason, error: str | None = None) -> None:
        """End an answer that waits or runs; what it has computed stays in the cache, if anybody may want it."""
        waiting, reusable_len = self.roster.waiting, answer.request.reusable_len
        if answer.state is AnswerState.WAITING:
            self.roster.leave_queue(answer)
        elif waiting and waiting[0].arrival <= answer.arrival:
            # `reusable_len` does not count requests before it that still wait: rarely are there any.
            self.roster.release(answer)
        else:
            self.roster.release(answer, reusable_len)
        if answer.num_output:
            self.estimate.ended(answer.num_output)
        answer.state = AnswerState.FINISHED
        answer.log.finish_reason, answer.log.error = reason, error
        answer.log.finished_at = time.perf_counter()

    def _book_row(self, answer: Answer, lease: Lease, found: _Found, i: int) -> list[Answer]:
        """Book row `i` of a pass on its own. Returns the answers that ended."""
        request = answer.request
        if not found.result.finite[i]:
            error = "the model computed values that are not finite"
            if request.params.allowed_token_ids is not None or request.bad_words:
                error += ", or allowed_token_ids and bad_words left no token to draw"
            self.finish(answer, FinishReason.ERROR, error)
            return [answer]
        token_ids, holds = found.token_ids(i), answer.lease is lease
        if holds:  # else it was retracted since; its tokens are good all the same
            self._book_positions(answer, lease, found.pass_, i, len(token_ids))
        if scored := found.prompt_logprobs(i, request.params.prompt_logprobs or 0):
            answer.log.prompt_logprobs += scored
            answer.pending_match = None  # more of it may come from the cache now
        ended = self._book_tokens(answer, token_ids, found, i)
        if holds and not request.max_new_tokens and answer.progress.computed_len == request.prompt_len:
            self.finish(answer, FinishReason.LENGTH)
            ended.append(answer)
        return ended

    def _book_positions(self, answer: Answer, lease: Lease, pass_: Pass, i: int, accepted: int) -> None:
        """Book what was computed of an extend, or take back what a decode computed for drafts in vain."""
        start, end = int(pass_.prefix_lens[i]), int(pass_.seq_lens[i])
        if start < answer.progress.extend_len:
            self.roster.table.extended_lens[lease.row] = end
            tokens = answer.progress.tokens(answer.progress.extend_len)
            self.cache.commit(lease, tokens, answer.progress.computed_len)
        elif start + accepted < end:
            self.cache.truncate(lease, start + accepted)

    def _book_tokens(self, answer: Answer, token_ids: Sequence[int], found: _Found, i: int) -> list[Answer]:
        """Book a row's tokens: the first of each of a prompt's answers, or the next of one. Returns who ended."""
        ended: list[Answer] = []
        takers = self._forked(answer) if answer.num_answers > 1 and token_ids else itertools.repeat(answer)
        for k, (taker, token_id) in enumerate(zip(takers, token_ids, strict=False)):
            if taker.finished:
                break  # the tokens after its end are nobody's
            taker.append(token_id)
            if taker.log.first_token_at is None:
                taker.log.first_token_at = time.perf_counter()
            if self._ends_with(taker, token_id, found, i, k):
                ended.append(taker)
        return ended

    def _forked(self, answer: Answer) -> tuple[Answer, ...]:
        """All answers to a prompt whose first tokens are there; those after the first one wait from now on."""
        answer.children = tuple(answer.fork(k) for k in range(1, answer.num_answers))
        for child in answer.children:
            self.roster.enqueue(child)
        return answer.family

    def _ends_with(self, answer: Answer, token_id: int, found: _Found, i: int, k: int = 0) -> bool:
        """Log an answer's latest token, the k-th of row `i`. Whether the answer has ended with it."""
        num_top = answer.request.params.logprobs
        if num_top is not None and found.result.logprobs is not None:
            logprob = _token_logprob(found.result.logprobs, found.first_logprobs[i] + k, token_id, num_top)
            answer.log.logprobs.append(logprob)
        try:
            reason = self._why_ended(answer, token_id)
        except Exception as error:  # of its text: one answer's must not cost the others theirs
            _log.exception("the text of request %d cannot be made", answer.request.index)
            self.finish(answer, FinishReason.ERROR, f"no text can be made of its answer: {error}")
            return True
        if reason is not None:
            self.finish(answer, reason)
        return reason is not None

    def _why_ended(self, answer: Answer, token_id: int) -> FinishReason | None:
        """Why an answer ends with its latest token, if it does."""
        request, text_stop = answer.request, answer.text_stop
        if token_id in request.stop_ids:
            answer.log.matched = token_id
            return FinishReason.STOP
        if text_stop is not None and text_stop.push(token_id):
            answer.log.matched = text_stop.matched
            return FinishReason.STOP
        return FinishReason.LENGTH if answer.progress.known_len >= request.max_len else None


@dataclass(frozen=True)
class _Found:
    """A pass and its result, row by row."""

    pass_: Pass
    result: PassResult
    first_samples: Int32Array  # [B] of each row, among the sampled tokens
    first_logprobs: Int32Array  # [B] among their log-probabilities
    first_scored: Int32Array  # [B] among the scored prompt tokens

    def token_ids(self, i: int) -> list[int]:
        """The accepted tokens of a row."""
        first = self.first_samples[i]
        token_ids: list[int] = self.result.token_ids[first : first + self.result.accepted[i]].tolist()
        return token_ids

    def prompt_logprobs(self, i: int, num_top: int) -> list[TokenLogprob]:
        """Those of a row's scored tokens, with so many alternatives."""
        first, count = int(self.first_scored[i]), int(self.pass_.num_scored[i])
        logprobs, targets = self.result.prompt_logprobs, self.pass_.scored_targets
        if not count:
            return []
        assert logprobs is not None  # the pass asked for them
        return [_token_logprob(logprobs, n, int(targets[n]), num_top) for n in range(first, first + count)]


def _firsts(counts: Int32Array) -> Int32Array:
    """`[B]` where each row's own begin, if each has so many, row after row."""
    firsts: Int32Array = np.cumsum(counts, dtype=np.int32) - counts
    return firsts


def _token_logprob(logprobs: Logprobs, i: int, token_id: int, num_top: int) -> TokenLogprob:
    top = zip(logprobs.top_ids[i, :num_top].tolist(), logprobs.top[i, :num_top].tolist(), strict=True)
    return TokenLogprob(token_id, float(logprobs.chosen[i]), int(logprobs.ranks[i]), tuple(top))
