"""How far the running answers have come, in columns. Numpy only.

What becomes of the positions of a running answer, and who owns their slots:

    [0, committed)          the tree's; the lease locks them
    [committed, computed)   the lease's; their KV is computed and finite
    [computed, allocated)   the lease's; passes in flight compute them
    [allocated, total)      no slot yet: known tokens to extend over, then at most one token that is being sampled

    0 <= committed <= computed <= allocated <= total <= max_len

`PrefixCache.extend` moves `allocated`, booking a pass moves `computed`, `PrefixCache.commit` moves `committed`.
`PrefixCache.truncate` takes `allocated` back. `known` counts the prompt and the collected output tokens. An
answer extends while allocated < `extend_len`, its known tokens when it was admitted, or when its form last forced
some; then it decodes. Each token collected since was sampled after a position of its own: all known tokens but the
last are computed then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memory_pool.req_to_token_pool import sparse_table
from radixrt.arrays import BoolArray, Int32Array
from radixrt.cache.radix_tree import Tokens
from radixrt.schedule.passes import NO_TOKEN
from radixrt.schedule.request import Request

MAX_STOPS = 8  # answers with more stop tokens look for them one by one


class RequestTable:
    """Lengths and tokens of the running answers, by their row in `req_to_token`.

    There are `max_requests` rows, each for a prompt with its answer, `max_context_len` tokens at most. A row keeps
    its numbers after its answer has been released, until it is handed out again.
    """

    def __init__(self, max_requests: int, max_context_len: int, allocated_lens: Int32Array) -> None:
        self.allocated_lens = allocated_lens  # positions that have a slot: the cache's own column
        columns = np.zeros((4, max_requests), dtype=np.int32)
        self.known_lens, self.extend_lens, self.prompt_lens, self.max_lens = columns
        self.tokens = sparse_table(max_requests, max_context_len)  # the known ones
        self.stops = np.full((max_requests, MAX_STOPS), NO_TOKEN, dtype=np.int32)  # fewer end with NO_TOKEN
        self._most_stops = 0  # of any request so far
        # It may end before max_len; each of its tokens, or what its extend ends with, is booked on its own; an
        # answer runs in it.
        self.may_stop, self.is_special, self.begins_alone, self.runs = np.zeros((4, max_requests), dtype=bool)
        # For lanes: the number of the last pass that draws for a row, once it decodes; and of its admission.
        self.drawn_in, self.admissions = np.zeros((2, max_requests), dtype=np.int64)
        self._num_admissions = 0

    def begin(self, rows: Sequence[int], requests: Sequence[Request], known: Sequence[Tokens]) -> None:
        """Take over the `known` tokens, `[n]` each, of answers that run from now on, in distinct `rows`, and
        extend over all of them.
        """
        for row, tokens in zip(rows, known, strict=True):
            self.tokens[row, : len(tokens)] = tokens
        stops = {ids: self._stops_of(ids) for ids in {request.stop_ids for request in requests}}
        special = [_is_special(request) for request in requests]
        alone = [request.params.n > 1 or request.form is not None for request in requests]
        self.known_lens[rows] = self.extend_lens[rows] = [len(tokens) for tokens in known]
        self.prompt_lens[rows] = [request.prompt_len for request in requests]
        self.max_lens[rows] = [request.max_len for request in requests]
        self.stops[rows] = [stops[request.stop_ids] for request in requests]
        self.is_special[rows] = special
        self.begins_alone[rows] = np.array(special) | alone
        self.may_stop[rows] = [request.may_stop for request in requests]
        self.runs[rows] = True
        self.admissions[rows] = np.arange(len(rows)) + (self._num_admissions + 1)
        self._num_admissions += len(rows)

    def _stops_of(self, stop_ids: frozenset[int]) -> list[int]:
        """A row of `stops`."""
        own = [] if len(stop_ids) > MAX_STOPS else list(stop_ids)
        self._most_stops = max(self._most_stops, len(own))
        return own + [NO_TOKEN] * (MAX_STOPS - len(own))

    def append(self, rows: Int32Array, token_ids: Int32Array) -> BoolArray:
        """Add a sampled token `[n]` to each of distinct `rows` `[n]`. Returns `[n]`, which end with it."""
        known_lens = self.known_lens.take(rows)
        self.tokens[rows, known_lens] = token_ids
        self.known_lens[rows] = known_lens = known_lens + 1
        ends: BoolArray = known_lens >= self.max_lens.take(rows)
        for column in range(self._most_stops):  # mostly one
            ends |= token_ids == self.stops[:, column].take(rows)
        return ends

    def total_lens(self, rows: Int32Array) -> Int32Array:
        """Known tokens and sampled ones in flight, `[n]`: one follows the last position that has a slot."""
        in_flight = np.minimum(self.allocated_lens[rows] + 1, self.max_lens[rows])
        total_lens: Int32Array = np.maximum(self.known_lens[rows], in_flight)
        return total_lens


def _is_special(request: Request) -> bool:
    """Whether each token of an answer is booked on its own."""
    has_more = request.params.logprobs is not None or request.make_text is not None
    return has_more or len(request.stop_ids) > MAX_STOPS
