"""The limits of a pass and of a run, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

HANG_SECONDS = (
    600.0  # without the end of a pass, after which a replica counts as lost; the first may compile for long
)


@dataclass(frozen=True)
class PassLimits:
    """The most that a pass holds.

    Attributes:
        max_running_requests: requests that run at once.
        chunked_prefill_size: prompt tokens that one pass computes.
    """

    max_running_requests: int
    chunked_prefill_size: int

    @property
    def max_samples(self) -> int:
        """Tokens that are drawn: one a request, and as many again for the first tokens of n answers."""
        return 2 * self.max_running_requests

    @property
    def num_rows(self) -> int:
        """Rows of `ReqToTokenPool`: an ended request keeps its row until the passes in flight have ended."""
        return self.max_running_requests + self.max_running_requests // 2 + 1


NO_PASSES = PassLimits(max_running_requests=0, chunked_prefill_size=0)
# Of a GPU with memory for so many requests at once; down to a quarter of them run where there is less.
GPU_LIMITS = PassLimits(max_running_requests=2048, chunked_prefill_size=16_384)
CPU_LIMITS = PassLimits(max_running_requests=64, chunked_prefill_size=2048)


@dataclass(frozen=True)
class RunLimits:
    """The limits of a Runtime.

    Attributes:
        pool_tokens: tokens that the KV pool holds.
        max_running_requests: requests that run at once.
        chunked_prefill_size: prompt tokens that one pass computes.
    """

    pool_tokens: int
    max_running_requests: int = GPU_LIMITS.max_running_requests
    chunked_prefill_size: int = GPU_LIMITS.chunked_prefill_size

    @property
    def of_pass(self) -> PassLimits:
        return PassLimits(self.max_running_requests, self.chunked_prefill_size)
