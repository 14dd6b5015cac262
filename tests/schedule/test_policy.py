"""The order of admission, and how much output is expected."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy, SchedulerConfig, admission_order
from radixrt.schedule.request import Request
from tests.cache.test_states import engine_of, request, run, tokens_of
from tests.support.world.invariants import MAX_TIMES_SKIPPED
from tests.support.world.world import Sizes, World


def test_each_request_that_runs_can_be_sampled() -> None:
    with pytest.raises(ValueError, match="max_samples_per_pass is 7; it must be at least max_running_requests, 8"):
        SchedulerConfig(max_running_requests=8, chunked_prefill_size=8, max_samples_per_pass=7)


def test_the_estimate_is_the_same_for_one_and_for_many() -> None:
    answers = []
    for i in range(20):
        request = Request(i, np.ones(3, np.int32), SamplingParams(), 4 * i, 0, frozenset(range(i % 3)))
        answers.append(Answer(request, arrival=i, log=RequestLog(submitted_at=0.0)))
        for _ in range(min(i, request.max_new_tokens)):
            answers[-1].append(1)
    estimate = OutputEstimate()
    remaining = np.array([answer.request.max_len - answer.known_len for answer in answers], dtype=np.int32)
    num_output = np.array([answer.num_output for answer in answers], dtype=np.int32)
    may_stop = np.array([answer.request.may_stop for answer in answers])
    for _ in range(2 * OutputEstimate.ENOUGH):
        many = estimate.expected_each(remaining, num_output, may_stop)
        assert many.tolist() == [estimate.expected(answer) for answer in answers]
        estimate.ended(10)
        estimate.pass_scheduled()


def test_nobody_is_ranked_where_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Sizes())
    answers = [Answer(world.request([1, 2, 3, i]), i, RequestLog(submitted_at=0.0)) for i in range(3)]

    def looked_up(*_: object) -> None:
        raise AssertionError("there is no match to look for")

    monkeypatch.setattr(Answer, "match_in", looked_up)
    assert admission_order(world.scheduler.config, answers, world.cache) == answers


def test_more_is_expected_once_memory_has_fallen_short() -> None:
    request = Request(0, np.ones(3, np.int32), SamplingParams(), 1000, 0, frozenset([1]))
    answer, estimate = Answer(request, arrival=0, log=RequestLog(submitted_at=0.0)), OutputEstimate()
    for _ in range(100):
        estimate.pass_scheduled()
    for _ in range(OutputEstimate.ENOUGH):
        estimate.ended(10)
    assert estimate.expected(answer) == 10
    estimate.fell_short()
    share = OutputEstimate.INITIAL * OutputEstimate.FALL**100 + OutputEstimate.RISE
    assert estimate.expected(answer) == int(1000 * share)  # and the lengths of before no longer count


def test_chats_without_a_maximum_run_together() -> None:
    """Their limit is the context, of which nobody takes all: memory for that must not be kept for each."""
    world = World(
        Sizes(num_slots=20_000, context_len=16_384, num_rows=32, max_running=16, max_samples=32, chunk=2048)
    )
    for i in range(16):
        world.submit([i, 1, 2], 16_000, stop_ids=frozenset([10**6]))
    for _ in range(3):
        world.engine.step()
    assert world.scheduler.num_running == 16
    estimate = OutputEstimate()
    (before,) = {estimate.expected(answer) for answer in world.scheduler._admission.running}
    estimate.fell_short()
    (after,) = {estimate.expected(answer) for answer in world.scheduler._admission.running}
    assert after > 1.9 * before


def test_first_come_order() -> None:
    world = World(Sizes(num_slots=120, max_running=1, policy=SchedulePolicy.FCFS))
    requests = [world.submit([i, 1, 2], 2) for i in range(4)]
    order = []
    while world.engine.has_work:
        order += world.step()
    assert order == requests


def test_longest_prefix_order() -> None:
    world = World(Sizes(num_slots=120, max_running=1))
    world.submit([1, 2, 3, 4], 4)
    cold = world.submit([2, 2, 2], 1)
    warm = world.submit([1, 2, 3, 0], 1)
    ended = []
    while world.engine.has_work:
        ended += world.step()
    assert ended.index(warm) < ended.index(cold)


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_the_most_urgent_go_first(policy: SchedulePolicy) -> None:
    world = World(Sizes(num_slots=120, max_running=1, policy=policy))
    running = world.submit([1, 2, 3, 4], 4, priority=9)
    world.step()
    priorities = [0, 5, -3, 5, 0, -3]
    one, two, three, four, five, six = (
        world.submit([1, i], 1, priority=priority) for i, priority in enumerate(priorities)
    )
    ended = []
    while world.engine.has_work:
        ended += world.step()
        world.check()
    assert ended == [running, three, six, one, five, two, four]


def test_the_longest_match_decides_among_equals() -> None:
    world = World(Sizes(num_slots=120, max_running=1))
    world.submit([1, 2, 3, 4], 4)
    warm = world.submit([1, 2, 3, 0], 1, priority=1)
    cold = world.submit([2, 2, 2], 1)
    half = world.submit([1, 2, 0], 1)
    ended = []
    while world.engine.has_work:
        ended += world.step()
    assert ended[1:] == [half, cold, warm]


def test_the_longest_match_ends_at_a_state() -> None:
    """Of what is cached, the part after the last state is computed again, and does not count."""
    engine, cache, states = engine_of(30)
    head, longer = tokens_of(0, 100), tokens_of(1, 300)
    run(engine, *(request(index, [*head, *tokens_of(2 + index, 20)]) for index in range(2)))
    run(engine, request(2, longer))
    tails = [[*longer[:200], 1], [*head, 2], [*longer[:250], 3]]
    answers = [Answer(request(3 + i, tail), arrival=i, log=RequestLog(0.0)) for i, tail in enumerate(tails)]

    def ranked() -> list[int]:
        return [answer.arrival for answer in admission_order(engine.scheduler.config, answers, cache)]

    assert [answer.match_in(cache).length() for answer in answers] == [200, 100, 250]
    assert ranked() == [1, 0, 2]
    run(engine, request(6, [*longer[:200], 4]))
    assert ranked() == [0, 2, 1], "it left a state there"
    states.make_room(30, cache.passes)
    assert ranked() == [0, 1, 2], "none is left"
    run(engine, request(7, [*longer[:200], 7]))
    assert ranked() == [0, 2, 1], "it left one where the tree has not changed"


def test_a_list_in_order_keeps_it_behind_urgent_requests() -> None:
    world = World(Sizes(num_slots=120, max_running=1))
    world.submit([1, 2, 3, 4], 4)
    world.step()
    listed = world.submit_all([world.request([2, 2, 2], 1), world.request([1, 2, 3, 0], 1)], in_order=True)
    urgent = world.submit([3, 3], 1, priority=-1)
    ended = []
    while world.engine.has_work:
        ended += world.step()
    assert ended[1:] == [urgent, *listed]


def test_only_equals_count_as_skips() -> None:
    """Urgent ones overtake the oldest of a priority without making it overdue."""
    world = World(Sizes(num_slots=200, max_running=1, context_len=12))
    world.submit([1, 2, 3], 9)
    cold = world.submit([2, 2, 2], 1)
    for _ in range(2 * MAX_TIMES_SKIPPED):
        world.submit([1, 2, 3, 0], 1, priority=-1)
    while cold in world.scheduler.waiting:
        world.step()
        world.check()
        assert cold.times_skipped == 0
    world.drain()


def test_first_come_order_looks_at_no_match() -> None:
    world = World(Sizes(num_slots=120, max_running=1, policy=SchedulePolicy.FCFS))
    first = world.submit([1, 2, 3, 4], 4)
    cold = world.submit([2, 2, 2], 1)
    warm = world.submit([1, 2, 3, 0], 1)
    ended = []
    while world.engine.has_work:
        ended += world.step()
    assert ended == [first, cold, warm]
