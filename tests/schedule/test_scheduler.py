"""What passes compute: submission, decodes, extends, retraction."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from radixrt.cache.radix_tree import Namespace
from radixrt.output import FinishReason
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking, Bookkeeper
from radixrt.schedule.passes import Pass
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from radixrt.workloads import best_hit_rate
from tests.support.world.model import VOCAB, continuation
from tests.support.world.runner import SimulatedPass
from tests.support.world.world import Sizes, World


def test_a_request_that_never_fits_is_refused() -> None:
    world = World(Sizes(num_slots=16))
    request = world.request([1] * 10, 12)
    refusal = world.scheduler.refusal(request)
    assert refusal is not None
    assert "21 KV slots" in refusal
    assert "15" in refusal
    with pytest.raises(ValueError, match="21 KV slots"):
        world.scheduler.submit_all([world.request([1], 1), request])
    assert not world.scheduler.has_work  # all or none
    assert world.submit([1] * 10, 6).arrival == 0  # 15 slots: fits to the last one
    world.drain()


def test_known_together_queue_depth_first() -> None:
    """Groups in any order, a pool that holds little more than one: each head is computed once all the same."""
    world = World(Sizes(num_slots=40, num_rows=6, max_running=3, chunk=32, context_len=40))
    heads = [[g, (g + 1) % VOCAB] * 8 for g in range(VOCAB)]
    requests = [
        Request(
            index=i,
            prompt_ids=np.array([*heads[i % VOCAB], i // VOCAB, 2], dtype=np.int32),
            params=SamplingParams(max_new_tokens=1),
            max_new_tokens=1,
            seed=0,
        )
        for i in range(20)
    ]
    answers = world.submit_all(requests)
    world.drain()
    cached = sum(answer.usage().cached_tokens for answer in answers)
    prompts = [request.prompt_ids for request in requests]
    assert cached / sum(map(len, prompts)) == best_hit_rate(prompts)


def decoding(world: World) -> list[Booking]:
    """The passes that are planned from now on, all requests of a world being about to decode."""
    planned: list[Booking] = []
    launch = world.runner.launch

    def watched(pass_: Pass) -> SimulatedPass:
        flight = launch(pass_)
        planned.append(flight.booking)
        return flight

    world.runner.launch = watched  # type: ignore[method-assign]
    return planned


def instructions(function: Callable[..., object]) -> tuple[Callable[..., object], list[int]]:
    """`function`, and how many instructions of Python each call of it has run."""
    counts: list[int] = []

    def trace(frame: FrameType, event: str, _: object) -> object:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[-1] += event == "opcode"
        return trace

    def counted(*arguments: object) -> object:
        counts.append(0)
        before = sys.gettrace()
        gc.disable()  # hypothesis hears of every collection, in Python
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            return function(*arguments)
        finally:
            sys.settrace(before)
            gc.enable()

    return counted, counts


def test_a_steady_step_costs_as_much_python_for_many_requests_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = []
    next_pass, planning = instructions(Scheduler.next_pass)
    process, booking = instructions(Bookkeeper.process)
    monkeypatch.setattr(Scheduler, "next_pass", next_pass)
    monkeypatch.setattr(Bookkeeper, "process", process)
    for count in (4, 60):
        world = World(
            Sizes(num_slots=2400, num_rows=64, max_running=60, max_samples=60, chunk=256, context_len=40)
        )
        prompts = [[i % VOCAB, i // VOCAB % VOCAB, i // VOCAB**2, 1] for i in range(count)]
        world.submit_all(
            [
                Request(i, np.array(p, np.int32), SamplingParams(), 30, 0, stop_ids=frozenset([VOCAB + i]))
                for i, p in enumerate(prompts)
            ]
        )
        scheduler = world.scheduler
        while any(request.num_output < 2 for request in [*scheduler.waiting, *scheduler.running]):
            world.step()
        planned = decoding(world)
        for _ in range(5):
            world.step()
        assert len({(id(one.answers), id(one.pass_.req_pool_indices)) for one in planned}) == 1
        assert [len(one.answers) for one in planned] == [count] * 5
        assert len(set(planning[-5:])) == len(set(booking[-5:])) == 1
        costs.append((planning[-1], booking[-1]))
    assert costs[0] == costs[1]


def test_a_change_of_members_changes_the_tuples() -> None:
    world = World(Sizes(num_slots=200, num_rows=8, max_running=4, chunk=64))
    requests = [world.submit([i, 1, 2], 20 if i else 6) for i in range(3)]
    planned = decoding(world)
    for _ in range(12):
        world.step()
        world.check()
    members = [booking.answers for booking in planned]
    assert members[0] == tuple(requests)
    assert members[1:6] == [members[1]] * 5
    assert members[6:] == [tuple(requests[1:])] * 6
    assert len({id(one) for one in members[6:]}) == 1


def test_first_tokens_that_a_pass_has_no_room_for_are_drawn_apart() -> None:
    world = World(Sizes(num_slots=200, num_rows=12, max_running=4, max_samples=6, chunk=64))
    requests = [world.submit([i, 1, 2], 3, n=n) for i, n in enumerate([5, 1, 4])]
    world.step()
    # Each of the three draws one, and the first comer has the three that are left.
    assert [f.batch.num_samples.tolist() for f in world.runner.in_flight] == [[4, 1, 1]]
    world.drain()
    for request in requests:
        assert [r.sample_index for r in request.family] == list(range(request.request.params.n))
        assert [r.output_ids().tolist() for r in request.family] == [
            continuation(Namespace(), request.request.prompt_ids, 3, frozenset(), k)
            for k in range(request.request.params.n)
        ]
    # Those drawn apart compute the last prompt token once more.
    assert [r.usage().recomputed_tokens for r in requests] == [1, 0, 3]


def test_a_tight_pool_retracts_and_loses_nothing() -> None:
    world = World(Sizes(num_slots=30, num_rows=6, max_running=5, chunk=16))
    for i in range(5):
        world.submit([i, i, i, 1], 20, stop_ids=frozenset([VOCAB + 1]))  # never sampled: the estimate is too low
    world.drain()
    assert world.scheduler.num_retractions > 0
    assert all(r.log.finish_reason is FinishReason.LENGTH and r.num_output == 20 for r in world.answers)


def test_the_latest_arrivals_yield() -> None:
    world = World(Sizes(num_slots=40, num_rows=8, max_running=4, chunk=16))
    requests = [world.submit([i, i, i, 1], 20, stop_ids=frozenset([VOCAB + 1])) for i in range(4)]
    world.drain()
    assert requests[0].log.retractions == 0
    assert sum(r.log.retractions for r in requests) > 0
    assert world.scheduler.num_retractions <= 6


def test_the_least_urgent_yield() -> None:
    world = World(Sizes(num_slots=40, num_rows=8, max_running=4, chunk=16))
    stop_ids = frozenset([VOCAB + 1])
    requests = [world.submit([i, i, i, 1], 20, stop_ids=stop_ids, priority=3 - i) for i in range(4)]
    world.drain()
    assert requests[3].log.retractions == 0
    assert requests[0].log.retractions > 0
    assert world.events["urgent answer kept"] > 0


def test_less_urgent_ones_go_before_a_follower() -> None:
    """Who waits for a leader, or for tokens in flight, is passed over."""
    world = World(Sizes(num_slots=120, num_rows=6, chunk=5))
    leader = world.submit([1, 2, 3, 4] * 2, 1)
    world.step()
    follower = world.submit([1, 2, 3, 4] * 2 + [0], 1, priority=-1)
    other = world.submit([3], 1, priority=1)
    world.step()
    assert world.scheduler.running == [leader, other]
    world.drain()
    assert follower.usage().cached_tokens == 8


def test_a_retracted_request_finds_again_what_it_computed() -> None:
    world = World(Sizes(num_slots=120))
    request = world.submit([1, 2, 3, 4, 0, 1], 8)
    for _ in range(5):
        world.step()
    computed = request.computed_len
    assert computed > request.request.prompt_len
    world.retract(request)
    world.drain()
    assert request.usage().recomputed_tokens <= 2  # what was in flight


def ended_with(world: World, answer: Answer, most: int) -> int:
    """How many steps it takes until an answer has ended, of so many at most."""
    for steps in range(1, most + 1):
        if answer in world.step():
            return steps
        world.check()
    raise AssertionError(f"it has not ended within {most} steps")


@pytest.mark.parametrize("num_slots", [16, 400])
@pytest.mark.parametrize("yields", [True, False])
def test_who_yields_makes_way_for_a_more_urgent_request(num_slots: int, yields: bool) -> None:
    """For its memory, or for its place: what waits goes first, and what has yielded goes on where it was."""
    world = World(Sizes(num_slots=num_slots, num_rows=4, max_running=2, context_len=40, max_in_flight=1))
    first = world.submit([1, 2], 12 if num_slots == 16 else 30, priority=1, yields=yields)
    second = world.submit([3, 0], 30, priority=1, yields=yields) if num_slots == 400 else None
    for _ in range(6):
        world.step()
    assert first is not None
    before = first.num_output
    urgent = world.submit([2, 1, 1, 1], 2)
    assert urgent is not None
    if yields:
        ended_with(world, urgent, 6)
        assert not first.finished
        assert (second or first).log.retractions == 1
        assert first.num_output >= before
    else:
        with pytest.raises(AssertionError, match="within 6 steps"):
            ended_with(world, urgent, 6)
        assert world.scheduler.num_retractions == 0
    world.drain()
    assert first.log.recomputed_tokens == 0 or num_slots == 16


def test_nobody_makes_way_for_an_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Sizes(num_slots=400, num_rows=4, max_running=2, context_len=40))
    running = [world.submit([i, 2], 20, priority=1, yields=True) for i in range(2)]
    world.step()
    for priority in (1, 2):
        world.submit([3, 3], 1, priority=priority, yields=True)
    world.drain()
    assert world.scheduler.num_retractions == 0
    assert all(answer is not None and answer.log.retractions == 0 for answer in running)


def test_no_more_make_way_than_must() -> None:
    """The least urgent, and of these the latest."""
    world = World(Sizes(num_slots=400, num_rows=8, max_running=4, context_len=40))
    running = [world.submit([i, 2], 20, priority=priority, yields=True) for i, priority in enumerate((1, 2, 2, 1))]
    for _ in range(3):
        world.step()
    urgent = world.submit([2, 2, 2], 1)
    assert urgent is not None
    ended_with(world, urgent, 5)
    world.drain()
    assert [answer.log.retractions for answer in running if answer is not None] == [0, 0, 1, 0]
