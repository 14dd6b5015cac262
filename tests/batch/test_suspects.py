"""Pieces that kill what runs them are found, whatever else happens, and no others are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from radixrt.batch.dispatch import Dispatch
from radixrt.batch.lanes import Handout
from radixrt.batch.suspects import LOSSES, LOSSES_ALONE, PARTS
from radixrt.planning.shards import Pieces, shards

ACCIDENTS = LOSSES + LOSSES_ALONE - 1  # so many cannot make a good piece look like one that kills


@dataclass
class SimulatedLane:
    has: list[int] = field(default_factory=list)
    is_ready: bool = True
    is_gone: bool = False
    num_waiting: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.has

    @property
    def num_running(self) -> int:
        return len(self.has)


@given(data=st.data(), num_lanes=st.integers(1, 4), count=st.integers(1, 60), first=st.integers(1, 60))
def test_what_kills_is_found(data: st.DataObject, num_lanes: int, count: int, first: int) -> None:
    """Good pieces end once each, others are told once each, and no group that runs has company."""
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=5))
    accidents = data.draw(st.integers(0, ACCIDENTS))
    lanes = [SimulatedLane() for _ in range(num_lanes)]
    handout = Handout(Dispatch(shards(Pieces.alike(count), num_lanes), clock=lambda: 0.0), lanes, first)
    ended: list[int] = []
    found: list[int] = []
    deaths = 0
    lost: dict[int, list[frozenset[int]]] = {piece: [] for piece in range(count)}  # with which others
    while not handout.is_done:
        for number, pieces in handout.next():
            assert lanes[number].is_ready
            lanes[number].has += pieces
        busy = [number for number, lane in enumerate(lanes) if lane.has]
        assert busy or not all(lane.is_ready for lane in lanes), "nobody has what is left"
        number = data.draw(st.sampled_from(busy or list(range(num_lanes))))
        lane = lanes[number]
        lane.is_ready = not lane.is_gone
        if not busy:
            continue
        dies = accidents > 0 and data.draw(st.integers(0, 9)) == 0
        accidents -= dies
        killing = bad.intersection(lane.has)
        good = [piece for piece in lane.has if piece not in bad]
        some = good[: data.draw(st.integers(0, len(good)))] if killing or dies else good
        for piece in some:
            handout.end(number, piece)
            lane.has.remove(piece)
        ended += some
        if killing or dies:
            deaths += 1
            for piece in lane.has:
                lost[piece].append(frozenset(lane.has))
            found += handout.lose(number, list(lane.has))
            lane.has.clear()
            lane.is_ready = data.draw(st.booleans())
            others = [each for each in lanes if each is not lane and not each.is_gone]
            lane.is_gone = bool(others) and not lane.is_ready and data.draw(st.integers(0, 5)) == 0
    assert sorted(ended) == sorted(set(range(count)) - bad)
    assert sorted(found) == sorted(bad)
    for piece in found:
        assert len(lost[piece]) >= LOSSES + LOSSES_ALONE
        assert lost[piece][-LOSSES_ALONE:] == [frozenset([piece])] * LOSSES_ALONE
    each = LOSSES + LOSSES_ALONE + math.ceil(math.log(count, PARTS))
    assert deaths <= len(bad) * each + ACCIDENTS


def test_the_second_loss_alone_is_on_another_lane() -> None:
    """A card that kills what it runs is not the fault of what it runs."""
    lanes = [SimulatedLane(), SimulatedLane()]
    handout = Handout(Dispatch(shards(Pieces.alike(2), 2), clock=lambda: 0.0), lanes, 1)
    assert dict(handout.next()) == {0: [0], 1: [1]}
    lanes[1].has = [1]
    assert handout.lose(0, [0]) == []
    assert dict(handout.next()) == {0: [0]}
    assert handout.lose(0, [0]) == []
    assert dict(handout.next()) == {0: [0]}, "alone"
    assert handout.lose(0, [0]) == []
    assert dict(handout.next()) == {}, "it waits for the other lane"
    handout.end(1, 1)
    lanes[1].has = []
    assert dict(handout.next()) == {1: [0]}
    handout.end(1, 0)
    assert handout.is_done


def test_a_lane_that_is_gone_is_not_waited_for() -> None:
    lanes = [SimulatedLane(), SimulatedLane(is_ready=False, is_gone=True)]
    handout = Handout(Dispatch(shards(Pieces.alike(1), 2), clock=lambda: 0.0), lanes, 1)
    for loss in range(LOSSES + LOSSES_ALONE):
        assert dict(handout.next()) == {0: [0]}
        assert handout.lose(0, [0]) == ([0] if loss == 3 else [])
    assert handout.is_done
