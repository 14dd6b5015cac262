"""Hands the pieces of a run out to what runs them: a Runtime, or the replicas of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from radixrt.batch.dispatch import Dispatch
from radixrt.batch.suspects import Suspects

# Requests are made while the device computes: some at a time, whenever fewer wait than a scheduler ranks.
ENOUGH_WAITING = 1024
SUBMITTED_AT_ONCE = 512
# Where there are several lanes, what has been handed out can no longer be taken by another one.
LEAST_WAITING = 16
HANDED_AT_ONCE = 64  # pieces, in turns: no lane waits for its first ones until others have all of theirs


class Lane(Protocol):
    """What runs requests by itself, one of several."""

    @property
    def num_waiting(self) -> int:
        """Requests that it has and has not begun."""

    @property
    def num_running(self) -> int:
        """Answers that it computes."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now."""

    @property
    def is_gone(self) -> bool:
        """Whether it never will again."""


class Handout:
    """Gives each lane what it begins soon.

    All answers that a lane computes may end in the same pass, as those of one length do, so as many pieces as it
    has computed at once may wait there; but no more than wait in its range besides, so that others can take these
    in the end.

    Args:
        dispatch: has a range for each lane.
        lanes: at least one.
        first: pieces that each of several lanes gets at first: as many as it runs at once.
        answers: of a piece, on average.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        lanes: Sequence[Lane],
        first: int,
        answers: float = 1.0,
    ) -> None:
        self._dispatch, self._lanes = dispatch, lanes
        self._first, self._answers = first, answers
        self._most = [0.0] * len(lanes)  # pieces that each has computed at once
        self._gone: set[int] = set()
        self._suspects = Suspects()

    @property
    def is_done(self) -> bool:
        """Whether all pieces have ended."""
        return not (self._dispatch.num_left or self._suspects)

    def next(self) -> Iterator[tuple[int, list[int]]]:
        """Pieces for lanes that have room, with the number of the lane, some at a time, in turns."""
        for number, lane in enumerate(self._lanes):
            if lane.is_gone and number not in self._gone:
                self._gone.add(number)
                self._dispatch.retire(number)
        away = [number for number, lane in enumerate(self._lanes) if not lane.is_ready]
        rooms: dict[int, int] = {}
        for number, lane in enumerate(self._lanes):
            if self._suspects.is_on(number):
                continue
            if lane.is_ready and lane.is_idle:
                has_others = len(self._gone) + 1 < len(self._lanes)
                if group := self._suspects.take(number, has_others):
                    yield number, group
                    continue
            if lane.is_ready and (room := self._room(number, lane)) > 0:
                rooms[number] = room
        at_once = HANDED_AT_ONCE if len(self._lanes) > 1 else SUBMITTED_AT_ONCE
        while rooms:
            for number, room in list(rooms.items()):
                is_there = self._lanes[number].is_ready  # it may have been lost since
                if pieces := self._dispatch.take(number, min(room, at_once), away) if is_there else []:
                    yield number, pieces
                rooms[number] -= len(pieces)
                if not (pieces and rooms[number] and self._dispatch.waiting(number)):
                    del rooms[number]

    def end(self, lane: int, piece: int) -> None:
        """A piece needs nothing more."""
        if self._suspects.is_on(lane):
            self._suspects.end(lane, piece)
        else:
            self._dispatch.end(lane, piece)

    def lose(self, lane: int, pieces: Sequence[int]) -> list[int]:
        """A lane's process was lost with pieces that it had not ended: they wait again, from the second time on
        as suspects. Returns those that are known to kill the process that runs them: they count as ended.
        """
        if self._suspects.is_on(lane):
            return self._suspects.lose(lane)
        self._dispatch.give_away(lane, self._suspects.note(pieces))
        self._dispatch.put_back(lane, pieces)
        return []

    def suspect(self, piece: int) -> None:
        """A piece that had ended runs again, with nothing beside it."""
        self._suspects.add(piece)

    def _room(self, number: int, lane: Lane) -> int:
        """How many pieces a lane may get now."""
        waiting = lane.num_waiting
        if len(self._lanes) == 1:
            return SUBMITTED_AT_ONCE if waiting < ENOUGH_WAITING else 0
        self._most[number] = most = max(self._most[number], lane.num_running / self._answers)
        if not most:  # it has computed nothing yet
            return self._first - waiting
        in_range = sum(end - begin for begin, end in self._dispatch.waiting(number))
        least = max(1.0, LEAST_WAITING / self._answers)
        return int(max(least, min(most, (in_range + waiting) / 2))) - waiting
