"""Which replica runs which pieces of a batch: its own range in order, and what it takes from others.

Only the parent of the replicas has a Dispatch. It hands out little at a time (`lanes.py` says how much), so that
nearly all of a range can still be taken by others: a replica that has none left takes the later half of the one
with most.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from radixrt.planning.shards import Pieces, Shards

ALIKE = 0.4  # of a run's time, for which replicas count as equally fast before theirs is measured
STEAL_TOLERANCE = 0.2  # of what is to be taken, that a cut may be off without counting


class _Load(NamedTuple):
    """What a replica has to do, in seconds as it takes them.

    Attributes:
        pace: how long it takes, as a multiple of what is predicted; 1 as long as nothing is known.
        waiting: for what waits for it.
        left: for that and what is left of what it runs.
    """

    pace: float
    waiting: float
    left: float


class Dispatch:
    """Each piece is waiting in a range of one replica, running on one, or ended.

    Args:
        shards: the ranges at first.
        stolen: is called with the first piece of each range that a replica takes from another.
        progress: how much is done of the pieces that a replica runs, 0 to 1.
        clock: seconds.
    """

    def __init__(
        self,
        shards: Shards,
        stolen: Callable[[int], object] = lambda piece: None,
        *,
        progress: Callable[[int], float] = lambda replica: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pieces: Pieces = shards.pieces
        bounds = shards.bounds.tolist()
        # What waits for each replica: ranges [begin, end) of pieces, none empty, in the order in which they run.
        self._waiting = [deque([(a, b)] if a < b else []) for a, b in pairwise(bounds)]
        self._running: list[set[int]] = [set() for _ in self._waiting]
        self._gone: set[int] = set()
        self._seconds_ended = [0.0] * len(self._waiting)  # predicted
        self._stolen, self._progress = stolen, progress
        self._clock = clock
        self._worked = [0.0] * len(self._waiting)  # seconds, before what it runs
        self._busy_since: list[float | None] = [None] * len(self._waiting)
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
        self._note_work(replica)
        return taken

    def end(self, replica: int, piece: int) -> bool:
        """Note that a replica has ended a piece; False if it was not running there, as after `lose`."""
        if piece not in self._running[replica]:
            return False
        self._running[replica].remove(piece)
        self._note_work(replica)
        self._seconds_ended[replica] += float(self._pieces.seconds[piece])
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
        self._note_work(replica)

    def put_back(self, replica: int, pieces: Sequence[int]) -> None:
        """Pieces that a replica was running wait for it again, before the rest; others change nothing."""
        own = sorted(self._running[replica].intersection(pieces))
        self._running[replica].difference_update(own)
        self._note_work(replica)
        self._waiting[replica].extendleft((piece, piece + 1) for piece in reversed(own))

    def retire(self, replica: int) -> list[int]:
        """The same for a replica that does not come back: others take all that waits for it."""
        self._gone.add(replica)
        return self.lose(replica)

    def _steal(self, thief: int, away: Iterable[int]) -> None:
        """Take the later half of what waits for a replica that is gone, for the one with most work, if it ends
        sooner so, though something is computed once more, or for one that is away: nobody knows how long. One
        that still runs pieces takes no more than lets both end at the same time.
        """
        if not any(self._waiting):
            return
        loads, others = self._loads(), range(len(self._waiting))
        for replicas, is_sure in ((self._gone, True), (others, False), (away, True)):
            victim = max(replicas, key=lambda replica: loads[replica].waiting, default=thief)
            ranges, load = self.waiting(victim), loads[victim]
            if not ranges:
                continue
            most = load.waiting / 2
            if not is_sure and self._running[thief]:
                even = load.pace * (load.left - loads[thief].left) / (load.pace + loads[thief].pace)
                most = min(most, even)
            if most <= 0.0 and not is_sure:
                continue
            nth, cut = self._cut(ranges, most / load.pace)
            begin, end = ranges[nth]
            taken = [(cut, end), *ranges[nth + 1 :]]
            seconds = load.pace * sum(map(self._seconds, taken))
            again = float(self._pieces.repeated_seconds[cut])
            if is_sure or again + seconds <= min(2 * most, load.waiting):
                self._waiting[victim] = deque([*ranges[:nth], *([(begin, cut)] if begin < cut else [])])
                self._waiting[thief].extend(taken)
                self._stolen(cut)
                return

    def _loads(self) -> list[_Load]:
        """What each replica has to do."""
        now, count = self._clock(), len(self._waiting)
        since = [now if began is None else began for began in self._busy_since]
        worked = [before + now - began for before, began in zip(self._worked, since, strict=True)]
        running = [float(self._pieces.seconds[list(pieces)].sum()) for pieces in self._running]
        left = [seconds * (1.0 - self._progress(replica)) for replica, seconds in enumerate(running)]
        done = [sum(own) - rest for *own, rest in zip(self._seconds_ended, running, left, strict=True)]
        usual = sum(worked) / sum(done) if any(worked) and any(done) else 1.0
        alike = max(ALIKE * float(self._pieces.seconds_before[-1]) / count, 1e-30)
        loads: list[_Load] = []
        for ranges, seconds, predicted, rest in zip(self._waiting, worked, done, left, strict=True):
            pace = (seconds + usual * alike) / (predicted + alike)
            waiting = pace * sum(map(self._seconds, ranges))
            loads.append(_Load(pace, waiting, waiting + pace * rest))
        return loads

    def _note_work(self, replica: int) -> None:
        """Note when a replica begins to have pieces, and how long it had some."""
        since = self._busy_since[replica]
        if self._running[replica] and since is None:
            self._busy_since[replica] = self._clock()
        elif since is not None and not self._running[replica]:
            self._worked[replica] += self._clock() - since
            self._busy_since[replica] = None

    def _cut(self, ranges: list[tuple[int, int]], seconds: float) -> tuple[int, int]:
        """Where to cut ranges in two so that about so many seconds come after, and a piece at least: which range,
        and the piece after it.
        """
        wanted = sum(map(self._seconds, ranges)) - seconds
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
