"""What one pass computes, and what comes back from it. Numpy only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import RowChanges
from radixrt.cache.prefix_cache import Lease
from radixrt.schedule.request import Request

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class ScheduleBatch:
    """One pass: B requests with T new tokens in all. Requests with more than one new token come first.

    Attributes:
        requests: B requests.
        leases: what each of them holds; a result is only booked while a request still holds the same.
        num_extends: requests with more than one new token.
        req_pool_indices: `[B]` row of each request in `req_to_token`.
        prefix_lens: `[B]` positions whose KV is in the pool before the pass.
        seq_lens: `[B]` positions whose KV is in the pool after the pass.
        input_ids: `[T]` token ids; -(row + 1) stands for the last token that was sampled for that row, which
            only the device knows yet.
        out_cache_loc: `[T]` slot of each new token.
        num_samples: `[B]`, tokens sampled after the request's last new token: none, one, or the first of each of
            its n answers, as many of them as the pass has rows of logits for. They are S in all.
        scored: `[P]`, new tokens after which the log-probability of the prompt's next token is wanted.
        scored_targets: `[P]`, that next token.
        num_scored: `[B]`, how many of the P belong to each request, in order.
        row_changes: cells of `req_to_token` to change before the pass.
        admitted: (row, request) of each request that is in a pass for the first time under its lease.
        extended_tokens: those of the T tokens that extends compute; decodes compute the others.

    While the same requests decode pass after pass, and nothing else is computed, `requests` and `leases` are the
    same tuples, and `req_pool_indices` is the same array. Arrays may be shared between passes: nobody changes
    them.
    """

    requests: tuple[Request, ...]
    leases: tuple[Lease, ...]
    num_extends: int
    req_pool_indices: Int32Array
    prefix_lens: Int32Array
    seq_lens: Int32Array
    input_ids: Int32Array
    out_cache_loc: Int32Array
    num_samples: Int32Array
    scored: Int32Array
    scored_targets: Int32Array
    num_scored: Int32Array
    row_changes: RowChanges
    admitted: tuple[tuple[int, Request], ...]
    extended_tokens: int = 0


@dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities of R tokens, and the K most likely tokens in the place of each.

    Attributes:
        chosen: `[R]` float32, of the token itself.
        ranks: `[R]` int32, 1 for the most likely.
        top_ids: `[R, K]` int32, the most likely tokens, the most likely first.
        top: `[R, K]` float32, theirs.
    """

    chosen: NDArray[np.float32]
    ranks: Int32Array
    top_ids: Int32Array
    top: NDArray[np.float32]


@dataclass(frozen=True)
class PassResult:
    """What a pass found.

    Attributes:
        token_ids: `[S]` int32, the sampled tokens, request after request.
        finite: `[B]` bool, whether the request's numbers are all finite.
        logprobs: of those of the S sampled tokens whose request asked for them (`params.logprobs`), in order, if
            there are any.
        prompt_logprobs: of the P scored tokens, if there are any.
        seconds: that the device took; None: nobody has measured. A pass that was launched while the one before it
            was computed begins when that ends, so that the seconds of passes are what the device was busy, gaps
            between the kernels of a pass included. What it waits for transfers between the tiers is not in it.
        launch_seconds: that launching took the host, beside the device; 0 where launching computes the pass.
    """

    token_ids: Int32Array
    finite: NDArray[np.bool_]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    seconds: float | None = None
    launch_seconds: float = 0.0


class Runner(Protocol):
    """What computes passes, in the order in which they are launched."""

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        """Start transfers between the tiers, in order, all of which come before the pass that is launched next.

        Each is taken off the left end once it has been started: what is left when this raises has not been.
        """

    def launch(self, batch: ScheduleBatch) -> object:
        """Start a pass and return its handle without waiting for its result."""

    def collect(self, handle: object) -> PassResult:
        """Wait for a pass, the oldest in flight, and return its result."""

    def check_device(self, error: Exception) -> None:
        """Make ready for other passes after one that raised `error`, which may have run out of memory.

        Raises:
            DeviceLostError: no pass can run any more.
        """
