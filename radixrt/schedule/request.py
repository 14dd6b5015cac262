"""One prompt on its way to an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import Lease
from radixrt.cache.radix_tree import DEFAULT_NAMESPACE, Namespace, Tokens
from radixrt.output import FinishReason, Timings, TokenLogprob, Usage
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.progress import Progress


class TextStop(Protocol):
    """Whatever turns a request's tokens into text and finds its stop strings."""

    @property
    def matched(self) -> str | None:
        """The stop string that is complete, if one is."""

    def push(self, token_id: int) -> bool:
        """Take the next token of the answer. True if a stop string is complete."""


class RequestState(Enum):
    WAITING = "waiting"  # in the queue; holds no memory
    RUNNING = "running"  # holds a lease
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and how far it has come.

    Three numbers tell the progress of a running request; `computed <= launched <= total`:

        computed   positions whose KV is known to be computed and finite
        launched   positions whose KV has been, or is being, computed
        total      known tokens and sampled tokens still in flight

    It extends while `launched < extend_end`, and decodes one token a pass after that. While it runs these numbers
    and its tokens stand in its line of the scheduler's `Progress`; a request that does not run has its own.

    Args:
        index: the caller's number for it.
        prompt_ids: `[n >= 1]` int32.
        params: never changed.
        max_new_tokens: params.max_new_tokens, shortened where the context ends before.
        seed: of its draws, 0 to 2**63 - 1.
        stop_ids: tokens that end it.
        bad_words: token ids that must not follow one another.
        namespace: of its prefix.
        make_text_stop: makes what is told of each token of an answer and ends it at a stop string, if anything is.
        sample_index: which of the prompt's n answers it is.
        parent: the request for the first of the n answers, which computed the prompt; None for that one itself.
        keep: leading tokens of the prompt that requests submitted after it begin with, at most, where all are
            known: what it leaves in the cache beyond them can go when it ends. None: all of it may be wanted.
        in_order: it was submitted in an order that is known to be good: whoever comes after it does not go before
            it for a longer match.
    """

    index: int
    prompt_ids: Tokens
    params: SamplingParams
    max_new_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    namespace: Namespace = DEFAULT_NAMESPACE
    make_text_stop: Callable[[], TextStop] | None = None
    sample_index: int = 0
    parent: Request | None = None
    keep: int | None = None
    in_order: bool = False
    id: int = -1  # of the request in its Runtime; its other answers have none

    state: RequestState = RequestState.WAITING
    arrival: int = -1  # its place in the order of submission; its other answers have the same
    children: tuple[Request, ...] = ()  # the requests for the other answers, once its first token is drawn
    lease: Lease | None = None
    let_go_at: int = 0  # passes launched when it last ceased to run: what it had in flight is in these
    cached_tokens: int | None = None  # prompt tokens found at its first admission; None before it
    recomputed_tokens: int = 0
    launched_before: int = 0  # the greatest `launched` of its earlier leases
    retractions: int = 0
    pending_match: PendingMatch | None = None  # what it would find in the cache, while it waits
    overtaken: int = 0  # admissions of others while it was the oldest in the queue
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched: int | str | None = None  # the token or string that stopped it
    error: str | None = None
    cause: BaseException | None = None
    submitted_at: float = 0.0  # this and the moments below are of time.perf_counter
    launched_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self._tokens = np.array(self.prompt_ids, dtype=np.int32)
        self._num_known = self._total = len(self._tokens)
        self._progress: Progress | None = None  # while it runs
        self.text_stop = None if self.make_text_stop is None else self.make_text_stop()

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def limit(self) -> int:
        """Known tokens with which it ends at the latest."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def num_known(self) -> int:
        """Prompt tokens and collected output tokens."""
        return self._num_known if self._progress is None else int(self._progress.known[self._row])

    @property
    def num_output(self) -> int:
        """Collected output tokens."""
        return self.num_known - len(self.prompt_ids)

    @property
    def total(self) -> int:
        """Known tokens and sampled tokens still in flight."""
        if self._progress is None:
            return max(self._total, self._num_known)
        return max(self.num_known, min(self.launched + 1, self.limit))  # as `Progress.total`

    @property
    def samples_in_flight(self) -> int:
        return self.total - self.num_known

    @property
    def launched(self) -> int:
        return 0 if self.lease is None else self.lease.allocated_len

    @property
    def launched_ever(self) -> int:
        """The greatest `launched` it has had, over retractions."""
        return max(self.launched_before, self.launched)

    @property
    def extend_end(self) -> int:
        """Tokens to extend over before it decodes: those known when it was admitted; 0 while it does not run."""
        return 0 if self._progress is None else int(self._progress.extend_end[self._row])

    @property
    def computed(self) -> int:
        if self._progress is None:
            return 0
        known, row = self.num_known, self._row
        # Each token that it has got since it was admitted was sampled after a position of its own.
        return known - 1 if known > self._progress.extend_end[row] else int(self._progress.extended[row])

    @property
    def _row(self) -> int:
        assert self.lease is not None  # it runs
        return self.lease.row

    @property
    def remaining(self) -> int:
        """Output tokens that may still be launched."""
        return self.limit - self.total

    @property
    def most_slots(self) -> int:
        """Slots it needs if it runs to its end; the last token's KV is never computed."""
        return len(self.prompt_ids) + max(1, self.max_new_tokens) - 1

    @property
    def num_answers(self) -> int:
        """Answers whose first tokens can be drawn when its prompt has been computed."""
        return 1 if self.parent is not None or self.num_output else self.params.n

    @property
    def next_scored(self) -> int | None:
        """The next prompt token whose log-probability is wanted; None if none is (any more)."""
        if self.params.prompt_logprobs is None or self.parent is not None:
            return None
        scored = max(1, self.params.prompt_logprobs_start) + len(self.prompt_logprobs)
        return scored if scored < len(self.prompt_ids) else None

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache: what gives logits that are wanted is computed."""
        scored = self.next_scored
        return self.num_known - 1 if scored is None else min(self.num_known, scored) - 1

    @property
    def family(self) -> tuple[Request, ...]:
        """The requests for all answers to its prompt, itself included, the first one's first."""
        first = self if self.parent is None else self.parent
        return (first, *first.children)

    @property
    def is_extending(self) -> bool:
        return self.launched < self.extend_end

    @property
    def has_begun(self) -> bool:
        """Whether a pass has computed some of it, though it may wait again after a retraction."""
        return self.launched_at is not None

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def tokens(self, end: int | None = None) -> Tokens:
        """The first `end` known tokens, or all: `[end]` int32, a view that is good until it ceases to run."""
        own = self._tokens if self._progress is None else self._progress.tokens[self._row]
        return own[: self.num_known if end is None else end]

    def output_ids(self) -> Tokens:
        """Collected output tokens `[num_output]` int32, a view that is good until it ceases to run."""
        return self.tokens()[len(self.prompt_ids) :]

    def append(self, token_id: int) -> None:
        """Add a collected output token."""
        if self._progress is not None:
            self._progress.append_one(self._row, token_id)
            return
        if self._num_known == len(self._tokens):
            grown = np.empty(max(16, 2 * self._num_known), dtype=np.int32)
            grown[: self._num_known] = self._tokens
            self._tokens = grown
        self._tokens[self._num_known] = token_id
        self._num_known += 1
        self.pending_match = None

    def run(self, lease: Lease, progress: Progress) -> None:
        """Run from now on: `progress` keeps its numbers and its tokens in the line of the lease's row."""
        progress.begin(
            lease.row,
            self.tokens(),
            prompt_len=self.prompt_len,
            limit=self.limit,
            stop_ids=self.stop_ids,
            has_text_stop=self.text_stop is not None,
            wants_logprobs=self.params.logprobs is not None,
        )
        self.lease, self._progress, self.pending_match = lease, progress, None

    def cease(self) -> None:
        """Run no more: the line is left to others."""
        lease, progress = self.lease, self._progress
        assert lease is not None  # it runs
        assert progress is not None
        self._total = self.total
        if lease.allocated_len > lease.matched:
            self.launched_before = self.launched_ever
        self._tokens = progress.end(lease.row)
        self._num_known = len(self._tokens)
        self.lease = self._progress = None

    def fork(self, sample_index: int) -> Request:
        """The request for another answer to the same prompt, which this one has computed."""
        return Request(
            index=self.index,
            prompt_ids=self.prompt_ids,
            params=self.params,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            stop_ids=self.stop_ids,
            bad_words=self.bad_words,
            namespace=self.namespace,
            make_text_stop=self.make_text_stop,
            sample_index=sample_index,
            parent=self,
            keep=self.keep,
            in_order=self.in_order,
            arrival=self.arrival,
            cached_tokens=len(self.prompt_ids),  # counted once, for the first answer
            launched_before=len(self.prompt_ids),
            submitted_at=self.submitted_at,
            launched_at=self.launched_at,
        )

    def usage(self) -> Usage:
        """Of all answers to its prompt. One that ended before it was admitted has found nothing in the cache."""
        cached = self.cached_tokens or 0
        family = self.family
        return Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=cached,
            computed_tokens=self.prompt_len - cached,
            completion_tokens=sum(r.num_output for r in family),
            recomputed_tokens=sum(r.recomputed_tokens for r in family),
        )

    def timings(self) -> Timings:
        ends = [r.finished_at for r in self.family]
        end = max((e for e in ends if e is not None), default=time.perf_counter())

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self.submitted_at

        queue = since(self.launched_at)
        return Timings(
            queue=end - self.submitted_at if queue is None else queue,
            first_token=since(self.first_token_at),
            total=end - self.submitted_at,
        )
