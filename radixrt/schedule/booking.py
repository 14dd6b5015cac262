"""Whose a pass is, and how what it computed becomes tokens, log-probabilities and ends of answers."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.output import FinishReason, TokenLogprob
from radixrt.schedule.admission import Admission
from radixrt.schedule.answer import Answer
from radixrt.schedule.masks import PassForms
from radixrt.schedule.passes import Logprobs, Pass, PassResult

MIN_FORCED = 2  # tokens: the pass in flight draws the first of them anyway

_log = logging.getLogger(__name__)

Push = Callable[[PassForms, Int32Array], dict[int, Exception | None]]  # as PassForms.push


@dataclass(frozen=True)
class Booking:
    """A scheduled pass, and the answer of each row.

    While the same answers decode pass after pass, and nothing else is computed, the tuple is the same.
    """

    pass_: Pass
    answers: tuple[Answer, ...]
    forms: PassForms | None = None  # of masked draws, if it has some


@dataclass(frozen=True)
class Bookkeeper:
    """Books what passes computed, and ends answers."""

    cache: PrefixCache
    admission: Admission

    def process(self, booking: Booking, result: PassResult, push: Push = PassForms.push) -> list[Answer]:
        """Book what a pass computed; passes are processed in order. Returns the answers that ended.

        `push` is called before anything else looks at matchers; afterwards no matcher is used of which it got a
        token.
        """
        pass_, table = booking.pass_, self.admission.table
        rows, first_samples = pass_.req_pool_indices, np.cumsum(pass_.num_samples) - pass_.num_samples
        # Answers that still run, and got one token of which nobody wants more than its id, are booked together; no
        # row has changed hands by now.
        extend_lens = table.extend_lens.take(rows)
        runs = table.runs.take(rows) & result.finite & (pass_.num_samples == 1)
        decoded = runs & (pass_.prefix_lens >= extend_lens)
        extended = runs & ~decoded & ~table.begins_alone.take(rows)
        extended &= (pass_.seq_lens == extend_lens) & (pass_.num_scored == 0)
        for i in self.admission.paced(np.flatnonzero(extended).tolist()):
            self._extended(booking.answers[i])
        got_one = decoded | extended
        ends = np.zeros_like(got_one)
        ends[got_one] = table.append(rows[got_one], result.token_ids[first_samples[got_one]])
        to_visit = ~got_one | (decoded & table.is_special.take(rows))
        ended_by_form: dict[int, Exception | None] = {}
        if booking.forms is not None:
            assert pass_.sampling.masked is not None
            together = np.repeat(got_one, pass_.num_samples)  # others' tokens are pushed when they are visited
            ended_by_form = push(booking.forms, np.where(together, result.token_ids, -1)[pass_.sampling.masked])
            to_visit[list(ended_by_form)] = True
        at_end = np.flatnonzero(ends & ~to_visit)
        ended = [booking.answers[i] for i in at_end.tolist()]
        self._end_at(ended, result.token_ids[first_samples[at_end]].tolist())
        if not to_visit.any():
            return ended
        first_logprobs = np.searchsorted(pass_.sampling.arrays.get("logprob_rows", ()), first_samples)
        visited = np.flatnonzero(to_visit)
        columns = (visited, first_samples[visited], result.accepted[visited], decoded[visited])
        by_row = list(zip(*(column.tolist() for column in columns), strict=True))
        for i, first, count, has_decoded in self.admission.paced(by_row):
            answer = booking.answers[i]
            params = answer.request.params
            token_ids = result.token_ids[first : first + count].tolist()
            logprobs = _token_logprobs(result.logprobs, first_logprobs[i], token_ids, params.logprobs)
            if has_decoded:
                completes = i in ended_by_form and (ended_by_form[i] or True)
                if self._ends_with(answer, token_ids[0], logprobs, completes):
                    ended.append(answer)
            elif not answer.finished:
                ended += self._book(booking, result, i, token_ids, logprobs)
        return ended

    def _extended(self, answer: Answer) -> None:
        """Book an extend that a pass has ended, for an answer that begins, or goes on, with a token of its own."""
        lease = answer.lease
        assert lease is not None  # it runs
        self.cache.commit(lease, lease.tokens, len(lease.tokens))
        if answer.log.first_token_at is None:
            answer.log.first_token_at = time.perf_counter()

    def _end_at(self, answers: Sequence[Answer], token_ids: Sequence[int]) -> None:
        """End answers with their latest tokens `[n]`, of which nobody wants more than their ids."""
        for answer, token_id in self.admission.paced(zip(answers, token_ids, strict=True)):
            reason = FinishReason.LENGTH
            if token_id in answer.request.stop_ids:
                reason, answer.log.matched = FinishReason.STOP, token_id
            self.finish(answer, reason)

    def fail(self, booking: Booking, cause: Exception) -> list[Answer]:
        """End the answers of a pass that raised. Returns them."""
        ended = [answer for answer in booking.answers if not answer.finished]
        for answer in ended:
            answer.log.cause = cause
            self.finish(answer, FinishReason.ERROR, f"its pass failed: {type(cause).__name__}: {cause}")
        return ended

    def finish(self, answer: Answer, reason: FinishReason, error: str | None = None) -> None:
        """End an answer that waits or runs; what it has computed stays in the cache, if anybody may want it."""
        admission, log = self.admission, answer.log
        if answer.lease is None:
            admission.leave_queue(answer)
        else:
            # `reusable_len` does not count requests before it that still wait: rarely are there any.
            counts = not admission.waiting or admission.waiting[0].place > answer.place
            reusable_len = answer.request.reusable_len if counts else None
            admission.release(answer, reusable_len, is_sound=reason is not FinishReason.ERROR)
        if num_output := answer.num_output:
            admission.estimate.ended(num_output)
        log.finish_reason, log.error, log.finished_at = reason, error, time.perf_counter()

    def _book(
        self, booking: Booking, result: PassResult, i: int, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> list[Answer]:
        """Book row `i` of a pass on its own. Returns the answers that ended."""
        pass_, answer = booking.pass_, booking.answers[i]
        request, lease = answer.request, answer.lease
        if not result.finite[i]:
            error = "the model computed values that are not finite"
            if request.params.allowed_token_ids is not None or request.bad_words or request.form is not None:
                error += ", or its form, allowed_token_ids, bad_words and min_new_tokens left no token to draw"
            self.finish(answer, FinishReason.ERROR, error)
            return [answer]
        start, end, num_scored = int(pass_.prefix_lens[i]), int(pass_.seq_lens[i]), int(pass_.num_scored[i])
        # Without a lease it was retracted since, and its tokens are good all the same. It gets no other one before
        # its passes have ended: see `Answer.resumable_after`.
        if lease is not None and start < answer.extend_len:
            answer.extended_len = end
            self.cache.commit(lease, answer.tokens(answer.extend_len), end)
        elif lease is not None and start + len(token_ids) < end:  # it verified drafts, the last ones in vain
            self.cache.truncate(lease, start + len(token_ids))
        if num_scored:
            first = int(pass_.num_scored[:i].sum())
            targets = pass_.scored_targets[first : first + num_scored].tolist()
            scored = _token_logprobs(result.prompt_logprobs, first, targets, request.params.prompt_logprobs)
            answer.log.prompt_logprobs += scored
            answer.pending_match = None  # more of it may come from the cache now
        ended: list[Answer] = []
        if end < answer.known_len:  # its form has forced that token meanwhile
            token_ids = []
        # The tokens are the first of each of a prompt's answers, or the next of one.
        takers = self._forked(answer) if answer.num_answers > 1 and token_ids else itertools.repeat(answer)
        for k, (taker, token_id) in enumerate(zip(takers, token_ids, strict=False)):
            if taker.finished:
                break  # the tokens after its end are nobody's
            taker.append(token_id)
            if taker.log.first_token_at is None:
                taker.log.first_token_at = time.perf_counter()
            if self._ends_with(taker, token_id, logprobs[k : k + 1], _completes(taker, token_id)):
                ended.append(taker)
        if lease is not None and not request.max_new_tokens and end == request.prompt_len:
            self.finish(answer, FinishReason.LENGTH)
            ended.append(answer)
        return ended

    def _forked(self, answer: Answer) -> tuple[Answer, ...]:
        """All answers to a prompt whose first tokens are there; those after the first one wait from now on."""
        answer.children = tuple(answer.fork(answer.sample_index + k) for k in range(1, answer.num_answers))
        for child in answer.children:
            self.admission.enqueue(child)
        return answer.family

    def _ends_with(
        self, answer: Answer, token_id: int, logprobs: Sequence[TokenLogprob], completes: bool | Exception
    ) -> bool:
        """Log an answer's latest token, which `completes` its form, or is refused by it. Whether the answer has
        ended with it.
        """
        request, log, text = answer.request, answer.log, answer.text
        log.logprobs += logprobs
        reason = FinishReason.LENGTH if answer.known_len >= request.max_len else None
        try:
            if token_id in request.stop_ids:
                reason, log.matched = FinishReason.STOP, token_id
                if text is not None and request.params.include_stop_str:
                    text.end_with(token_id)
            else:
                if isinstance(completes, Exception):
                    raise completes
                reason = FinishReason.STOP if completes else reason
                if text is not None and text.push(token_id):
                    reason, log.matched = FinishReason.STOP, text.matched
        except Exception as error:  # of its text or its form: one answer's must not cost the others theirs
            self._cannot_go_on(answer, error)
            return True
        if reason is not None:
            self.finish(answer, reason)
        return reason is not None

    def _cannot_go_on(self, answer: Answer, error: Exception) -> None:
        _log.exception("the text or the form of request %d cannot go on", answer.request.index)
        what = "no text can be made of its answer" if answer.request.form is None else "its answer cannot go on"
        self.finish(answer, FinishReason.ERROR, f"{what}: {error}")

    def take_forced(self, answers: Iterable[Answer]) -> list[Answer]:
        """Give answers, for each of which a pass in flight draws a token, what their forms force next. Returns
        those that have ended with that.
        """
        return [answer for answer in answers if not answer.finished and self._takes_forced(answer)]

    def _takes_forced(self, answer: Answer) -> bool:
        """Give an answer what its form forces next, which a pass extends over. Whether it has ended with that."""
        request, params, matcher = answer.request, answer.request.params, answer.matcher
        if matcher is None or answer.num_answers != 1:  # the first tokens of several are one answer's until then
            return False
        if params.logprobs is not None or answer.next_scored is not None:
            return False  # log-probabilities come from passes, of which the one in flight may be the last
        if request.bad_words or params.allowed_token_ids is not None:
            return False  # which may leave nothing to draw
        try:
            forced = matcher.forced()
        except Exception as error:
            self._cannot_go_on(answer, error)
            return True
        if len(forced) < MIN_FORCED:
            return False
        if answer.log.first_token_at is None:
            answer.log.first_token_at = time.perf_counter()
        self.admission.extend_again(answer, len(forced))
        for token_id in forced:
            answer.append(token_id)
            if self._ends_with(answer, token_id, (), _completes(answer, token_id)):
                return True
        return False


def _completes(answer: Answer, token_id: int) -> bool | Exception:
    """Push an answer's latest token. Whether that completes its form; or what was raised."""
    if (matcher := answer.matcher) is None or token_id in answer.request.stop_ids:
        return False
    try:
        matcher.push(token_id)
        return matcher.is_complete
    except Exception as error:  # one answer's must not cost the others theirs
        return error


def _token_logprobs(
    found: Logprobs | None, first: int, token_ids: Sequence[int], num_top: int | None
) -> list[TokenLogprob]:
    """Those of tokens that begin at `first` among `found`, with so many alternatives; none if none are wanted."""
    if found is None or num_top is None:
        return []
    rows = slice(first, first + len(token_ids))
    tops = zip(found.top_ids[rows, :num_top].tolist(), found.top[rows, :num_top].tolist(), strict=True)
    columns = zip(token_ids, found.chosen[rows].tolist(), found.ranks[rows].tolist(), tops, strict=True)
    return [
        # What cannot be drawn comes last, and under any id.
        TokenLogprob(token_id, logprob, rank, tuple(pair for pair in zip(*top, strict=True) if pair[1] > -inf))
        for token_id, logprob, rank, top in columns
    ]
