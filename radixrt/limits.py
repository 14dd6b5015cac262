"""The limits of a pass and of a run, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.errors import ParameterError

EXPECTED_TOKENS = 1024  # at most, of an answer before others have ended: its own limit may be the whole context

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

    @property
    def own_states(self) -> int:
        """States that requests have of their own, where layers keep some, and two that stay free for others. Where
        many requests end in one pass, others begin a pass later.
        """
        return self.max_running_requests + max(2, self.max_running_requests // 8 + 1)


NO_PASSES = PassLimits(max_running_requests=0, chunked_prefill_size=0)
# Of a GPU with memory for so many requests at once; down to a quarter of them run where there is less.
GPU_LIMITS = PassLimits(max_running_requests=2048, chunked_prefill_size=16_384)
CPU_LIMITS = PassLimits(max_running_requests=64, chunked_prefill_size=2048)

PASS_BYTES = 4 * 10**9  # about what the largest pass and its graphs need on a GPU, beside the pool
_BYTES_A_LOGIT = 17  # of a pass whose requests want everything; measured on an H200
_MAX_SHARE = 0.15  # of the free memory, for what grows with the requests at once
_TOKENS_A_REQUEST = 256  # that the KV pool should hold for each
# Where layers keep states, of the free memory, for those of requests and the KV of so many tokens of each:
_SHARE_OF_REQUESTS, _TOKENS_BESIDE_A_STATE = 0.75, 1024
_SHARE_OF_KEPT = 0.25  # at most, of what the states of requests leave, for those that are kept; and of a host tier
_FEWEST_KEPT = 64  # states: a tree of prompts parts at several depths


def requests_at_once(
    most: int, free: int, pool: int, bytes_per_slot: int, *, context_length: int, vocab_size: int
) -> int:
    """How many requests run at once where nobody says: `most`, or a half or a quarter of it, so that what they
    take in passes is a small share of `free` bytes, and no more than a KV pool of `pool` bytes leaves of them, and
    the pool holds some hundred tokens for each.

    More at once took memory, never time: docs/lab-notebook/2026-11-22-requests-at-once.md.
    """
    limits = PassLimits(1, 1)
    per_request = limits.max_samples * vocab_size * _BYTES_A_LOGIT + limits.num_rows * context_length * 4
    room = min(_MAX_SHARE * free, free - pool if pool < free else _MAX_SHARE * free)
    fitting = min(room / per_request, pool / (_TOKENS_A_REQUEST * bytes_per_slot))
    return next((count for count in (most, most // 2) if count <= fitting), most // 4)


def requests_with_states(most: int, free: int, bytes_per_state: int, bytes_per_slot: int) -> int:
    """How many of `most` requests run at once where nobody says, and layers keep a state of each, of more than 0
    bytes: as many as three quarters of `free` bytes, which passes leave, hold with the KV of a thousand tokens of
    each.
    """
    if not bytes_per_state:
        return most
    # PassLimits.own_states grow by nine for eight requests.
    fitting = int(_SHARE_OF_REQUESTS * free) - 2 * bytes_per_state
    return max(1, min(most, int(fitting / (bytes_per_state * 9 / 8 + bytes_per_slot * _TOKENS_BESIDE_A_STATE))))


def states_in_pool(limits: PassLimits, free: int, bytes_per_state: int) -> int:
    """States of a pool in `free` bytes, the reserved one included: those of requests, and those that are kept for
    others that begin alike: as many as requests run at once, or 64 if that is more, and no more than a quarter of
    what the others leave holds. 0 where states have 0 bytes, since no layer keeps any.

    Raises ParameterError where those of requests do not fit.
    """
    if not bytes_per_state:
        return 0
    own = limits.own_states + 1
    left = free - own * bytes_per_state
    if left < 0:
        raise ParameterError(
            f"max_running_requests is {limits.max_running_requests}, whose sequences have {own:,} states of "
            f"{bytes_per_state:,} bytes each, but there are {free:,} bytes for them and the KV; lower "
            "max_running_requests"
        )
    fitting = int(_SHARE_OF_KEPT * left) // bytes_per_state
    return own + min(max(limits.max_running_requests, _FEWEST_KEPT), fitting)


def states_on_host(num_bytes: int, bytes_per_state: int) -> int:
    """How many states are in so much host memory, where layers keep some: in a quarter of it."""
    return int(_SHARE_OF_KEPT * num_bytes) // max(1, bytes_per_state)  # a stage may have none of these layers


@dataclass(frozen=True)
class RunLimits:
    """The limits of a Runtime.

    Attributes:
        pool_tokens: tokens that the KV pool holds.
        max_running_requests: requests that run at once.
        chunked_prefill_size: prompt tokens that one pass computes.
        num_states: states of sequences that are held at once; 0 of a model that keeps none.
    """

    pool_tokens: int
    max_running_requests: int = GPU_LIMITS.max_running_requests
    chunked_prefill_size: int = GPU_LIMITS.chunked_prefill_size
    num_states: int = 0

    @property
    def of_pass(self) -> PassLimits:
        return PassLimits(self.max_running_requests, self.chunked_prefill_size)
