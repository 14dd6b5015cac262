"""What one pass computes, and what comes back from it. Numpy only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import NO_CHANGES, RowChanges
from radixrt.arrays import BoolArray, Int32Array

Arrays = dict[str, NDArray[Any]]

NO_TOKEN = -1
PROCESSED = "processed_"  # begins the names of the arrays of the second draw


@dataclass(frozen=True)
class Features:
    """Sampling parameters that some row of a draw uses. These and the logits' shape tell what is launched."""

    is_random: bool = False  # a temperature above 0; without one each row takes its likeliest token, unfiltered
    has_top: bool = False  # top-k or top-p
    has_min_p: bool = False

    @property
    def array_names(self) -> tuple[str, ...]:
        """The arrays that such a draw reads, with a number for each row."""
        if not self.is_random:
            return ()
        filters = (*(("top_ks", "top_ps") if self.has_top else ()), *(("min_ps",) if self.has_min_p else ()))
        return ("temperatures", "seeds", "sample_indices", "draw_positions", *filters)


@dataclass(frozen=True)
class SamplingInputs:
    """How a pass draws from its S rows of logits."""

    logits_rows: Int32Array  # `[S]`, the row of the pass that each row of logits belongs to, ascending
    features: Features  # of the draw of all S rows
    processed: Features | None  # of the second draw, of the X rows whose logits are processed first; may be none
    num_top: int | None  # alternatives to find for the L rows that want log-probabilities; None: there are none
    # Parameters by name, each `[S]`, `[X]` or `[L]`, or a list of pairs of a processed row and a token. Where Y
    # rows want log-probabilities of what they are drawn from, their places `[Y]` among the X and among the L.
    arrays: Mapping[str, NDArray[Any]]
    # `[M]`, those of the S draws whose answers have a form: they wait for masks, which come before all else.
    masked: Int32Array | None = None


@dataclass(frozen=True)
class Pass:
    """One pass as plain numbers: B rows that compute T new tokens. A `Booking` says whose it is.

    While the same requests decode pass after pass, and nothing else is computed, `req_pool_indices` is the same
    array. Arrays may be shared between passes: nobody changes them.
    """

    num_extends: int  # rows with more than one new token; they come first
    req_pool_indices: Int32Array  # `[B]`, row of each request in `req_to_token`
    prefix_lens: Int32Array  # `[B]`, positions whose KV is in the pool before, or is a new token of another row
    seq_lens: Int32Array  # `[B]`, and after it
    # `[T]`; -(row + 1) stands for the last token sampled for that row, which only the device knows yet.
    input_ids: Int32Array
    out_cache_loc: Int32Array  # `[T]`, slot of each new token
    # `[B]`, tokens sampled after the last new token: none, one, or the first of each of a prompt's n answers, as
    # many of them as the pass has rows of logits for. They are S in all.
    num_samples: Int32Array
    scored: Int32Array  # `[P]`, new tokens after which the log-probability of the prompt's next token is wanted
    scored_targets: Int32Array  # `[P]`, that next token
    num_scored: Int32Array  # `[B]`, how many of the P belong to each row, in order
    row_changes: RowChanges  # cells of `req_to_token` to change before the pass
    sampling: SamplingInputs  # how the S tokens are drawn
    num_top_scored: int = 0  # alternatives to find for the P tokens
    extended_tokens: int = 0  # the T tokens less those of decodes
    # Of a model whose layers keep states, `[B]`: the state that a row begins with, 0 for zeros, and the one that
    # it leaves after its last new token. None for other models.
    state_reads: Int32Array | None = None
    state_writes: Int32Array | None = None

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.req_pool_indices)


_NONE = np.zeros(0, np.int32)
# A pass of nothing, to `replace` the parts of that another one has.
NO_ROWS = Pass(0, *(_NONE,) * 9, NO_CHANGES, SamplingInputs(_NONE, Features(), None, None, {}))


@dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities of R tokens, and the K most likely tokens in the place of each."""

    chosen: NDArray[np.float32]  # `[R]`, of the token itself
    ranks: Int32Array  # `[R]`, 1 for the most likely
    top_ids: Int32Array  # `[R, K]`, the most likely first
    top: NDArray[np.float32]  # `[R, K]`, theirs


@dataclass(frozen=True)
class PassResult:
    """What a pass found."""

    token_ids: Int32Array  # `[S]`, the sampled tokens, row after row
    # `[B]`, how many of each row's sampled tokens count, the first ones: all of `num_samples`, fewer where drafts
    # were wrong. Each of a prompt's answers takes one; a decode takes all, and has computed as many positions.
    accepted: Int32Array
    finite: BoolArray  # `[B]`, whether the row's numbers are all finite
    logprobs: Logprobs | None = None  # of the sampled tokens whose request asked for them, in order
    prompt_logprobs: Logprobs | None = None  # of the P scored tokens
    # Device time, with gaps between kernels, without transfers between the tiers; None: not measured. A pass that
    # was launched while the one before was computed begins when that ends, so that seconds add up. The waits
    # for masks, and for the stage before, are within.
    seconds: float | None = None
    waited_for_masks: bool = False  # the device had the logits before the masks were there
    launch_seconds: float = 0.0  # host time of the launch, beside the device; 0 where launching computes the pass


class Runner(Protocol):
    """What computes passes, in the order in which they are launched."""

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        """Start transfers between the tiers, in order, all of which come before the pass that is launched next.

        Each is taken off the left end once it has been started: what is left when this raises has not been.
        """

    def prepare(self, pass_: Pass) -> None:
        """Do what can be done of the next launch while the draws of the pass before wait for masks. What is raised
        is raised by `launch`.
        """

    def launch(self, pass_: Pass) -> object:
        """Start a pass and return its handle without waiting for its result. One with masked draws draws nothing
        yet: `draw_masked` is called before the next one is launched.
        """

    def mask_memory(self, num_masks: int, num_words: int) -> Int32Array:
        """Memory `[num_masks, num_words]` for masks of the pass that was launched last. It may hold anything."""

    def draw_masked(self, handle: object, masks: Int32Array) -> None:
        """Start the draws of a pass; `masks` `[M, ceil(vocab_size / 32)]`, in `mask_memory`, are those of its
        masked draws, in order: tokens whose bit is 0 are not drawn.
        """

    def collect(self, handle: object) -> PassResult:
        """Wait for a pass, the oldest in flight, and return its result."""

    def check_device(self, error: Exception) -> None:
        """Make ready for other passes after one that raised `error`, which may have run out of memory.

        Raises DeviceLostError where no pass can run any more.
        """
