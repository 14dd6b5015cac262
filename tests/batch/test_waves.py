"""Lists on lanes that run answers side by side, so that many end at once: shared by the real handout."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from radixrt.batch.dispatch import Dispatch
from radixrt.batch.lanes import Handout
from radixrt.planning.shards import Pieces, shards

MOST, ANSWERS, STEPS = 2048, 32, 512  # answers at once and of a prompt; tokens of an answer
FIXED, OF_A_ROW, PROMPT = 2e-3, 1e-5, 2e-2  # seconds of a step, of a row of it, and of a prompt


@dataclass
class WaveLane:
    """A device that computes a token of each answer in each step, and is so many times as fast as another."""

    speed: float
    now: float = 0.0
    waiting: list[int] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)  # tokens of each answer
    is_ready, is_gone = True, False

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return ANSWERS * len(self.running)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def progress(self) -> float:
        return sum(self.running.values()) / (STEPS * max(1, len(self.running) + len(self.waiting)))

    def advance(self) -> list[int]:
        """Some steps. Returns what has ended."""
        begun = self.waiting[: MOST // ANSWERS - len(self.running)]
        del self.waiting[: len(begun)]
        self.running |= dict.fromkeys(begun, 0)
        steps = min(8, *(STEPS - tokens for tokens in self.running.values()))
        self.now += (steps * (FIXED + OF_A_ROW * self.num_running) + PROMPT * len(begun)) / self.speed
        self.running = {piece: tokens + steps for piece, tokens in self.running.items()}
        ended = [piece for piece, tokens in self.running.items() if tokens == STEPS]
        for piece in ended:
            del self.running[piece]
        return ended


def seconds(num_prompts: int, speeds: list[float]) -> float:
    """Until lanes have answered all prompts."""
    own = [WaveLane(speed) for speed in speeds]

    def now() -> float:
        return min((lane.now for lane in own if not lane.is_idle), default=0.0)

    dispatch = Dispatch(
        shards(Pieces.alike(num_prompts), len(own)), progress=lambda lane: own[lane].progress, clock=now
    )
    handout = Handout(dispatch, own, MOST // ANSWERS, float(ANSWERS))
    ended = np.zeros(num_prompts, int)
    while not handout.is_done:
        for number, pieces in handout.next():
            if own[number].is_idle:
                own[number].now = max(own[number].now, now())
            own[number].waiting += pieces
        number = min((n for n, lane in enumerate(own) if not lane.is_idle), key=lambda n: own[n].now)
        for piece in own[number].advance():
            handout.end(number, piece)
            ended[piece] += 1
    assert (ended == 1).all()
    return max(lane.now for lane in own)


@pytest.mark.parametrize("off", [0.005, 0.05])
@pytest.mark.parametrize(("num_prompts", "num_lanes", "share"), [(313, 2, 0.97), (313, 4, 0.92), (1000, 4, 0.95)])
def test_lanes_of_unlike_speed_end_together(num_prompts: int, num_lanes: int, share: float, off: float) -> None:
    """Of the ideal. Four lanes need two waves for 78 prompts each, of which the second has few."""
    chance = random.Random(0)
    for _ in range(4):
        speeds = [1 + chance.uniform(-off, off) for _ in range(num_lanes)]
        ideal = seconds(num_prompts, [1.0]) / sum(speeds)
        assert seconds(num_prompts, speeds) <= ideal / share
