"""The results of requests."""

# Tests: tests/test_runtime.py, tests/test_generation.py

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # the model's end token, a stop string, or one of stop_token_ids
    LENGTH = "length"  # max_new_tokens, or the end of the context
    ABORT = "abort"  # the caller ended it
    ERROR = "error"  # its pass failed, or its numbers were not finite

    def __str__(self) -> str:
        return self.value

    @property
    def is_whole(self) -> bool:
        """Whether the answer is as long as it was to be."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, or of several together. cached_tokens + computed_tokens = prompt_tokens.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens whose KV was found in the cache when the request was first admitted.
        computed_tokens: the other prompt tokens. A request that ended before it was admitted found none.
        completion_tokens: generated tokens of all n answers, the token that stopped each included.
        recomputed_tokens: tokens computed again, counted apart: after a retraction, or the last prompt token for
            an answer whose first token did not fit in the pass of the others.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    recomputed_tokens: int = 0

    @classmethod
    def total(cls, usages: Iterable[Usage]) -> Usage:
        """The counts of several requests together."""
        return cls(*map(sum, zip(*map(astuple, usages), strict=True)))


@dataclass(frozen=True)
class Timings:
    """Seconds, measured on the host from the moment the request was submitted.

    Attributes:
        queue: until its first tokens were sent to the device.
        first_token: until its first generated token was known; None if there was none.
        total: until it ended.
    """

    queue: float
    first_token: float | None
    total: float


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability under the model, before temperature, penalties and filters; with
    `logprobs_mode="processed_logprobs"` under the distribution that it was drawn from.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        rank: 1 if no token was more likely.
        top: (token id, log-probability) of the most likely tokens, as many as were asked for, or as many as are
            not impossible.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n answers to a prompt.

    Attributes:
        index: which of the n it is.
        text: the generated text, up to the stop string or the token that stopped it, and with these if
            include_stop_str is set.
        token_ids: the generated token ids, the token that stopped it included.
        finish_reason: why it ended.
        matched: the token id or string that stopped it, or None.
        logprobs: of each generated token, if asked for.
        error: what went wrong if finish_reason is "error", else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The natural log-probability of all its tokens together, if theirs were asked for."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. Its `text`, `token_ids`, `finish_reason`, `logprobs`, `cumulative_logprob` and `error`
    are those of its first answer.

    Attributes:
        index: place of the prompt in its call.
        id: for `Runtime.abort`: the caller's own, or a number that the Runtime has made.
        outputs: the n answers.
        usage: token counts.
        timings: seconds.
        prompt_ids: the prompt, an array of int32 or a tuple. Outputs are compared without it.
        prompt_logprobs: of the prompt's tokens from prompt_logprobs_start on, but the first token, if asked for.
        cause: the exception that its pass raised, if any.
    """

    index: int
    id: int | str
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    timings: Timings
    prompt_ids: Iterable[int] = field(compare=False)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cause: BaseException | None = None

    @classmethod
    def refused(cls, index: int, error: str, request_id: int | str = -1) -> RequestOutput:
        """Make the output of a prompt that could not be run: without tokens and times."""
        answer = CompletionOutput(0, "", (), FinishReason.ERROR, error=error)
        return cls(index, request_id, (answer,), Usage(0, 0, 0, 0), Timings(0.0, None, 0.0), ())

    @cached_property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt, converted on first use: the integers of long prompts would delay the passes."""
        return tuple(map(int, self.prompt_ids))

    @property
    def failed(self) -> CompletionOutput | None:
        """The first answer that ended neither by a stop nor at its length; None if there is none."""
        return next((answer for answer in self.outputs if not answer.finish_reason.is_whole), None)

    @property
    def failure(self) -> str | None:
        """Why that answer is incomplete; None if there is none."""
        failed = self.failed
        if failed is None:
            return None
        return failed.error or "the request was ended before its answer was whole"

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    def to_dict(self) -> dict[str, Any]:
        """Return the first answer in the shape of SGLang's Engine: text, output_ids, meta_info.

        With n answers call it on each of `split()`.
        """
        first = self.outputs[0]
        reason: dict[str, Any] = {"type": str(first.finish_reason)}
        if first.finish_reason is FinishReason.STOP:
            reason["matched"] = first.matched
        elif first.finish_reason is FinishReason.LENGTH:
            reason["length"] = len(first.token_ids)
        elif first.error is not None:
            reason["message"] = first.error
        meta: dict[str, Any] = {
            "id": self.id,
            "finish_reason": reason,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": len(first.token_ids),
            "cached_tokens": self.usage.cached_tokens,
            "e2e_latency": self.timings.total,
        }
        for kind, logprobs in (("input", self.prompt_logprobs), ("output", first.logprobs)):
            if logprobs is not None:
                meta[f"{kind}_token_logprobs"] = [(t.logprob, t.token_id, None) for t in logprobs]
                meta[f"{kind}_top_logprobs"] = [[(lp, i, None) for i, lp in t.top] for t in logprobs]
        return {"text": first.text, "output_ids": list(first.token_ids), "meta_info": meta}

    def split(self) -> list[RequestOutput]:
        """Return a RequestOutput for each of the n answers; usage and timings stay those of all."""
        return [replace(self, outputs=(answer,)) for answer in self.outputs]


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed answer.

    Attributes:
        text: text that has become certain since the chunk before of this answer; may be empty.
        token_ids: tokens since that chunk.
        output: the whole output with all n answers, in the last chunk of a prompt.
        request_id: for `Runtime.abort`.
        index: which of the n answers it is a piece of.
        logprobs: of these tokens, if asked for.
        finish_reason, matched: as in CompletionOutput, in the answer's own last chunk.
        prompt_index: place of the prompt in its call.
        prompt_tokens: length of the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
    request_id: int | str = -1
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    prompt_index: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True)
class ScoreOutput:
    """How likely a model finds a continuation.

    Attributes:
        logprob: natural log-probability of the whole continuation, the sum of its tokens'.
        is_greedy: whether each of its tokens is the most likely one.
        tokens: its tokens with their log-probabilities.
        usage: token counts of the context with the continuation.
    """

    logprob: float
    is_greedy: bool
    tokens: tuple[TokenLogprob, ...]
    usage: Usage

    @classmethod
    def of(cls, output: RequestOutput) -> ScoreOutput:
        """The score of a request whose scored prompt tokens are the continuation."""
        scored = output.prompt_logprobs or ()
        return cls(
            logprob=sum(token.logprob for token in scored),
            is_greedy=all(token.rank == 1 for token in scored),
            tokens=scored,
            usage=output.usage,
        )
