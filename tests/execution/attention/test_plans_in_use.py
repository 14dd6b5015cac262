"""Plans of tree attention in a simulated world: what they read stays right while requests come and go."""

from __future__ import annotations

import pytest

from radixrt.output import FinishReason
from radixrt.schedule.request import Request
from tests.support.planned_reads import PlannedWorld as World
from tests.support.world.invariants import Violation
from tests.support.world.world import Sizes


def sharing(sizes: Sizes, *tails: list[int]) -> tuple[World, list[Request]]:
    """Requests that decode behind a prefix of theirs, each with a tail; something else is cached."""
    world = World(sizes)
    world.submit([4, 3, 2, 1] * 3, 2)
    world.drain_requests()
    requests = [world.submit([1, 2, 3, 4, 0, 1, *tail], 20) for tail in tails]
    while not all(request.num_output for request in requests):
        world.step()
        world.check()
    return world, requests


def test_what_is_shared_is_read_once_while_requests_end_come_and_go() -> None:
    world, requests = sharing(Sizes(num_slots=140, num_rows=8, max_running=6, chunk=16), [], [2], [2, 3], [3])
    before = world.events["shared read"]
    world.step()
    joins = [world.submit([1, 2, 3, *tail], 3) for tail in ([], [4, 0], [0, 0])]  # the second ends at a border
    for leaves in (requests[1], requests[0]):
        for _ in range(3):
            world.step()
            world.check()
        world.abort(leaves)
    world.retract(requests[2])
    world.drain()
    assert all(request.log.finish_reason is FinishReason.LENGTH for request in (*joins, *requests[2:]))
    assert world.events["split"] > 0
    assert world.events["shared read"] - before >= 10


@pytest.mark.parametrize("skipped", [0, 1])
def test_extends_read_once_what_they_share(skipped: int) -> None:
    """Prefixes end where others go on, one is there twice, and some compute a token alone."""
    world, _ = sharing(Sizes(num_slots=300, num_rows=20, max_running=20, chunk=40), [2, 2, 2, 2])
    world.drain_requests()
    for _ in range(skipped):  # every other pass is padded
        world.submit([0, 0, 0], 1)
        world.drain_requests()
    # In a pass of its own; plans have four shared items of two rows.
    for tails in ([[0, 1], [1, 3], [3, 3, 0], [2]], [[3, 1, 1], [3, 1, 1], [0, 2, 2], [1, 2]]):
        for tail in tails:
            world.submit([1, 2, 3, 4, 0, 1, *tail], 3)
        world.drain_requests()
    world.drain()
    assert world.events["shared read by extends"] == 2


@pytest.mark.parametrize(("host_slots", "event"), [(0, "eviction"), (60, "store")])
def test_a_plan_outlives_what_leaves_the_device_meanwhile(host_slots: int, event: str) -> None:
    world, _ = sharing(Sizes(num_slots=50, host_slots=host_slots, chunk=16), [2], [3])
    world.drain()
    assert world.events[f"{event} under a plan"] >= 3


def test_a_plan_outlives_slots_that_its_requests_had_when_it_was_made() -> None:
    """A request is planned before its prompt is committed; then its row is turned to what the tree has, and other
    tokens get its own slots. Plans name rows and positions, never slots.
    """
    world = World(Sizes(num_slots=100, num_rows=6, max_running=5, chunk=16, force_miss=True))
    prompt = [1, 2, 3, 4, 0, 1]
    for _ in range(2):
        world.submit(prompt, 30)
    while world.events["remap"] < 1:
        world.step()
        world.check()
    last = world.submit(prompt, 25)
    while not last.num_output:
        world.step()
        world.check()
        if last.lease is not None and not last.lease.committed:
            before = set(world.rows.req_to_token[last.lease.row, : len(prompt)].tolist())
    assert last.lease is not None
    assert before.isdisjoint(world.rows.req_to_token[last.lease.row, : len(prompt)].tolist()), "all are turned"
    reused = set()
    while not last.finished:
        world.step()
        world.check()
        rows = [request.lease.row for request in world.answers if request.lease is not None]
        reused |= before & set(world.rows.req_to_token[rows, len(prompt) :].reshape(-1).tolist())
    assert reused == before
    assert world.events["remap under a plan"] >= 10


def test_a_row_that_names_other_slots_on_the_device_is_found() -> None:
    """Though they hold the same KV."""
    world, requests = sharing(Sizes(num_slots=140, chunk=16), [2], [3])
    runner, copy = world.runner, int(world.slots.free_slots()[-1])
    while runner.queue:
        runner.run_next()
    cell = requests[1].lease.row, 2
    runner.kv[copy] = runner.kv[runner.req_to_token[cell]]
    runner.req_to_token[cell] = copy
    with pytest.raises(Violation, match=r"17: .* on the device"):
        world.drain()
