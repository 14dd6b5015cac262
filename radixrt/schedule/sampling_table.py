"""Sampling parameters of the running answers, in columns: a pass gathers them instead of asking each answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixrt.schedule.answer import Answer
from radixrt.schedule.logits_processors import LogitsProcessors, ProcessedDraw, processor_arrays
from radixrt.schedule.passes import PROCESSED, Arrays, Features, Int32Array, SamplingInputs

NO_LOGPROBS = -1


class SamplingTable:
    """Sampling parameters of the running answers, by their row in `req_to_token`.

    Args:
        max_requests: rows. One more, `neutral_row`, is always greedy and asks for nothing else.
    """

    def __init__(self, max_requests: int) -> None:
        self.neutral_row = max_requests
        size = max_requests + 1
        self._columns: Arrays = {
            "temperatures": np.zeros(size, dtype=np.float32),
            "seeds": np.zeros(size, dtype=np.int64),
            "sample_indices": np.zeros(size, dtype=np.int32),
            "top_ks": np.zeros(size, dtype=np.int32),
            "top_ps": np.ones(size, dtype=np.float32),
            "min_ps": np.zeros(size, dtype=np.float32),
        }
        self._num_top = np.full(size, NO_LOGPROBS, dtype=np.int32)
        self._processors_end = np.zeros(size, dtype=np.int64)
        self._processors: dict[int, LogitsProcessors] = {}

    def admit(self, row: int, answer: Answer) -> None:
        """Fill a row; it may hold the parameters of an answer that was released."""
        request, params = answer.request, answer.request.params
        # A greedy row has no use for filters, and must not make others go through them.
        is_random = bool(np.float32(params.temperature))
        values = {
            "temperatures": params.temperature,
            "seeds": request.seed,
            "sample_indices": answer.sample_index,
            "top_ks": params.top_k if is_random else 0,
            "top_ps": params.top_p if is_random else 1.0,
            "min_ps": params.min_p if is_random else 0.0,
        }
        for name, value in values.items():
            self._columns[name][row] = value
        self._num_top[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        processors = LogitsProcessors.of(request)
        self._processors_end[row] = 0 if processors is None else processors.end
        self._processors.pop(row, None)
        if processors is not None:
            self._processors[row] = processors

    def is_processed(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.bool_]:
        """Bool `[S]`: whether the token at a position is drawn from processed logits."""
        return positions < self._processors_end.take(rows)

    def processors(self, row: int) -> LogitsProcessors:
        """Those of a row that `is_processed`. Raises KeyError if it never is."""
        return self._processors[row]

    def num_top(self, rows: Int32Array) -> Int32Array:
        """Int32 `[S]`: alternatives wanted with a token's log-probability; NO_LOGPROBS where none is wanted."""
        return self._num_top.take(rows)

    def draws(self, rows: Int32Array, positions: Int32Array, samples: Int32Array) -> tuple[Features, Arrays]:
        """The features of S draws, and the arrays that they read, each `[S]`.

        Args:
            rows: of the answers.
            positions: of the tokens to be drawn.
            samples: what to add to each row's sample index: 0 but for the other answers to a prompt.
        """
        if not self._columns["temperatures"].take(rows).any():
            return Features(), {}
        arrays = {name: column.take(rows) for name, column in self._columns.items()}
        arrays["sample_indices"] += samples
        arrays["draw_positions"] = positions
        features = Features(
            is_random=True,
            has_top=bool(arrays["top_ks"].any() or (arrays["top_ps"] < 1.0).any()),
            has_min_p=bool(arrays["min_ps"].any()),
        )
        return features, {name: arrays[name] for name in features.array_names}


def prepare_sampling(
    table: SamplingTable,
    answers: Sequence[Answer],
    req_pool_indices: Int32Array,
    seq_lens: Int32Array,
    num_samples: Int32Array,
) -> SamplingInputs:
    """The draws of a pass of B `answers`, each of which samples `num_samples` `[B]` tokens."""
    logits_rows = np.repeat(np.arange(len(answers), dtype=np.int32), num_samples)
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
                known=answer.progress.tokens(),
                last_is_unknown=position > answer.progress.known_len,
            )
            for row, position, answer in zip(
                rows[at].tolist(), positions[at].tolist(), (answers[i] for i in logits_rows[at]), strict=True
            )
        ]
        own |= {"processed_rows": at.astype(np.int32)} | {PROCESSED + name: array for name, array in drawn.items()}
        own |= processor_arrays(draws)
        # These rows are drawn again from their processed logits: draw them greedily here, which is the cheapest.
        plain_rows = np.where(is_processed, np.int32(table.neutral_row), rows)
    features, plain = table.draws(plain_rows, positions, samples)
    return SamplingInputs(logits_rows, features, processed, int(num_top.max()) if asks else None, plain | own)
