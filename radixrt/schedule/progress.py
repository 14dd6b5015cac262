"""How far the running requests have come, in columns. Numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memory_pool.sparse_table import sparse_table
from radixrt.cache.radix_tree import Tokens

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]

MOST_STOPS = 8  # more tokens that may end a request are looked for request by request
NO_TOKEN = -1


class Progress:
    """Numbers and tokens of the running requests, each in the line of its row in `req_to_token`.

    A line keeps its numbers after its request has been let go, until the row is handed out again.

    Args:
        max_requests: rows.
        max_context_len: tokens of a request, prompt and answer.
        launched: `[max_requests]` int32, positions of each row that have a slot: the cache's own column.

    Attributes:
        launched: `[max_requests]` int32, positions whose KV has been, or is being, computed.
        known: `[max_requests]` int32, prompt tokens and collected output tokens.
        tokens: `[max_requests, max_context_len]` int32, the known tokens.
        prompt_len: `[max_requests]` int32.
        limit: `[max_requests]` int32, known tokens with which the request ends at the latest.
        extend_end: `[max_requests]` int32, tokens to extend over before it decodes.
        extended: `[max_requests]` int32, positions of the extend whose KV is known to be computed and finite.
        stops: `[max_requests, MOST_STOPS]` int32, tokens that end it, NO_TOKEN where there are fewer.
        may_stop: `[max_requests]` bool, whether it may end before its limit.
        is_special: `[max_requests]` bool, whether each of its tokens is to be looked at on its own.
        wants_logprobs: `[max_requests]` bool, whether log-probabilities of its tokens are computed.
        runs: `[max_requests]` bool, whether a running request holds the row.
    """

    def __init__(self, max_requests: int, max_context_len: int, launched: Int32Array) -> None:
        self.launched = launched
        self.known, self.prompt_len, self.limit, self.extend_end, self.extended = np.zeros(
            (5, max_requests), dtype=np.int32
        )
        self.tokens = sparse_table(max_requests, max_context_len)
        self.stops = np.full((max_requests, MOST_STOPS), NO_TOKEN, dtype=np.int32)
        self.may_stop, self.is_special, self.wants_logprobs, self.runs = np.zeros((4, max_requests), dtype=bool)

    def begin(
        self,
        row: int,
        tokens: Tokens,
        *,
        prompt_len: int,
        limit: int,
        stop_ids: frozenset[int],
        has_text_stop: bool,
        wants_logprobs: bool,
    ) -> None:
        """Take over the known `tokens` `[n]` of a request that runs from now on and extends over all of them."""
        self.tokens[row, : len(tokens)] = tokens
        self.known[row] = self.extend_end[row] = len(tokens)
        self.extended[row] = self.launched[row]  # found in the cache
        self.prompt_len[row] = prompt_len
        self.limit[row] = limit
        self.stops[row] = NO_TOKEN
        few = len(stop_ids) <= MOST_STOPS
        if few:
            self.stops[row, : len(stop_ids)] = list(stop_ids)
        self.may_stop[row] = bool(stop_ids) or has_text_stop
        self.is_special[row] = has_text_stop or wants_logprobs or not few
        self.wants_logprobs[row] = wants_logprobs
        self.runs[row] = True

    def end(self, row: int) -> Tokens:
        """The request of a row runs no more. Returns its known tokens, which are its own from now on."""
        self.runs[row] = False
        return self.tokens[row, : self.known[row]].copy()

    def append(self, rows: Int32Array, token_ids: Int32Array) -> BoolArray:
        """Add a sampled token `[n]` to each of `rows` `[n]`, none named twice. Returns `[n]`, who ends with it."""
        known = self.known[rows]
        self.tokens[rows, known] = token_ids
        self.known[rows] = known + 1
        ends: BoolArray = known + 1 >= self.limit[rows]
        ends |= (token_ids[:, None] == self.stops[rows]).any(axis=1)
        return ends

    def append_one(self, row: int, token_id: int) -> None:
        """Add a sampled token to one row."""
        self.tokens[row, self.known[row]] = token_id
        self.known[row] += 1

    def total(self, rows: Int32Array) -> Int32Array:
        """Known tokens and sampled tokens still in flight, `[n]`: one follows the last launched position."""
        total: Int32Array = np.maximum(self.known[rows], np.minimum(self.launched[rows] + 1, self.limit[rows]))
        return total
