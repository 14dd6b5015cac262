"""Whether two places suffice for sums over ranks, in a model of `triton_ops/ranks/exchange.py`: programs write,
signal, wait and read in any order that signals allow. That the kernels do the same, test_peer_sum.py has to show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

Ready = Callable[[], bool]


@dataclass(frozen=True)
class Sum:
    """Of parts of `size` elements, of which each program has `block`."""

    size: int
    block: int
    two_shots: bool

    @property
    def num_programs(self) -> int:
        return -(-self.size // self.block)


class Ranks:
    """Each runs the sums one after the other, and of a sum so many programs at once, begun in order."""

    def __init__(self, size: int, sums: list[Sum], at_once: int, num_places: int = 2) -> None:
        self.size, self.sums, self.at_once, self.num_places = size, sums, at_once, num_places
        # Of each rank: what lies there of which sum, by place, by who wrote it, and by element; and signals, by
        # program and by who gave them.
        self.data: list[dict[tuple[int, int, int], tuple[int, str]]] = [{} for _ in range(size)]
        self.signals: list[dict[tuple[int, int], int]] = [{} for _ in range(size)]

    def run(self, choices: random.Random) -> None:
        """Until all sums have ended, each step by a rank chosen at random. They are of different speeds."""
        steps = [self._rank(rank, choices) for rank in range(self.size)]
        ready: list[Ready] = [next(rank) for rank in steps]
        running = list(range(self.size))
        weights = [1] * self.size
        while running:
            able = [rank for rank in running if ready[rank]()]
            assert able, "all wait for one another"
            if choices.random() < 0.05:
                weights = [choices.choice((1, 1000)) for _ in range(self.size)]
            (rank,) = choices.choices(able, [weights[rank] for rank in able])
            try:
                ready[rank] = next(steps[rank])
            except StopIteration:
                running.remove(rank)

    def _rank(self, rank: int, choices: random.Random) -> Iterator[Ready]:
        """Yields before each step whether there is one that it can take."""
        for nth, each in enumerate(self.sums, 1):
            programs: list[tuple[Ready, Iterator[Ready]]] = []
            begun = 0
            while programs or begun < each.num_programs:
                if begun < each.num_programs and len(programs) < self.at_once:
                    program = self._program(rank, nth, each, begun)
                    programs.append((next(program), program))
                    begun += 1
                    continue
                yield lambda programs=programs: any(ready() for ready, _ in programs)  # type: ignore[misc]
                able = [place for place, (ready, _) in enumerate(programs) if ready()]
                place = choices.choice(able)
                program = programs[place][1]
                after = next(program, None)
                programs[place : place + 1] = [] if after is None else [(after, program)]

    def _program(self, rank: int, nth: int, each: Sum, program: int) -> Iterator[Ready]:
        """Yields, before each thing that it does, whether it can."""
        place, owner = nth % self.num_places, program % self.size
        others = [peer for peer in range(self.size) if peer != rank]
        elements = range(program * each.block, min(each.size, (program + 1) * each.block))

        def send(peers: list[int], what: str) -> Iterator[Ready]:
            for peer in peers:
                for element in elements:
                    yield lambda: True
                    self.data[peer][place, rank, element] = nth, what
            for peer in peers:
                yield lambda: True
                self.signals[peer][program, rank] = nth

        def receive(peers: list[int], what: str) -> Iterator[Ready]:
            for peer in peers:
                yield lambda peer=peer: self.signals[rank].get((program, peer), 0) >= nth  # type: ignore[misc]
            for peer in peers:
                for element in elements:
                    yield lambda: True
                    assert self.data[rank].get((place, peer, element)) == (nth, what), "another lies there"

        if not each.two_shots:
            yield from send(others, "part")
            yield from receive(others, "part")
        elif rank == owner:
            yield from receive(others, "part")
            yield from send(others, "sum")
        else:
            yield from send([owner], "part")
            yield from receive([owner], "sum")


sums = st.lists(st.builds(Sum, st.integers(1, 6), st.integers(1, 3), st.booleans()), min_size=1, max_size=8)
at_once = st.integers(1, 3)


@given(st.integers(2, 4), sums, at_once, st.integers(0, 2**32))
def test_two_places_suffice(size: int, sums: list[Sum], at_once: int, seed: int) -> None:
    Ranks(size, sums, at_once).run(random.Random(seed))


@pytest.mark.parametrize("two_shots", [False, True])
def test_one_place_does_not(two_shots: bool) -> None:
    """In two shots once an element has another owner. Or the model would find nothing."""

    def run() -> None:
        for seed in range(100):
            Ranks(3, [Sum(4, 2, two_shots), Sum(4, 1, two_shots)] * 2, 2, num_places=1).run(random.Random(seed))

    with pytest.raises(AssertionError, match="another lies there"):
        run()
