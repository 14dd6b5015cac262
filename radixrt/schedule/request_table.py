"""How far answers have come: in columns for those that run, one by one for the others. Numpy only.

What becomes of the positions of a running answer, and who owns their slots:

    [0, committed)          the tree's; the lease locks them
    [committed, computed)   the lease's; their KV is computed and finite
    [computed, allocated)   the lease's; passes in flight compute them
    [allocated, total)      no slot yet: known tokens to extend over, then at most one token that is being sampled

    0 <= committed <= computed <= allocated <= total <= max_len

`PrefixCache.extend` moves `allocated`, booking a pass moves `computed`, `PrefixCache.commit` moves `committed`.
`PrefixCache.truncate` takes `allocated` back. `known` counts the prompt and the collected output tokens. An
answer extends while allocated < `extend_len`, its known tokens when it was admitted; then it decodes. Each token
collected since was sampled after a position of its own: all known tokens but the last are computed then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memory_pool.req_to_token_pool import sparse_table
from radixrt.cache.radix_tree import Tokens
from radixrt.schedule.passes import NO_TOKEN, Int32Array
from radixrt.schedule.request import Request

BoolArray = NDArray[np.bool_]

MAX_STOPS = 8  # answers with more stop tokens look for them one by one


class RequestTable:
    """Lengths and tokens of the running answers, by their row in `req_to_token`.

    A row keeps its numbers after its answer has been released, until it is handed out again.

    Args:
        max_requests: rows.
        max_context_len: tokens of a prompt with its answer.
        allocated_lens: `[max_requests]` int32, positions that have a slot: the cache's own column.

    Attributes:
        tokens: `[max_requests, max_context_len]` int32, the known tokens.
        stops: `[max_requests, MAX_STOPS]` int32, tokens that end it, NO_TOKEN where there are fewer.
        known_lens, prompt_lens, max_lens: `[max_requests]` int32, known tokens; the rest: see `Request`.
        extend_lens, extended_lens: tokens to extend over before it decodes, and those whose KV is computed.
        may_stop, wants_logprobs: `[max_requests]` bool: it may end before max_len; log-probabilities are computed.
        is_special, runs: each of its tokens is booked on its own; a running answer holds the row.
    """

    def __init__(self, max_requests: int, max_context_len: int, allocated_lens: Int32Array) -> None:
        self.allocated_lens = allocated_lens
        self.known_lens, self.prompt_lens, self.max_lens, self.extend_lens, self.extended_lens = np.zeros(
            (5, max_requests), dtype=np.int32
        )
        self.tokens = sparse_table(max_requests, max_context_len)
        self.stops = np.full((max_requests, MAX_STOPS), NO_TOKEN, dtype=np.int32)
        self.may_stop, self.is_special, self.wants_logprobs, self.runs = np.zeros((4, max_requests), dtype=bool)

    def begin(self, row: int, request: Request, tokens: Tokens) -> TableRow:
        """Take over the known `tokens` `[n]` of an answer that runs from now on and extends over all of them."""
        self.tokens[row, : len(tokens)] = tokens
        self.known_lens[row] = self.extend_lens[row] = len(tokens)
        self.extended_lens[row] = self.allocated_lens[row]  # found in the cache
        self.prompt_lens[row], self.max_lens[row] = request.prompt_len, request.max_len
        self.stops[row] = NO_TOKEN
        has_few_stops = len(request.stop_ids) <= MAX_STOPS
        if has_few_stops:
            self.stops[row, : len(request.stop_ids)] = list(request.stop_ids)
        self.may_stop[row] = request.may_stop
        self.wants_logprobs[row] = wants_logprobs = request.params.logprobs is not None
        self.is_special[row] = wants_logprobs or request.make_text_stop is not None or not has_few_stops
        self.runs[row] = True
        return TableRow(self, row)

    def append(self, rows: Int32Array, token_ids: Int32Array) -> BoolArray:
        """Add a sampled token `[n]` to each of distinct `rows` `[n]`. Returns `[n]`, which end with it."""
        known_lens = self.known_lens.take(rows)
        self.tokens[rows, known_lens] = token_ids
        self.known_lens[rows] = known_lens = known_lens + 1
        ends: BoolArray = known_lens >= self.max_lens.take(rows)
        ends |= (token_ids[:, None] == self.stops.take(rows, axis=0)).any(axis=1)
        return ends

    def total_lens(self, rows: Int32Array) -> Int32Array:
        """Known tokens and sampled ones in flight, `[n]`: one follows the last position that has a slot."""
        in_flight = np.minimum(self.allocated_lens[rows] + 1, self.max_lens[rows])
        total_lens: Int32Array = np.maximum(self.known_lens[rows], in_flight)
        return total_lens


class TableRow:
    """The lengths and tokens of one running answer. `Parked` has the same ones of an answer that does not run."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: RequestTable, row: int) -> None:
        self._table = table
        self._row = row

    @property
    def known_len(self) -> int:
        return int(self._table.known_lens[self._row])

    @property
    def allocated_len(self) -> int:
        return int(self._table.allocated_lens[self._row])

    @property
    def extend_len(self) -> int:
        return int(self._table.extend_lens[self._row])

    @property
    def computed_len(self) -> int:
        known_len = self.known_len
        return known_len - 1 if known_len > self.extend_len else int(self._table.extended_lens[self._row])

    @property
    def total_len(self) -> int:
        """As `RequestTable.total_lens`."""
        return max(self.known_len, min(self.allocated_len + 1, int(self._table.max_lens[self._row])))

    def tokens(self, end: int | None = None) -> Tokens:
        """The first `end` known tokens, or all: `[end]` int32, a view that is good until it stops running."""
        return self._table.tokens[self._row, : self.known_len if end is None else end]

    def append(self, token_id: int) -> None:
        self._table.tokens[self._row, self.known_len] = token_id
        self._table.known_lens[self._row] += 1

    def end(self) -> Parked:
        """The answer runs no more. Returns what it takes along."""
        self._table.runs[self._row] = False
        return Parked(self.tokens().copy(), self.total_len)


class Parked:
    """The tokens of an answer that does not run: it has no slots.

    Args:
        tokens: `[n]`, the known ones; never changed.
        total_len: with those that were in flight when it stopped running.
    """

    __slots__ = ("_tokens", "_total_len")

    allocated_len = extend_len = computed_len = 0

    def __init__(self, tokens: Tokens, total_len: int = 0) -> None:
        self._tokens = tokens
        self._total_len = total_len

    @property
    def known_len(self) -> int:
        return len(self._tokens)

    @property
    def total_len(self) -> int:
        return max(self._total_len, len(self._tokens))

    def tokens(self, end: int | None = None) -> Tokens:
        return self._tokens[:end]

    def append(self, token_id: int) -> None:
        self._tokens = np.append(self._tokens, np.int32(token_id))
