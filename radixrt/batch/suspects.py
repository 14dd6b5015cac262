"""Pieces of a batch that may kill the process that runs them: they run apart until it is known which do."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from radixrt.output import RequestOutput

LOSSES = 2  # with so many processes a piece is lost before it is suspected
PARTS = 8  # of a lost group: a loss costs the start of a process, a part only its own time
LOSSES_ALONE = 2  # of a piece that kills


class Suspects:
    """What was lost with several processes, in groups that run on a lane that has nothing else.

    A group that is lost again is cut in parts, down to single pieces. A piece that is lost by itself a second
    time, on another lane if there is one, is what kills: so it was lost with at least four processes.
    """

    def __init__(self) -> None:
        self._losses: Counter[int] = Counter()  # of each piece, among others that are not suspected
        self._waiting: deque[list[int]] = deque()
        self._running: dict[int, list[int]] = {}  # by lane: what has not ended of its group
        self._is_alone: set[int] = set()  # lanes that run a group of one
        self._lost_alone: dict[int, list[int]] = {}  # by piece: on which lanes

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    def note(self, pieces: Collection[int]) -> list[int]:
        """A process was lost that had pieces of all kinds. Returns those that are suspected now."""
        self._losses.update(pieces)
        found = sorted(piece for piece in pieces if self._losses[piece] >= LOSSES)
        self._waiting.extend(_parts(found))
        return found

    def add(self, piece: int) -> None:
        """Suspect a piece, as a group of its own."""
        self._waiting.append([piece])

    def is_on(self, lane: int) -> bool:
        """Whether a lane runs a group."""
        return lane in self._running

    def take(self, lane: int, has_others: bool) -> list[int]:
        """The next group for a lane that has nothing else; `has_others`: whether other lanes run pieces, too."""
        for group in self._waiting:
            if has_others and len(group) == 1 and lane in self._lost_alone.get(group[0], ()):
                continue
            self._waiting.remove(group)
            self._running[lane] = list(group)
            if len(group) == 1:
                self._is_alone.add(lane)
            return group
        return []

    def end(self, lane: int, piece: int) -> None:
        """A piece of a lane's group needs nothing more."""
        group = self._running[lane]
        group.remove(piece)
        if not group:
            self._forget(lane)

    def lose(self, lane: int) -> list[int]:
        """A lane was lost with its group. Returns the pieces that are known to kill: nothing runs them again."""
        group, is_alone = self._running[lane], lane in self._is_alone
        self._forget(lane)
        if is_alone:
            lanes = self._lost_alone.setdefault(group[0], [])
            lanes.append(lane)
            if len(lanes) >= LOSSES_ALONE:
                return group
        self._waiting.extendleft(reversed(_parts(group)))
        return []

    def _forget(self, lane: int) -> None:
        del self._running[lane]
        self._is_alone.discard(lane)


def killed(lost: RequestOutput) -> RequestOutput:
    """The output of what is known to kill, given that of its last loss."""
    why = f"it ends each process that runs it, also with nothing beside it. The last one: {lost.error}"
    return replace(RequestOutput.refused(lost.index, why, lost.id), cause=lost.cause)


def _parts(pieces: Sequence[int]) -> list[list[int]]:
    """At most PARTS of about the same size, none empty."""
    size = -(-len(pieces) // PARTS)
    return [list(pieces[begin : begin + size]) for begin in range(0, len(pieces), max(1, size))]
