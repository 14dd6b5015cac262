"""Who is admitted, and what it finds in the cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from radixrt.cache.radix_tree import Namespace
from radixrt.engine.engine import Engine
from radixrt.limits import RunLimits
from radixrt.output import FinishReason
from radixrt.planning.simulated import ConstantRunner, simulated_engine
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import Pass
from radixrt.schedule.policy import SchedulePolicy
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from tests.support.world.invariants import MAX_TIMES_SKIPPED
from tests.support.world.model import VOCAB, continuation
from tests.support.world.runner import SimulatedPass
from tests.support.world.world import Sizes, World


def test_simultaneous_prompts_compute_their_prefix_once() -> None:
    world = World(Sizes(num_slots=700, num_rows=80, max_running=64, chunk=16, context_len=64))
    prefix = [1, 2, 3, 4] * 8
    for i in range(64):
        world.submit([*prefix, i % VOCAB, (i // VOCAB) % VOCAB, i // VOCAB**2], 3)
    world.drain()
    distinct = {tuple(r.request.prompt_ids[:n]) for r in world.answers for n in range(1, r.request.prompt_len + 1)}
    computed = sum(r.usage().computed_tokens for r in world.answers)
    again = sum(r.request.prompt_len > 0 for r in world.answers)  # at most a last token each, for its logits
    assert len(distinct) <= computed <= len(distinct) + again
    assert sum(r.usage().cached_tokens >= len(prefix) for r in world.answers) == 63


def test_duplicates_of_one_prompt_share_all_but_the_last_token() -> None:
    world = World()
    requests = [world.submit([1, 2, 3, 4, 0, 1], 4) for _ in range(4)]
    world.drain()
    assert [r.usage().cached_tokens for r in requests] == [0, 5, 5, 5]
    assert len({tuple(r.output_ids().tolist()) for r in requests}) == 1


def test_namespaces_share_nothing() -> None:
    world = World(Sizes(num_slots=120))
    prompt = [3, 1, 4, 1, 0]
    spaces = [Namespace(), Namespace(tenant="a"), Namespace(adapter="a"), Namespace(weights_version=1)]
    for namespace in spaces:
        world.submit(prompt, 2, namespace=namespace)
    for _ in range(20):
        world.step()
    again = [world.submit(prompt, 2, namespace=namespace) for namespace in spaces]
    world.drain()
    assert [r.usage().cached_tokens for r in world.answers] == [0, 0, 0, 0, 4, 4, 4, 4]
    assert len({tuple(continuation(n, prompt, 2, frozenset())) for n in spaces}) > 1
    assert all(r.log.finish_reason is FinishReason.LENGTH for r in again)


def test_force_miss_computes_everything_on_the_same_path() -> None:
    world = World(Sizes(num_slots=80, force_miss=True))
    for _ in range(4):
        world.submit([1, 2, 3, 4], 3)
    world.drain()
    assert all(r.usage().cached_tokens == 0 for r in world.answers)
    assert world.events["remap"] > 0


def test_what_runs_to_its_end_for_sure_is_never_retracted() -> None:
    """Requests that no token stops are admitted only as far as all of them fit to their ends."""
    world = World(Sizes(num_slots=61, num_rows=8, max_running=6, chunk=64))
    requests = [world.submit([i, i, i, i], 17) for i in range(5)]  # 20 slots each: three fit
    most = 0
    while world.engine.has_work:
        world.step()
        world.check()
        most = max(most, len(world.scheduler.running))
    assert world.scheduler.num_retractions == 0
    assert most == 3
    assert all(r.num_output == 17 for r in requests)


def test_a_follower_starts_when_its_part_is_committed_not_when_its_leader_is_done() -> None:
    world = World(Sizes(num_slots=200, num_rows=6, chunk=6))
    leader = world.submit([1, 2, 3, 4] * 5 + [1, 2], 1)  # passes of 6, 6, 6 and 4 tokens: two are left over
    follower = world.submit([1, 2, 3, 4, 0, 0, 0], 1)
    while follower in world.scheduler.waiting:
        world.step()
    assert leader.computed_len < leader.request.prompt_len
    assert follower.usage().cached_tokens == 4
    world.drain()


def test_a_hit_keeps_a_prefix_from_eviction() -> None:
    world = World(Sizes(num_slots=31, num_rows=4, chunk=32))
    old, other = [1] * 10, [2] * 10
    for prompt in (old, other, old):  # the old one is hit again
        world.submit(prompt, 1)
        world.drain_requests()
    world.submit([3] * 15, 1)  # has to evict five tokens
    world.drain_requests()
    assert world.cache.match(Namespace(), np.array([*old, 0], dtype=np.int32), 10).length == 10
    assert world.cache.match(Namespace(), np.array([*other, 0], dtype=np.int32), 10).length == 5


def chain(world: World) -> list[Answer]:
    """Prompts that each begin with the one before."""
    steps = [1, 2, 3, 4, 0, 1, 1, 2]
    answers = [world.submit(steps[: i + 1], 4) for i in range(len(steps))]
    return [answer for answer in answers if answer is not None]


def roomy() -> World:
    return World(Sizes(num_slots=120, num_rows=12, max_running=8, max_samples=16, chunk=16))


def test_a_chain_runs_in_one_pass() -> None:
    world = roomy()
    answers = chain(world)
    world.step()
    world.check()
    (flight,) = world.runner.in_flight
    assert flight.batch.prefix_lens.tolist() == list(range(8))
    assert flight.batch.seq_lens.tolist() == list(range(1, 9))
    assert len(set(flight.batch.out_cache_loc.tolist())) == 8
    world.drain()
    assert [answer.usage().cached_tokens for answer in answers] == list(range(8))
    assert [answer.usage().recomputed_tokens for answer in answers] == [0] * 8
    assert world.cache.stats().cached_tokens == sum(range(8))


def test_a_pass_that_fails_takes_the_followers_along() -> None:
    world = roomy()
    answers = chain(world)
    world.runner.fail_run = True
    world.step()
    other = world.submit([1, 2, 3, 4], 2)  # meanwhile it waits for them, then it computes all by itself
    world.drain()
    assert {answer.log.finish_reason for answer in answers} == {FinishReason.ERROR}
    assert other.log.finish_reason is FinishReason.LENGTH
    assert other.usage().cached_tokens == 0


def test_who_follows_one_that_is_not_finite_goes_on_where_it_has_not_read_it() -> None:
    world = roomy()
    leader = world.submit([1, 2, 3], 4)
    beside, after = world.submit([1, 2, 4], 4), world.submit([1, 2, 3, 4], 4)
    poison(world, leader)
    world.drain()  # every prefix in the tree is looked at
    assert [answer.log.finish_reason for answer in (leader, after)] == [FinishReason.ERROR] * 2
    assert beside.log.finish_reason is FinishReason.LENGTH
    assert beside.usage().cached_tokens == 2


def poison(world: World, answer: Answer) -> None:
    """Make the last new token of an answer in the coming pass one of numbers that are not finite."""
    launch = world.runner.launch

    def poisoned(pass_: Pass) -> SimulatedPass:
        flight = launch(pass_)
        flight.poisoned = frozenset([flight.booking.answers.index(answer)])
        world.runner.launch = launch  # type: ignore[method-assign]
        return flight

    world.runner.launch = poisoned  # type: ignore[method-assign]


def test_a_leader_that_ends_in_flight_leaves_its_followers_what_it_computes() -> None:
    for how in ("abort", "retract"):
        world = roomy()
        answers = chain(world)
        world.step()
        if how == "abort":
            world.abort(answers[0])
            world.abort(answers[4])
        else:
            world.retract(answers[4])
            world.retract(answers[0])
        world.step()
        world.check()
        world.drain()
        ended = {answer.log.finish_reason for answer in answers}
        assert ended == {FinishReason.LENGTH, FinishReason.ABORT} if how == "abort" else {FinishReason.LENGTH}
        assert world.events["end of a lender"] == 2


def test_without_reuse_nobody_follows() -> None:
    for sizes in (replace(roomy().sizes, enabled=False), replace(roomy().sizes, force_miss=True)):
        world = World(sizes)
        answers = chain(world)
        world.drain()
        assert {answer.usage().cached_tokens for answer in answers} == {0}
        assert world.events["loan"] == 0


def test_room_is_kept_for_who_waits_for_a_leader() -> None:
    world = World(Sizes(num_slots=27, num_rows=6, chunk=4))
    leader = world.submit([1] * 8, 1)
    follower = world.submit([1] * 8 + [2] * 8, 1)
    other = world.submit([3] * 12, 1)  # would fit beside the leader, but then the follower would not
    world.step()
    assert world.scheduler.running == [leader]
    while follower in world.scheduler.waiting:
        world.step()
    assert other in world.scheduler.waiting
    assert follower.usage().cached_tokens == 8
    world.drain()


def one_after_the_other(policy: SchedulePolicy, pool_tokens: int = 4000) -> list[list[int]]:
    """What each pass extends, by the number of a head of 40 tokens: three of 60 prompts each, of which 20 fit in a
    pass; 15 that wait are considered.
    """
    passes: list[list[int]] = []

    class Noted(ConstantRunner):
        def launch(self, pass_: Pass) -> Pass:
            passes.append((pass_.input_ids[pass_.input_ids >= 1000] // 1000).tolist())
            return pass_

    engine = simulated_engine(Noted(), RunLimits(pool_tokens, 20, 64), 60)
    config = replace(engine.scheduler.config, max_ranked=15, policy=policy, least_scouted=32)
    engine = Engine(Scheduler(engine.scheduler.cache, config), engine.runner)
    prompts = [[*([head] * 40), 1000 * head + nth] for head in (1, 2, 3) for nth in range(60)]
    params = SamplingParams(max_new_tokens=1)
    requests = [
        Request(index, np.array(prompt, np.int32), params, max_new_tokens=1, seed=0)
        for index, prompt in enumerate(prompts)
    ]
    answers = engine.submit_all(requests, is_sorted=True)
    while engine.has_work:
        engine.step()
    found = sum(answer.usage().cached_tokens for answer in answers)
    assert found == (180 - 3) * 40, "each head is computed once"
    return passes


def test_a_scout_computes_what_many_will_wait_for() -> None:
    """All that begin with the next head would wait for the pass that computes it, and so would the device."""
    scouted, in_order = one_after_the_other(SchedulePolicy.LPM), one_after_the_other(SchedulePolicy.FCFS)
    assert all(max(one) <= min(other) for one, other in pairwise(in_order)), "one head after the other"
    for head in (2, 3):
        before = [heads for heads in scouted if heads.count(head) == 1 and heads.count(head - 1) > 1]
        assert before, "it goes with those of the head before"
        after = scouted[scouted.index(before[0]) + 1 :]
        assert any(head not in heads for heads in after[:2]), "some passes before the others"
    assert one_after_the_other(SchedulePolicy.LPM, pool_tokens=130) == one_after_the_other(
        SchedulePolicy.FCFS, pool_tokens=130
    ), "not where memory is short"


def test_who_waits_for_a_leader_is_not_overtaken() -> None:
    """While the oldest waits for what a long extend computes, any number of others begin."""
    world = World(Sizes(num_slots=400, num_rows=30, max_running=20, max_samples=20, chunk=20, context_len=100))
    long = [1, 2, 3, 4] * 20
    world.submit(long, 1)
    world.step()
    follower = world.submit([*long, 1], 1)
    others = [world.submit([2, i // VOCAB, i % VOCAB], 1) for i in range(12)]
    while follower in world.scheduler.waiting:
        world.step()
        world.check()
    assert world.events["overtaken while it follows"] == len(others) > MAX_TIMES_SKIPPED
    world.drain()
    assert follower.usage().cached_tokens == len(long)
