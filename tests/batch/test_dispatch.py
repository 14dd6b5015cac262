"""Replicas take pieces from their ranges and from others: each piece once, and none waits for long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.batch.dispatch import Dispatch
from radixrt.planning.shards import Pieces, Shards, cut_in_pieces, shards
from tests.support.simulated_replicas import LIMITS, LISTS, SHAPE, SPEED, simulated


@pytest.mark.long_unless(
    kept=lambda given: (given["num_replicas"], given["off"]) in ((3, "off by 4"), (64, "as predicted"))
)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("off", ["as predicted", "off by 4"])
def test_the_end_is_near_the_ideal(name: str, num_replicas: int, off: str) -> None:
    """Within 3 % and a prompt; and within that and a prefix if prompts take four times as long as predicted, or a
    quarter: at random, or the later the longer.
    """
    asked, shared = LISTS[name]()
    pieces = cut_in_pieces(asked, shared, 0 * asked.lengths, num_replicas, LIMITS, SHAPE, SPEED)
    factors = None
    if off != "as predicted":
        random, count = np.random.default_rng(num_replicas), len(pieces)
        factors = 4.0 ** (random.uniform(-1, 1, count) if num_replicas % 2 else np.linspace(-1, 1, count))
    end, stolen, taken = simulated(pieces, num_replicas, factors)
    begun = shards(pieces, num_replicas).bounds[1:-1]
    again = pieces.repeated_seconds[np.minimum(np.append(begun, stolen).astype(int), len(pieces) - 1)].sum()
    one = float((taken + pieces.repeated_seconds).max())
    prefix = 0.0 if factors is None else float(pieces.repeated_seconds.max())
    assert end <= (taken.sum() + again) / num_replicas * 1.03 + one + prefix
    if factors is None:
        assert again <= 0.03 * taken.sum() + num_replicas * float(pieces.repeated_seconds.max())


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7, 8, 12, 16])
def test_many_answers_of_few_prompts(num_replicas: int) -> None:
    """Four prompts of 256 answers each keep 16 replicas busy, each with a quarter of a prompt."""
    asked, shared = LISTS["few prompts"]()
    pieces = cut_in_pieces(asked, shared, 0 * asked.lengths, num_replicas, LIMITS, SHAPE, SPEED)
    end, _, taken = simulated(pieces, num_replicas)
    prompt = float(pieces.repeated_seconds.max())
    assert end <= taken.sum() / num_replicas * 1.03 + 2 * prompt
    whole = cut_in_pieces(asked, shared, 0 * asked.lengths, num_replicas, LIMITS, SHAPE, SPEED, split=False)
    if num_replicas == 16:
        assert simulated(whole, 16)[0] > 3.9 * end


@pytest.mark.parametrize(("repeated", "helped"), [(1.0, [7]), (30.0, [])])
def test_the_pace_of_a_replica_counts(repeated: float, helped: list[int]) -> None:
    """Of three, the first takes four times as long as predicted. Less waits for it than for the second, but for
    longer: the third helps it, unless the prefix that it would compute once more takes longer still.
    """
    each = np.arange(39)
    pieces = Pieces(each, 0 * each, 0 * each + 1, 0 * each, np.ones(39), np.where(each < 11, repeated, 0.0))
    stolen: list[int] = []
    now = 0.0
    dispatch = Dispatch(Shards(pieces, np.array([0, 11, 39, 39])), stolen.append, clock=lambda: now)
    taken = [dispatch.take(0, 3), dispatch.take(1, 12)]
    now = 12.0
    for replica, own in enumerate(taken):
        assert all(dispatch.end(replica, piece) for piece in own)
    assert dispatch.take(2) == stolen == helped


def test_nobody_waits_for_one_that_starts_again() -> None:
    """A replica that dies with the last pieces leaves them to the others, whatever they compute once more."""
    each = np.arange(6)
    pieces = Pieces(each, 0 * each, 0 * each + 1, 0 * each, np.ones(6), np.full(6, 100.0))
    dispatch = Dispatch(Shards(pieces, np.array([0, 3, 6])), clock=lambda: 0.0)
    assert dispatch.take(0, 3) == [0, 1, 2]
    assert dispatch.take(1, 3) == [3, 4, 5]
    for piece in (3, 4, 5):
        assert dispatch.end(1, piece)
    dispatch.lose(0)
    assert not dispatch.take(1), "it would take longer"
    assert [dispatch.take(1, away=[0]) for _ in range(3)] == [[2], [1], [0]]
    assert not dispatch.take(1, away=[0])


def test_pieces_that_take_no_time_are_taken_from_one_that_is_gone() -> None:
    each = np.arange(3)
    pieces = Pieces(each, 0 * each, 0 * each + 1, 0 * each, np.zeros(3), np.zeros(3))
    dispatch = Dispatch(Shards(pieces, np.array([0, 3, 3])), clock=lambda: 0.0)
    dispatch.retire(0)
    assert sorted(piece for _ in range(3) for piece in dispatch.take(1)) == [0, 1, 2]


class Replicas(RuleBasedStateMachine):
    """Replicas that take, end, crash, come back or do not, with messages that are late, doubled or lost."""

    @initialize(
        num_replicas=st.integers(1, 4),
        sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=40),
    )
    def begin(self, num_replicas: int, sizes: list[tuple[int, int]]) -> None:
        seconds, repeated = (np.array([pair[i] for pair in sizes], float) for i in (0, 1))
        places = np.arange(len(sizes))
        self.pieces = Pieces(places, 0 * places, 0 * places + 1, repeated.astype(np.int64), seconds, repeated)
        self.dispatch = Dispatch(shards(self.pieces, num_replicas), progress=self.progress, clock=self.now)
        self.done = 0.0
        self.alive = set(range(num_replicas))
        self.running: list[set[int]] = [set() for _ in range(num_replicas)]
        self.ended: list[int] = []
        self.late: list[tuple[int, int]] = []

    def now(self) -> float:
        self.clock = getattr(self, "clock", 0.0) + 1.5
        return self.clock

    def progress(self, replica: int) -> float:
        return self.done

    @rule(done=st.floats(0, 1))
    def go_on(self, done: float) -> None:
        self.done = done

    @rule(data=st.data(), count=st.integers(1, 9))
    def take(self, data: Any, count: int) -> None:
        if self.alive:
            replica = data.draw(st.sampled_from(sorted(self.alive)))
            away = data.draw(st.sets(st.integers(0, len(self.running) - 1)))
            taken = self.dispatch.take(replica, count, away)
            assert not any(self.running[replica] & set(taken) for replica in range(len(self.running)))
            self.running[replica].update(taken)

    @rule(data=st.data(), doubled=st.booleans())
    def end(self, data: Any, doubled: bool) -> None:
        busy = [replica for replica in sorted(self.alive) if self.running[replica]]
        if not busy:
            return
        replica = data.draw(st.sampled_from(busy))
        piece = data.draw(st.sampled_from(sorted(self.running[replica])))
        self.running[replica].remove(piece)
        assert self.dispatch.end(replica, piece)
        self.ended.append(piece)
        self.late += [(replica, piece)] * doubled

    @rule(data=st.data(), comes_back=st.booleans())
    def crash(self, data: Any, comes_back: bool) -> None:
        if not self.alive:
            return
        replica = data.draw(st.sampled_from(sorted(self.alive)))
        lost = (self.dispatch.lose if comes_back else self.dispatch.retire)(replica)
        assert set(lost) == self.running[replica]
        self.late += [(replica, piece) for piece in lost]
        self.running[replica].clear()
        if not comes_back:
            self.alive.remove(replica)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def late_message(self, data: Any) -> None:
        """Of an earlier life of a replica, or for the second time."""
        replica, piece = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        if piece not in self.running[replica]:
            assert not self.dispatch.end(replica, piece)

    @invariant()
    def each_piece_is_in_one_place(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        ranges = [pair for replica in range(len(self.running)) for pair in self.dispatch.waiting(replica)]
        assert all(begin < end for begin, end in ranges)
        waiting = [piece for begin, end in ranges for piece in range(begin, end)]
        running = [piece for pieces in self.running for piece in pieces]
        assert sorted([*waiting, *running, *self.ended]) == list(range(len(self.pieces)))
        assert self.dispatch.num_left == len(waiting) + len(running)
        for replica, pieces in enumerate(self.running):
            assert self.dispatch.running(replica) == pieces

    def teardown(self) -> None:
        """Whoever is left ends all that is left."""
        if not getattr(self, "alive", None):
            return
        while self.dispatch.num_left:
            before = self.dispatch.num_left
            for replica in sorted(self.alive):
                self.running[replica].update(self.dispatch.take(replica, 3))
                for piece in sorted(self.running[replica]):
                    assert self.dispatch.end(replica, piece)
                    self.ended.append(piece)
                self.running[replica].clear()
            assert self.dispatch.num_left < before
        self.each_piece_is_in_one_place()


TestReplicas = Replicas.TestCase
