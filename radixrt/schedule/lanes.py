"""Which decodes a pass takes where a pipeline computes several passes at once. Numpy only."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.arrays import Int32Array
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.schedule.answer import Answer
from radixrt.schedule.request_table import RequestTable

_SLACK = 8  # a lane stays as it is while it is longer than the mean by one part in so many


@dataclass(frozen=True, eq=False)
class Turn:
    """Answers that decode together, with their rows `[n]`. Where they do so again, it is the same object."""

    answers: tuple[Answer, ...]
    rows: Int32Array
    admissions: NDArray[np.int64]  # by which they got their rows


NO_TURN = Turn((), np.zeros(0, np.int32), np.zeros(0, np.int64))


class Lanes:
    """Lets decoding answers take turns, so that each of `num_lanes` passes in flight decodes others.

    A stage can compute a pass only once the tokens that it begins with are drawn. So an answer decodes again when
    `num_lanes` passes have been launched since its last token's, or that has ended; who has waited longest comes
    first. Nobody is told its lane: equal parts that take turns stay together by themselves.
    """

    def __init__(self, num_lanes: int, cache: PrefixCache, table: RequestTable) -> None:
        self._num_lanes, self._cache, self._table = num_lanes, cache, table
        self._turns: deque[Turn] = deque(maxlen=num_lanes)

    def next_turn(
        self, answers: tuple[Answer, ...], rows: Int32Array, num_running: int, *, waits: bool = False
    ) -> Turn:
        """Of all decoding `answers` and their `rows` `[N]` those of the coming pass. Those whose last tokens are
        not old enough are among them only if the pass `waits` for these.

        `num_running` answers do not extend: these, and those that wait for their last token alone.
        """
        launched, ended = self._cache.passes_launched, self._cache.passes_ended
        drawn_in = self._table.drawn_in[rows]
        able = np.flatnonzero(waits | (drawn_in < ended) | (drawn_in <= launched - self._num_lanes))
        equal_part = -(-num_running // self._num_lanes)
        if len(able) > equal_part + equal_part // _SLACK:
            first = np.argsort(drawn_in[able], kind="stable")[:equal_part]
            able = able[np.sort(first)]
        return self._turn_of(answers, rows, able) if len(able) else NO_TURN

    def _turn_of(self, answers: tuple[Answer, ...], rows: Int32Array, able: NDArray[np.intp]) -> Turn:
        chosen = rows[able]
        admissions = self._table.admissions[chosen]
        for turn in self._turns:
            if np.array_equal(turn.rows, chosen) and np.array_equal(turn.admissions, admissions):
                break
        else:
            takes = np.zeros(len(rows), dtype=bool)
            takes[able] = True
            turn = Turn(tuple(itertools.compress(answers, takes.tolist())), chosen, admissions)
        if turn in self._turns:
            self._turns.remove(turn)
        self._turns.append(turn)
        return turn

    def drawn(self, rows: Int32Array) -> None:
        """Note that the pass that is launched next draws tokens of these `rows` `[n]`."""
        self._table.drawn_in[rows] = self._cache.passes_launched
