"""One answer on its way: its request, what it holds, how far it has come, and what is told of it afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.cache.radix_tree import Tokens
from radixrt.output import FinishReason, Timings, TokenLogprob, Usage
from radixrt.schedule.request import Request, TextStop
from radixrt.schedule.request_table import Parked, RequestTable, TableRow


class AnswerState(Enum):
    WAITING = "waiting"  # in the queue; holds no memory
    RUNNING = "running"  # holds a lease
    FINISHED = "finished"


@dataclass
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
    """The live half of a request: one of the n answers to its prompt.

    Its `progress`, lengths and tokens, is a row of the scheduler's table while it runs, else a record of its own.
    If it was submitted `in_order`, an order known to be good, later ones do not skip it for a longer match.
    """

    request: Request
    arrival: int  # its place in the order of submission; the answers to one prompt share it
    log: RequestLog
    in_order: bool = False
    sample_index: int = 0  # its number among the answers to the prompt
    parent: Answer | None = None  # the first of these answers, which computed the prompt; None for that one itself
    children: tuple[Answer, ...] = ()  # the other answers, once the first token is drawn
    state: AnswerState = AnswerState.WAITING
    lease: Lease | None = None  # while it runs
    pending_match: PendingMatch | None = None  # what it would find in the cache, while it waits
    times_skipped: int = 0  # admissions of others while it was the oldest in the queue
    resumable_after: int = 0  # passes to end before it runs again: they hold what it had in flight
    launched_len: int = 0  # positions that passes were launched for, under its earlier leases

    def __post_init__(self) -> None:
        self.progress: Parked | TableRow = Parked(self.request.prompt_ids)
        make_text_stop = self.request.make_text_stop
        self.text_stop: TextStop | None = None if make_text_stop is None else make_text_stop()

    @property
    def finished(self) -> bool:
        return self.state is AnswerState.FINISHED

    @property
    def family(self) -> tuple[Answer, ...]:
        """All answers to the prompt, itself included, the first one first."""
        first = self.parent or self
        return (first, *first.children)

    @property
    def num_output(self) -> int:
        """Collected output tokens."""
        return self.progress.known_len - self.request.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens that may still be launched."""
        return self.request.max_len - self.progress.total_len

    @property
    def num_answers(self) -> int:
        """Answers whose first tokens can be drawn when its prompt has been computed."""
        return 1 if self.parent is not None or self.num_output else self.request.params.n

    @property
    def next_scored(self) -> int | None:
        """The next prompt token whose log-probability is wanted; None if none is (any more)."""
        params = self.request.params
        if params.prompt_logprobs is None or self.parent is not None:
            return None
        scored = max(1, params.prompt_logprobs_start) + len(self.log.prompt_logprobs)
        return scored if scored < self.request.prompt_len else None

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache: positions whose logits are wanted are computed."""
        known_len, scored = self.progress.known_len, self.next_scored
        return (known_len if scored is None else min(known_len, scored)) - 1

    def output_ids(self) -> Tokens:
        """Collected output tokens `[num_output]` int32, a view that is good until it stops running."""
        return self.progress.tokens()[self.request.prompt_len :]

    def append(self, token_id: int) -> None:
        """Add a collected output token."""
        self.progress.append(token_id)
        self.pending_match = None

    def match_in(self, cache: PrefixCache) -> PendingMatch:
        """What it would find in the cache while it waits; its tokens and its limit are what they were."""
        if self.pending_match is None:
            namespace, tokens = self.request.namespace, self.progress.tokens()
            self.pending_match = PendingMatch(cache, namespace, tokens, self.match_limit)
        return self.pending_match

    def run(self, lease: Lease, table: RequestTable) -> None:
        """Run from now on, in the lease's row of the table."""
        self.state, self.lease, self.pending_match = AnswerState.RUNNING, lease, None
        self.progress = table.begin(lease.row, self.request, self.progress.tokens())

    def stop(self) -> None:
        """Run no more: the row is left to others."""
        lease = self.lease
        assert lease is not None  # it runs
        assert isinstance(self.progress, TableRow)
        if lease.allocated_len > lease.matched:
            self.launched_len = max(self.launched_len, lease.allocated_len)
        self.lease, self.progress = None, self.progress.end()

    def fork(self, sample_index: int) -> Answer:
        """Another answer to the same prompt, which this one has computed."""
        log, prompt_len = self.log, self.request.prompt_len
        # Hits are counted once, for the first answer.
        own = RequestLog(log.submitted_at, log.launched_at, cached_tokens=prompt_len)
        fork = Answer(self.request, self.arrival, own, self.in_order, sample_index, parent=self)
        fork.launched_len = prompt_len
        return fork

    def usage(self) -> Usage:
        """Of all answers to the prompt. One that ended before it was admitted found nothing in the cache."""
        prompt_len, cached = self.request.prompt_len, self.log.cached_tokens or 0
        num_output = sum(answer.num_output for answer in self.family)
        recomputed = sum(answer.log.recomputed_tokens for answer in self.family)
        return Usage(prompt_len, cached, prompt_len - cached, num_output, recomputed)

    def timings(self) -> Timings:
        """Of all answers to the prompt, in seconds since submission; until now where none has ended."""
        log, ends = self.log, [answer.log.finished_at for answer in self.family]
        total = max((end for end in ends if end is not None), default=time.perf_counter()) - log.submitted_at
        return Timings(
            queue=total if log.launched_at is None else log.launched_at - log.submitted_at,
            first_token=None if log.first_token_at is None else log.first_token_at - log.submitted_at,
            total=total,
        )
