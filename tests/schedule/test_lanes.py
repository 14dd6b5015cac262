"""Lanes: which decodes a pass of a pipeline takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import Pass
from tests.support.world.model import VOCAB
from tests.support.world.walk import Walk, random_sizes
from tests.support.world.world import Sizes, World

pytestmark = pytest.mark.usefixtures("quiet")


def launched(world: World) -> list[tuple[int, Pass]]:
    """The passes that are launched from now on, and how many others are in flight then."""
    found = []
    launch = world.runner.launch

    def watched(pass_: Pass) -> object:
        found.append((len(world.runner.in_flight), pass_))
        return launch(pass_)

    world.runner.launch = watched  # type: ignore[method-assign, assignment]
    return found


def submitted(world: World, count: int, new: int = 12) -> list[Answer]:
    requests = [world.request([i % VOCAB, i // VOCAB, 2], new) for i in range(count)]
    return world.submit_all(requests)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_equal_parts_take_turns(lanes: int) -> None:
    """Each stage has a pass of its own to compute; arrays of rows are those of the same turn before."""
    world = World(Sizes(num_slots=400, num_rows=40, max_running=24, chunk=200, lanes=lanes))
    submitted(world, 24)
    passes = launched(world)
    world.drain_requests()
    decodes = [(ahead, pass_.req_pool_indices) for ahead, pass_ in passes if not pass_.extended_tokens]
    settled = decodes[lanes:-lanes]
    assert len(settled) >= 8 * lanes
    assert {ahead for ahead, _ in settled} == {lanes}
    assert {len(rows) for _, rows in settled} == {24 // lanes}
    for (_, rows), (_, again) in zip(settled, settled[lanes:], strict=False):
        assert rows is again


def test_an_answer_alone_is_planned_ahead_of_its_token() -> None:
    """One pass ahead, as without lanes: not more, since it may have ended."""
    world = World(Sizes(num_slots=100, lanes=3))
    submitted(world, 1)
    passes = launched(world)
    world.drain_requests()
    assert [ahead for ahead, _ in passes] == [0] + [1] * 11


def test_chunks_do_not_wait_for_one_another() -> None:
    """Nothing of a prompt's next chunk has to be drawn."""
    world = World(Sizes(num_slots=100, chunk=4, context_len=60, lanes=3))
    world.submit([1] * 40, 2)
    passes = launched(world)
    world.drain_requests()
    assert [ahead for ahead, pass_ in passes if pass_.extended_tokens] == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]


def test_lanes_become_equal_again() -> None:
    """After most of one have ended, at once and by themselves."""
    world = World(Sizes(num_slots=400, num_rows=40, max_running=20, chunk=200, lanes=2))
    answers = submitted(world, 20, new=30)
    passes = launched(world)
    for _ in range(8):
        world.step()
    rows = passes[-1][1].req_pool_indices
    for answer in answers:
        if answer.lease is not None and answer.lease.row in rows[2:]:
            world.abort(answer)
    for _ in range(6):
        world.step()
    lens = [pass_.num_rows for _, pass_ in passes[-4:]]
    assert lens == [6, 6, 6, 6]
    world.drain()


def test_first_tokens_of_prompts_do_not_hold_others_up() -> None:
    """Prompts end in each pass, and their answers decode in none of the next ones: the pipeline stays full."""
    world = World(Sizes(num_slots=800, num_rows=60, max_running=40, chunk=6, lanes=2))
    submitted(world, 40)
    passes = launched(world)
    world.drain_requests()
    extending = [ahead for ahead, pass_ in passes if pass_.extended_tokens]
    assert extending[2:] == [2] * (len(extending) - 2)
    drawn = {}
    for number, (_, pass_) in enumerate(passes):
        unknown = ~pass_.input_ids[pass_.input_ids < 0]
        if number < len(extending):
            assert all(number - drawn[row] >= 2 for row in unknown.tolist()), number
        drawn |= dict.fromkeys(pass_.req_pool_indices[pass_.num_samples > 0].tolist(), number)


@pytest.mark.long_unless(kept=lambda given: given["seed"] < 3)
@pytest.mark.parametrize("seed", range(24))
def test_random_walks(seed: int) -> None:
    """All that holds in a world of one lane, and its tokens; see `World._check_turns`."""
    sizes = replace(random_sizes(seed, host_slots=24 * (seed % 2)), lanes=2 + seed % 3, max_in_flight=1)
    if seed % 3 == 0:
        sizes = replace(sizes, forms=True, max_forced_rows=(64, 0, 1)[seed // 3 % 3])
    world = World(replace(sizes, num_rows=6 + seed % 5, max_running=3 + seed % 4))
    walk = Walk(world, seed, faults=1 + seed % 2)
    for _ in range(120):
        walk.act()
    world.drain()
    assert world.events["decode of a token in flight"] >= 10
