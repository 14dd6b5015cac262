"""What running requests want of their draws, in columns: a pass gathers them instead of asking each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixrt.schedule.logits_processors import LogitsProcessors, ProcessedDraw, processor_arrays
from radixrt.schedule.passes import PROCESSED, Arrays, Features, Int32Array, SamplingInputs
from radixrt.schedule.request import Request

NO_LOGPROBS = -1


class SamplingTable:
    """Parameters of all requests that run, by their row in `req_to_token`.

    Args:
        max_requests: rows; one more, `neutral_row`, is greedy and asks for nothing else, and stays so.
    """

    def __init__(self, max_requests: int) -> None:
        self.neutral_row = max_requests
        size = max_requests + 1
        self._temperatures = np.zeros(size, dtype=np.float32)
        self._top_ks = np.zeros(size, dtype=np.int32)
        self._top_ps = np.ones(size, dtype=np.float32)
        self._min_ps = np.zeros(size, dtype=np.float32)
        self._seeds = np.zeros(size, dtype=np.int64)
        self._sample_indices = np.zeros(size, dtype=np.int32)
        self._num_top = np.full(size, NO_LOGPROBS, dtype=np.int32)
        self._processors_end = np.zeros(size, dtype=np.int64)
        self._processors: dict[int, LogitsProcessors] = {}

    def admit(self, row: int, request: Request) -> None:
        """Fill a row; whatever was in it is of a request that has let go of it."""
        params = request.params
        self._temperatures[row] = params.temperature
        # A greedy row has no use for filters, and must not make others go through them.
        is_random = bool(self._temperatures[row])
        self._top_ks[row] = params.top_k if is_random else 0
        self._top_ps[row] = params.top_p if is_random else 1.0
        self._min_ps[row] = params.min_p if is_random else 0.0
        self._seeds[row] = request.seed
        self._sample_indices[row] = request.sample_index
        self._num_top[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        processors = LogitsProcessors.of(request)
        if processors is None:
            self._processors.pop(row, None)
            self._processors_end[row] = 0
        else:
            self._processors[row] = processors
            self._processors_end[row] = processors.end

    def is_processed(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.bool_]:
        """Bool `[S]`: whether a request changes the logits that its token at a position is drawn from."""
        return positions < self._processors_end.take(rows)

    def processors(self, row: int) -> LogitsProcessors:
        """Of the request in a row that `is_processed`. Raises KeyError if it never is."""
        return self._processors[row]

    def num_top(self, rows: Int32Array) -> Int32Array:
        """Int32 `[S]`: alternatives wanted with a token's log-probability; NO_LOGPROBS: not even that is."""
        return self._num_top.take(rows)

    def draws(self, rows: Int32Array, positions: Int32Array, samples: Int32Array) -> tuple[Features, Arrays]:
        """What S draws make use of, and its arrays, each `[S]`.

        Args:
            rows: of the requests.
            positions: of the tokens to be drawn.
            samples: how far behind its request's own sample each draw's is: 0 but for further answers.
        """
        temperatures = self._temperatures.take(rows)
        if not temperatures.any():
            return Features(), {}
        arrays: Arrays = {
            "temperatures": temperatures,
            "seeds": self._seeds.take(rows),
            "sample_indices": self._sample_indices.take(rows) + samples,
            "draw_positions": positions,
        }
        top_ks, top_ps, min_ps = self._top_ks.take(rows), self._top_ps.take(rows), self._min_ps.take(rows)
        features = Features(
            is_random=True, has_top=bool(top_ks.any() or (top_ps < 1.0).any()), has_min_p=bool(min_ps.any())
        )
        arrays |= {"top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
        return features, {name: arrays[name] for name in features.array_names}


def prepare_sampling(
    table: SamplingTable,
    requests: Sequence[Request],
    req_pool_indices: Int32Array,
    seq_lens: Int32Array,
    num_samples: Int32Array,
) -> SamplingInputs:
    """The draws of a pass of B `requests`, each of which samples `num_samples` `[B]` tokens."""
    logits_rows = np.repeat(np.arange(len(requests), dtype=np.int32), num_samples)
    rows, positions = req_pool_indices.take(logits_rows), seq_lens.take(logits_rows)
    first = np.cumsum(num_samples) - num_samples
    samples = (np.arange(len(logits_rows)) - first.take(logits_rows)).astype(np.int32)

    num_top = table.num_top(rows)
    has_logprobs = num_top != NO_LOGPROBS
    asks = bool(has_logprobs.any())
    own: Arrays = {"logprob_rows": np.flatnonzero(has_logprobs).astype(np.int32)} if asks else {}

    is_processed = table.is_processed(rows, positions)
    processed = None
    plain_rows = rows
    if is_processed.any():
        at = np.flatnonzero(is_processed)
        processed, drawn = table.draws(rows[at], positions[at], samples[at])
        draws = [
            ProcessedDraw(
                processors=table.processors(row),
                row=row,
                position=position,
                known=request.tokens(),
                last_is_unknown=position > request.num_known,
            )
            for row, position, request in zip(
                rows[at].tolist(), positions[at].tolist(), (requests[i] for i in logits_rows[at]), strict=True
            )
        ]
        own |= {"processed_rows": at.astype(np.int32)} | {PROCESSED + name: array for name, array in drawn.items()}
        own |= processor_arrays(draws)
        # These rows are drawn again from their processed logits: draw them greedily here, which is the cheapest.
        plain_rows = np.where(is_processed, np.int32(table.neutral_row), rows)
    features, plain = table.draws(plain_rows, positions, samples)
    return SamplingInputs(logits_rows, features, processed, int(num_top.max()) if asks else None, plain | own)
