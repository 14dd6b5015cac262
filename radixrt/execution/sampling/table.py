"""What running requests want of their draws, in columns: a pass gathers them instead of asking each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixrt.execution.sampling.processors import Int32Array, LogitChanges
from radixrt.schedule.request import Request

Arrays = dict[str, NDArray[Any]]

NO_LOGPROBS = -1


@dataclass(frozen=True)
class Features:
    """Which parameters some row of a draw makes use of. With the shape of the logits they tell what is launched.

    Attributes:
        is_random: a temperature above 0; without one each row takes its likeliest token, and there are no filters.
        has_top: top-k or top-p.
        has_min_p: min-p.
    """

    is_random: bool = False
    has_top: bool = False
    has_min_p: bool = False

    @property
    def array_names(self) -> tuple[str, ...]:
        """The arrays that such a draw reads, a number a row in each."""
        if not self.is_random:
            return ()
        return (
            "temperatures",
            "seeds",
            "sample_indices",
            "draw_positions",
            *(("top_ks", "top_ps") if self.has_top else ()),
            *(("min_ps",) if self.has_min_p else ()),
        )


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
        self._changes_end = np.zeros(size, dtype=np.int64)
        self._changes: dict[int, LogitChanges] = {}

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
        changes = LogitChanges.of(request)
        if changes is None:
            self._changes.pop(row, None)
            self._changes_end[row] = 0
        else:
            self._changes[row] = changes
            self._changes_end[row] = changes.end

    def is_special(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.bool_]:
        """Bool `[S]`: whether a request changes the logits that its token at a position is drawn from."""
        return positions < self._changes_end.take(rows)

    def changes(self, row: int) -> LogitChanges:
        """Of the request in a row that `is_special`. Raises KeyError if it never is."""
        return self._changes[row]

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
