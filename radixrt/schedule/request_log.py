"""What is told of an answer afterwards: times, cache hits, log-probabilities, why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from radixrt.output import FinishReason, Timings, TokenLogprob


@dataclass
class RequestLog:
    """The record of one answer. Moments are of time.perf_counter.

    Attributes:
        cached_tokens: prompt tokens found in the cache at its first admission; None before it.
        recomputed_tokens: tokens computed again after a retraction, or for one of several answers.
        retractions: times that it was taken back to the queue.
        logprobs, prompt_logprobs: of its tokens and of its prompt's, where they are wanted.
        finish_reason: why it ended; None while it has not.
        matched: the token or string that stopped it.
        error, cause: what went wrong, and the exception of its pass.
    """

    submitted_at: float
    launched_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    cached_tokens: int | None = None
    recomputed_tokens: int = 0
    retractions: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    error: str | None = None
    cause: BaseException | None = None

    def timings(self, ends: Sequence[float]) -> Timings:
        """Seconds since submission; `ends` are the moments at which the answers to its prompt ended."""
        total = max(ends) - self.submitted_at
        return Timings(
            queue=total if self.launched_at is None else self.launched_at - self.submitted_at,
            first_token=None if self.first_token_at is None else self.first_token_at - self.submitted_at,
            total=total,
        )
