"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # the model's end token, or one of stop_token_ids
    LENGTH = "length"  # max_new_tokens, or the end of the context
    ABORT = "abort"  # the caller ended it
    ERROR = "error"  # its pass failed, or its numbers were not finite

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. cached_tokens + computed_tokens = prompt_tokens.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens whose KV was found in the cache when the request was first admitted.
        computed_tokens: prompt tokens whose KV was computed for this request.
        completion_tokens: generated tokens, the token that stopped it included.
        recomputed_tokens: tokens computed again after a retraction, prompt or generated; counted apart.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    recomputed_tokens: int = 0


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
class RequestOutput:
    """One finished request.

    Attributes:
        index: place of the prompt in its call.
        text: the generated text, without the token that stopped it; special tokens are left out.
        token_ids: the generated token ids, the token that stopped it included.
        finish_reason: why it ended.
        usage: token counts.
        timings: seconds.
        error: what went wrong if finish_reason is "error", else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    error: str | None = None
