"""One prompt on its way to an answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

import numpy as np

from radixrt.cache.prefix_cache import Lease
from radixrt.cache.radix_tree import DEFAULT_NAMESPACE, Namespace, Tokens
from radixrt.output import FinishReason, Timings, Usage
from radixrt.sampling_params import SamplingParams


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

    It extends while `launched < extend_end`, and decodes one token a pass after that.

    Args:
        index: the caller's number for it.
        prompt_ids: `[n >= 1]` int32.
        params: never changed.
        max_new_tokens: params.max_new_tokens, shortened where the context ends before.
        seed: of its draws, 0 to 2**63 - 1.
        stop_ids: tokens that end it.
        namespace: of its prefix.
    """

    index: int
    prompt_ids: Tokens
    params: SamplingParams
    max_new_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    namespace: Namespace = DEFAULT_NAMESPACE

    state: RequestState = RequestState.WAITING
    arrival: int = -1  # its place in the order of submission
    lease: Lease | None = None
    extend_end: int = 0  # tokens to extend over before it decodes: those known when it was admitted
    launched: int = 0
    computed: int = 0
    samples_in_flight: int = 0
    cached_tokens: int | None = None  # prompt tokens found at its first admission; None before it
    recomputed_tokens: int = 0
    launched_ever: int = 0  # the greatest `launched` it has had, over retractions
    retractions: int = 0
    overtaken: int = 0  # admissions of others while it was the oldest in the queue
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: BaseException | None = None
    submitted_at: float = 0.0  # this and the moments below are of time.perf_counter
    launched_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self._tokens = np.array(self.prompt_ids, dtype=np.int32)
        self._num_known = len(self._tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_known(self) -> int:
        """Prompt tokens and collected output tokens."""
        return self._num_known

    @property
    def num_output(self) -> int:
        """Collected output tokens."""
        return self._num_known - len(self.prompt_ids)

    @property
    def total(self) -> int:
        return self._num_known + self.samples_in_flight

    @property
    def remaining(self) -> int:
        """Output tokens that may still be launched."""
        return self.max_new_tokens - self.num_output - self.samples_in_flight

    @property
    def most_slots(self) -> int:
        """Slots it needs if it runs to its end; the last token's KV is never computed."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    @property
    def is_extending(self) -> bool:
        return self.launched < self.extend_end

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def tokens(self, end: int | None = None) -> Tokens:
        """The first `end` known tokens, or all: `[end]` int32, a view."""
        return self._tokens[: self._num_known if end is None else end]

    def output_ids(self) -> Tokens:
        """Collected output tokens `[num_output]` int32, a view."""
        return self._tokens[len(self.prompt_ids) : self._num_known]

    def append(self, token_id: int) -> None:
        """Add a collected output token."""
        if self._num_known == len(self._tokens):
            grown = np.empty(max(16, 2 * self._num_known), dtype=np.int32)
            grown[: self._num_known] = self._tokens
            self._tokens = grown
        self._tokens[self._num_known] = token_id
        self._num_known += 1

    def usage(self) -> Usage:
        cached = self.cached_tokens or 0
        # A request that ended before it was admitted has neither cached nor computed anything; its prompt
        # counts as computed, so that the two always add up.
        return Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=cached,
            computed_tokens=self.prompt_len - cached,
            completion_tokens=self.num_output,
            recomputed_tokens=self.recomputed_tokens,
        )

    def timings(self) -> Timings:
        end = self.finished_at if self.finished_at is not None else time.perf_counter()

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self.submitted_at

        queue = since(self.launched_at)
        return Timings(
            queue=end - self.submitted_at if queue is None else queue,
            first_token=since(self.first_token_at),
            total=end - self.submitted_at,
        )
