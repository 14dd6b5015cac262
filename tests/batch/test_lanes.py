"""What lanes are handed, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from radixrt.batch import lanes
from radixrt.batch.dispatch import Dispatch
from radixrt.batch.lanes import Handout
from radixrt.planning.shards import Pieces, Shards, shards


@dataclass
class FakeLane:
    num_waiting: int = 0
    num_running: int = 0
    is_ready: bool = True
    is_idle: bool = False
    is_gone: bool = False


def handout(count: int, own: list[FakeLane], first: int = 4) -> Handout:
    return Handout(Dispatch(shards(Pieces.alike(count), len(own)), clock=lambda: 0.0), own, first)


def handed(found: Handout) -> dict[int, list[int]]:
    """What each lane gets in all its turns."""
    pieces: defaultdict[int, list[int]] = defaultdict(list)
    for lane, own in found.next():
        pieces[lane] += own
    return dict(pieces)


def test_one_lane_gets_a_block_whenever_few_wait() -> None:
    lane = FakeLane()
    found = handout(5000, [lane])
    assert dict(found.next()) == {0: list(range(512))}
    lane.num_waiting = 512
    assert dict(found.next()) == {0: list(range(512, 1024))}
    lane.num_waiting = 1024
    assert dict(found.next()) == {}


def test_several_lanes_get_what_they_run_at_once_and_then_as_much_again() -> None:
    own = [FakeLane(), FakeLane()]
    found = handout(10_000, own, first=100)
    assert handed(found) == {0: list(range(100)), 1: list(range(5000, 5100))}
    own[0].num_waiting = own[1].num_waiting = 100
    assert dict(found.next()) == {}
    # The first has begun all, the second some. Both may end what they compute in one pass.
    own[0].num_waiting, own[0].num_running = 0, 100
    own[1].num_waiting, own[1].num_running = 60, 40
    assert {lane: len(pieces) for lane, pieces in handed(found).items()} == {0: 100}
    own[0].num_running = 1  # what it computed has ended, and what waited has not begun
    own[0].num_waiting = 99
    own[1].num_waiting = 0
    assert {lane: len(pieces) for lane, pieces in handed(found).items()} == {0: 1, 1: 40}


def test_answers_of_a_piece_run_together() -> None:
    own = [FakeLane(num_running=80), FakeLane(num_running=400)]
    dispatch = Dispatch(shards(Pieces.alike(10_000), 2), clock=lambda: 0.0)
    assert {lane: len(own) for lane, own in handed(Handout(dispatch, own, 50, answers=4.0)).items()} == {
        0: 20,
        1: 100,
    }


def test_half_of_a_range_can_be_taken_by_others() -> None:
    """In the end nothing that one lane has waits long while another one has nothing."""
    own = [FakeLane(num_running=1000), FakeLane(num_running=1000)]
    found = handout(600, own)
    counts = []
    for _ in range(6):
        counts.append(len(handed(found)[0]))
        own[0].num_waiting = 0
    assert counts == [150, 75, 37, lanes.LEAST_WAITING + 3, lanes.LEAST_WAITING, 3]


def test_lanes_get_theirs_in_turns() -> None:
    """None waits for its first pieces until others have all of theirs, and none takes from others meanwhile."""
    ranges = Shards(Pieces.alike(600), np.array([0, 100, 300, 600]))
    found = Handout(Dispatch(ranges, clock=lambda: 0.0), [FakeLane() for _ in range(3)], 1000)
    turns = [(lane, len(pieces)) for lane, pieces in found.next()]
    at_once = lanes.HANDED_AT_ONCE
    left, expected = [100, 200, 300], []
    while any(left):
        for lane in range(3):
            if count := min(at_once, left[lane]):
                expected.append((lane, count))
                left[lane] -= count
    assert turns == expected


def test_a_lane_that_is_lost_between_its_turns_gets_no_more() -> None:
    own = [FakeLane(), FakeLane()]
    found = handout(1000, own, first=1000)
    given = []
    for lane, pieces in found.next():
        given += pieces if lane == 0 else []
        own[0].is_ready = False
    assert given == list(range(lanes.HANDED_AT_ONCE))


@pytest.mark.parametrize("state", ["is gone", "starts"])
def test_others_take_the_pieces_of_a_lane_that_is_gone_or_starts(state: str) -> None:
    own = [FakeLane(is_ready=False), FakeLane()]
    found = handout(8, own)
    assert dict(found.next()) == {1: [4, 5, 6, 7]}
    for piece in (4, 5, 6, 7):
        found.end(1, piece)
    own[0].is_gone = state == "is gone"
    taken = [piece for _ in range(4) for lane, pieces in found.next() for piece in pieces if lane == 1]
    assert sorted(taken) == [0, 1, 2, 3]
    assert not found.is_done
    for piece in taken:
        found.end(1, piece)
    assert found.is_done


def test_what_is_lost_comes_again() -> None:
    own = [FakeLane()]
    found = handout(3, own)
    assert dict(found.next()) == {0: [0, 1, 2]}
    found.end(0, 1)
    assert not found.lose(0, [1, 2])
    assert dict(found.next()) == {0: [2]}
    assert not found.lose(0, [0])
    assert dict(found.next()) == {0: [0]}
