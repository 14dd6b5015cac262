"""Which replica runs which pieces of a batch: its own range in order, and what it takes from others.

Only the parent of the replicas has a Dispatch. It hands out little at a time (`lanes.py` says how much), so that
nearly all of a range can still be taken by others: a replica that has none left takes the later half of the one
with most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from radixrt.planning.shards import Pieces, Shards

STEAL_TOLERANCE = 0.1  # of what is left of a range, that a cut may be beside its middle without counting
KEPT = 0.95  # of what earlier pieces have taken, for each that comes after


class Dispatch:
    """Each piece is waiting in a range of one replica, running on one, or ended.

    Args:
        shards: the ranges at first.
        stolen: is called with the first piece of each range that a replica takes from another.
    """

    def __init__(self, shards: Shards, stolen: Callable[[int], object] = lambda piece: None) -> None:
        self._pieces: Pieces = shards.pieces
        bounds = shards.bounds.tolist()
        # What waits for each replica: ranges [begin, end) of pieces, none empty, in the order in which they run.
        self._waiting = [deque([(a, b)] if a < b else []) for a, b in pairwise(bounds)]
        self._running: list[set[int]] = [set() for _ in self._waiting]
        self._gone: set[int] = set()
        self._paces = [_Pace() for _ in self._waiting]
        self._stolen = stolen
        self._left = len(self._pieces)

    @property
    def num_left(self) -> int:
        """Pieces that have not ended."""
        return self._left

    def waiting(self, replica: int) -> list[tuple[int, int]]:
        """The ranges [begin, end) that wait for a replica."""
        return list(self._waiting[replica])

    def running(self, replica: int) -> frozenset[int]:
        """The pieces that a replica runs."""
        return frozenset(self._running[replica])

    def seconds_waiting(self, replica: int) -> float:
        """Of what waits for a replica, as predicted, and as its last pieces have taken beside their prediction."""
        return self._paces[replica].ratio * sum(map(self._seconds, self._waiting[replica]))

    def take(self, replica: int, count: int = 1, away: Iterable[int] = ()) -> list[int]:
        """The next pieces for a replica, so many; fewer if no more wait, and none if nothing waits that it would
        end sooner than others. `away`: replicas that are starting.
        """
        waiting, taken = self._waiting[replica], list[int]()
        if not waiting:
            self._steal(replica, away)
        while waiting and len(taken) < count:
            begin, end = waiting.popleft()
            taken.append(begin)
            if begin + 1 < end:
                waiting.appendleft((begin + 1, end))
        self._running[replica].update(taken)
        return taken

    def end(self, replica: int, piece: int, now: float) -> bool:
        """Note that a replica has ended a piece; False if it was not running there, as after `lose`.

        `now`: seconds of any clock.
        """
        if piece not in self._running[replica]:
            return False
        self._running[replica].remove(piece)
        self._paces[replica].note(now, float(self._pieces.seconds[piece]))
        self._left -= 1
        return True

    def lose(self, replica: int) -> list[int]:
        """What a replica was running waits for it again, before the rest, or for others. Returns the pieces."""
        lost = sorted(self._running[replica])
        self.put_back(replica, lost)
        return lost

    def give_away(self, replica: int, pieces: Iterable[int]) -> None:
        """Pieces that a replica was running are no longer among those of this dispatch."""
        for piece in pieces:
            self._running[replica].remove(piece)
            self._left -= 1

    def put_back(self, replica: int, pieces: Sequence[int]) -> None:
        """Pieces that a replica was running wait for it again, before the rest; others change nothing."""
        own = sorted(self._running[replica].intersection(pieces))
        self._running[replica].difference_update(own)
        self._waiting[replica].extendleft((piece, piece + 1) for piece in reversed(own))

    def retire(self, replica: int) -> list[int]:
        """The same for a replica that does not come back: others take all that waits for it."""
        self._gone.add(replica)
        return self.lose(replica)

    def _steal(self, thief: int, away: Iterable[int]) -> None:
        """Take the later half of what waits for a replica that is gone, for the one with most work, if it ends
        sooner so, though something is computed once more, or for one that is away: nobody knows how long.
        """
        for replicas, is_sure in ((self._gone, True), (range(len(self._waiting)), False), (away, True)):
            victim = max(replicas, key=self.seconds_waiting, default=thief)
            ranges = self.waiting(victim)
            if not ranges:
                continue
            nth, cut = self._middle(ranges)
            begin, end = ranges[nth]
            taken = [(cut, end), *ranges[nth + 1 :]]
            seconds = self._paces[victim].ratio * sum(map(self._seconds, taken))
            if is_sure or float(self._pieces.repeated_seconds[cut]) + seconds <= self.seconds_waiting(victim):
                self._waiting[victim] = deque([*ranges[:nth], *([(begin, cut)] if begin < cut else [])])
                self._waiting[thief].extend(taken)
                self._stolen(cut)
                return

    def _middle(self, ranges: list[tuple[int, int]]) -> tuple[int, int]:
        """Where to cut ranges in two, before the last piece at the latest: which range, and the piece after it."""
        seconds = sum(map(self._seconds, ranges))
        wanted = seconds / 2
        for nth, (begin, end) in enumerate(ranges):
            cut = self._pieces.cut(begin, end, wanted, STEAL_TOLERANCE * seconds)
            if cut < end:
                return nth, cut
            wanted -= self._seconds((begin, end))
        return len(ranges) - 1, ranges[-1][1] - 1

    def _seconds(self, of: tuple[int, int]) -> float:
        """Predicted, of a range."""
        begin, end = self._pieces.seconds_before[list(of)]
        return float(end - begin)


class _Pace:
    """How long a replica's last pieces took, as a multiple of what was predicted."""

    def __init__(self) -> None:
        self._taken = self._predicted = 0.0
        self._last: float | None = None

    @property
    def ratio(self) -> float:
        """1 as long as nothing is known."""
        return self._taken / self._predicted if self._taken and self._predicted else 1.0

    def note(self, now: float, predicted: float) -> None:
        """A piece has ended: since the one before, which ran beside it or before it, its part has gone by."""
        if self._last is not None:
            self._taken = self._taken * KEPT + now - self._last
            self._predicted = self._predicted * KEPT + predicted
        self._last = now
