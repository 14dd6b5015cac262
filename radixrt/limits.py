"""What a run has: memory, requests, tokens of a pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunLimits:
    """What a Runtime runs within.

    Attributes:
        pool_tokens: tokens that the KV pool holds.
        max_running_requests: requests that run at once.
        chunked_prefill_size: prompt tokens that one pass computes.
    """

    pool_tokens: int
    max_running_requests: int = 512
    chunked_prefill_size: int = 16_384
