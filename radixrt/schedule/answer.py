"""One answer on its way: its request, what it holds, how far it has come, and what is told of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.cache.lease import Lease
from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import Tokens
from radixrt.forms.matcher import Matcher
from radixrt.output import FinishReason, Timings, TokenLogprob, Usage
from radixrt.schedule.request import Request
from radixrt.schedule.request_table import RequestTable


@dataclass(slots=True)
class RequestLog:
    """The record of one answer. Moments are of time.perf_counter."""

    submitted_at: float
    launched_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    cached_tokens: int | None = None  # prompt tokens found in the cache at its first admission; None before it
    recomputed_tokens: int = 0  # tokens computed again after a retraction, or for one of several answers
    retractions: int = 0  # times that it was taken back to the queue
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while it has not ended
    matched: int | str | None = None  # the token or string that stopped it
    error: str | None = None
    cause: BaseException | None = None  # the exception of its pass


@dataclass(eq=False)
class Answer:
    """The live half of a request: one of the n answers to its prompt. It waits, or runs, or has ended.

    While it runs, its tokens and lengths are in its lease's row of the scheduler's table.
    If it was submitted `in_order`, an order known to be good, later ones do not skip it for a longer match.
    """

    request: Request
    arrival: int  # its number in the order of submission; the answers to one prompt share it
    log: RequestLog
    in_order: bool = False
    sample_index: int = 0  # its number among the answers to the prompt
    parent: Answer | None = None  # the first of these answers, which computed the prompt; None for that one itself
    children: tuple[Answer, ...] = ()  # the other answers, once the first token is drawn
    lease: Lease | None = None  # while it runs
    pending_match: PendingMatch | None = None  # what it would find in the cache, while it waits
    times_skipped: int = 0  # admissions of others of its priority while it was the oldest of these in the queue
    resumable_after: int = 0  # passes to end before it runs again: they hold what it had in flight
    launched_len: int = 0  # positions that passes were launched for, under its earlier leases
    extended_len: int = 0  # positions of its extend whose KV is computed and finite, while it runs
    _table: RequestTable = field(init=False, repr=False)  # its own numbers are there while it runs

    def __post_init__(self) -> None:
        # Its place in the queue: the most urgent first, in order of arrival. The last ones yield first.
        self.place = self.request.priority, self.arrival
        self._tokens = self.request.prompt_ids  # the known ones, never changed; while it runs, a row of the table
        self.text = None if self.request.make_text is None else self.request.make_text()
        self._matcher: Matcher | None = None

    @property
    def finished(self) -> bool:
        return self.log.finish_reason is not None

    @property
    def matcher(self) -> Matcher | None:
        """How far it has come in its form, by the tokens that are booked; None without a form."""
        if self._matcher is None and self.request.form is not None:
            self._matcher = self.request.form.matcher()  # at its first token: many may wait
        return self._matcher

    @property
    def family(self) -> tuple[Answer, ...]:
        """All answers to the prompt, itself included, the first one first."""
        first = self.parent or self
        return (first, *first.children)

    @property
    def known_len(self) -> int:
        """Tokens of its prompt, and collected output tokens."""
        return len(self._tokens) if self.lease is None else self._table.known_lens.item(self.lease.row)

    @property
    def extend_len(self) -> int:
        """Tokens to extend over before it decodes; 0 where it does not run."""
        return 0 if self.lease is None else self._table.extend_lens.item(self.lease.row)

    @property
    def computed_len(self) -> int:
        """Positions of a running answer whose KV is computed and finite."""
        known_len = self.known_len
        return known_len - 1 if known_len > self.extend_len else self.extended_len

    @property
    def num_output(self) -> int:
        """Collected output tokens."""
        return self.known_len - self.request.prompt_len

    @property
    def num_answers(self) -> int:
        """Answers whose first tokens can be drawn when its prompt has been computed; 1 once it has output."""
        if not self.request.max_new_tokens:
            return 0
        return 1 if self.parent is not None or self.num_output else self.request.params.n

    @property
    def next_scored(self) -> int | None:
        """The next prompt token whose log-probability is wanted; None if none is (any more)."""
        prompt_len = self.request.prompt_len
        first = self.request.params.first_scored(prompt_len)
        if first is None or self.parent is not None:
            return None
        scored = first + len(self.log.prompt_logprobs)
        return scored if scored < prompt_len else None

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache: positions whose logits are wanted are computed."""
        known_len, scored = self.known_len, self.next_scored
        return (known_len if scored is None else min(known_len, scored)) - 1

    def tokens(self, end: int | None = None) -> Tokens:
        """The first `end` known tokens, or all: `[end]` int32, a view that is good until it stops running."""
        return self._tokens[: self.known_len if end is None else end]

    def tokens_between(self, start: int, end: int) -> Tokens:
        """Known tokens `[end - start]` int32, a copy; also while another thread lets it run or stop."""
        while True:
            tokens = self._tokens
            copied = tokens[start:end].copy()
            if tokens is self._tokens:  # else its row may have been left to another answer meanwhile
                return copied

    def output_ids(self) -> Tokens:
        """Collected output tokens `[num_output]` int32, a view like `tokens`."""
        return self._tokens[self.request.prompt_len : self.known_len]

    def append(self, token_id: int) -> None:
        """Add a collected output token."""
        if self.lease is None:
            self._tokens = np.append(self._tokens, np.int32(token_id))
        else:
            self._tokens[self.known_len] = token_id
            self._table.known_lens[self.lease.row] += 1
        self.pending_match = None

    def ending(self) -> tuple[FinishReason | None, int | str | None]:
        """Why it has ended, None if it has not, and at which token or string; good once its text is finished."""
        log, text = self.log, self.text
        if log.finish_reason is FinishReason.LENGTH and text is not None and text.matched is not None:
            return FinishReason.STOP, text.matched  # completed by the last token's rest
        return log.finish_reason, log.matched

    def match_in(self, cache: PrefixCache) -> PendingMatch:
        """What it would find in the cache while it waits; its tokens and its limit are what they were."""
        if self.pending_match is None:
            self.pending_match = PendingMatch(cache, self.request.namespace, self.tokens(), self.match_limit)
        return self.pending_match

    def run(self, lease: Lease, table: RequestTable) -> None:
        """Run from now on, in the lease's row of the table, which has begun it."""
        self._table, self._tokens = table, table.tokens[lease.row]
        self.lease, self.extended_len, self.pending_match = lease, lease.committed, None

    def stop(self) -> None:
        """Run no more: the row is left to others."""
        lease = self.lease
        assert lease is not None  # it runs
        launched_len = lease.allocated_len
        if launched_len > lease.matched:
            self.launched_len = max(self.launched_len, launched_len)
        self._table.runs[lease.row] = False
        self._tokens = self.tokens().copy()
        self.lease = None

    def fork(self, sample_index: int) -> Answer:
        """Another answer to the same prompt, which this one has computed."""
        log, prompt_len = self.log, self.request.prompt_len
        # Hits are counted once, for the first answer.
        own = RequestLog(log.submitted_at, log.launched_at, cached_tokens=prompt_len)
        fork = Answer(self.request, self.arrival, own, self.in_order, sample_index, parent=self)
        fork.launched_len = prompt_len
        return fork

    def usage(self) -> Usage:
        """Of all answers to the prompt, of which this is the first. One that ended before it was admitted found
        nothing in the cache.
        """
        prompt_len, cached = self.request.prompt_len, self.log.cached_tokens or 0
        num_output, recomputed = self.num_output, self.log.recomputed_tokens
        for answer in self.children:
            num_output += answer.num_output
            recomputed += answer.log.recomputed_tokens
        return Usage(prompt_len, cached, prompt_len - cached, num_output, recomputed)

    def timings(self) -> Timings:
        """Of all answers to the prompt, of which this is the first, in seconds since submission; until now where
        none has ended.
        """
        log, end = self.log, self.log.finished_at
        for answer in self.children:
            if (other := answer.log.finished_at) is not None:
                end = other if end is None else max(end, other)
        total = (time.perf_counter() if end is None else end) - log.submitted_at
        return Timings(
            total if log.launched_at is None else log.launched_at - log.submitted_at,
            None if log.first_token_at is None else log.first_token_at - log.submitted_at,
            total,
        )


place_of = attrgetter("place")


def rows_of(answers: Sequence[Answer]) -> Int32Array:
    """`[n]`, of running answers."""
    leases = [answer.lease for answer in answers]
    return np.fromiter((lease.row for lease in leases if lease is not None), np.int32, len(leases))
