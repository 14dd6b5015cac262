"""Sampling parameters of the running answers, in columns: a pass gathers them instead of asking each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.schedule.answer import Answer
from radixrt.schedule.logits_processors import LogitsProcessors, ProcessedDraw, processor_arrays
from radixrt.schedule.passes import PROCESSED, Arrays, Features, SamplingInputs

NO_LOGPROBS = -1


class SamplingTable:
    """Sampling parameters of the running answers, by their row in `req_to_token`: `max_requests` of them."""

    def __init__(self, max_requests: int) -> None:
        self._neutral_row = max_requests  # always greedy, and asks for nothing else
        size = max_requests + 1
        self._temperatures = np.zeros(size, dtype=np.float32)
        self._columns: Arrays = {
            "seeds": np.zeros(size, dtype=np.int64),
            "sample_indices": np.zeros(size, dtype=np.int32),
            "top_ks": np.zeros(size, dtype=np.int32),
            "top_ps": np.ones(size, dtype=np.float32),
            "min_ps": np.zeros(size, dtype=np.float32),
        }
        self._num_top = np.full(size, NO_LOGPROBS, dtype=np.int32)
        self._wants_processed = np.zeros(size, dtype=bool)  # log-probabilities
        self._has_form = np.zeros(size, dtype=bool)
        self._has_lists = np.zeros(size, dtype=bool)  # of its processors
        self._processors_end = np.zeros(size, dtype=np.int64)
        self._processors: dict[int, LogitsProcessors] = {}
        self._admitted: dict[int, Answer] = {}  # by row, since the last pass

    def admit(self, row: int, answer: Answer) -> None:
        """Let a row be an answer's from the next pass on; it may hold the parameters of one that was released."""
        self._admitted[row] = answer

    def _fill(self) -> None:
        """Write the rows of answers that were admitted since the last pass."""
        rows = np.fromiter(self._admitted, np.int32, len(self._admitted))
        values = zip(*(self._values(row, answer) for row, answer in self._admitted.items()), strict=True)
        own = (self._num_top, self._wants_processed, self._has_form, self._processors_end, self._temperatures)
        for column, of_rows in zip((*own, *self._columns.values()), values, strict=True):
            column[rows] = of_rows
        self._admitted.clear()

    def _values(self, row: int, answer: Answer) -> tuple[Any, ...]:
        """Of all columns."""
        request, params = answer.request, answer.request.params
        processors = LogitsProcessors.of(request)
        if processors is not None:
            self._processors[row] = processors
            self._has_lists[row] = processors.has_lists
        # A greedy row has no use for filters, and must not make others go through them.
        temperature = np.float32(params.temperature)
        return (
            NO_LOGPROBS if params.logprobs is None else params.logprobs,
            params.wants_processed_logprobs,
            request.form is not None,
            0 if processors is None else processors.end,
            temperature,
            request.seed,
            answer.sample_index,
            *((params.top_k, params.top_p, params.min_p) if temperature else (0, 1.0, 0.0)),
        )

    def prepare(
        self, answers: Sequence[Answer], rows_of_pass: Int32Array, seq_lens: Int32Array, num_samples: Int32Array
    ) -> SamplingInputs:
        """The draws of a pass of B `answers`, each of which samples `num_samples` `[B]` tokens."""
        if self._admitted:
            self._fill()
        logits_rows, rows, positions = np.arange(len(answers), dtype=np.int32), rows_of_pass, seq_lens
        samples = np.zeros_like(logits_rows)
        if np.count_nonzero(num_samples != 1):
            first = np.cumsum(num_samples) - num_samples
            logits_rows = np.repeat(logits_rows, num_samples)
            rows, positions = rows_of_pass.take(logits_rows), seq_lens.take(logits_rows)
            samples = (np.arange(len(logits_rows)) - first.take(logits_rows)).astype(np.int32)

        num_top = self._num_top.take(rows)
        has_logprobs = num_top != NO_LOGPROBS
        asks = bool(has_logprobs.any())
        own: Arrays = {"logprob_rows": np.flatnonzero(has_logprobs).astype(np.int32)} if asks else {}

        masked = np.flatnonzero(self._has_form.take(rows)).astype(np.int32)
        if len(masked):
            own["masked_rows"] = masked
        is_processed = positions < self._processors_end.take(rows)
        processed = None
        if is_processed.any():
            at = np.flatnonzero(is_processed)
            own["processed_rows"] = at.astype(np.int32)
            filtered = np.flatnonzero(self._wants_processed.take(rows[at])).astype(np.int32)
            if len(filtered):
                places = np.searchsorted(own["logprob_rows"], at[filtered])
                own |= {"filtered_rows": filtered, "filtered_logprobs": places.astype(np.int32)}
            processed, drawn = self._draws(rows[at], positions[at], samples[at])
            own |= {PROCESSED + name: array for name, array in drawn.items()}
            if self._has_lists.take(rows[at]).any():
                draws = []
                for i in at.tolist():
                    row, position, known = int(rows[i]), int(positions[i]), answers[logits_rows[i]].tokens()
                    draws.append(ProcessedDraw(self._processors[row], row, position, known))
                own |= processor_arrays(draws)
            # These rows are drawn again from their processed logits: greedy draws are the cheapest here.
            rows = np.where(is_processed, np.int32(self._neutral_row), rows)
        features, plain = self._draws(rows, positions, samples)
        most_top = int(num_top.max()) if asks else None
        return SamplingInputs(logits_rows, features, processed, most_top, plain | own, own.get("masked_rows"))

    def _draws(self, rows: Int32Array, positions: Int32Array, samples: Int32Array) -> tuple[Features, Arrays]:
        """The features of S draws, and the arrays that they read, each `[S]`.

        `samples` is added to the rows' sample indices: 0 but for the other answers to a prompt.
        """
        temperatures = self._temperatures.take(rows)
        if not temperatures.any():
            return Features(), {}
        arrays = {name: column.take(rows) for name, column in self._columns.items()}
        arrays |= {"temperatures": temperatures, "draw_positions": positions}
        arrays["sample_indices"] += samples
        features = Features(
            is_random=True,
            has_top=bool(arrays["top_ks"].any() or (arrays["top_ps"] < 1.0).any()),
            has_min_p=bool(arrays["min_ps"].any()),
        )
        return features, {name: arrays[name] for name in features.array_names}
