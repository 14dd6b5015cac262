"""The real engine, scheduler, cache and pools around a simulated model: see simulation.py."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixrt.cache.radix_tree import Namespace
from radixrt.errors import SchedulerError
from radixrt.output import FinishReason
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import Pass
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy
from radixrt.schedule.request import Request, RequestState
from radixrt.schedule.scheduler import Scheduler
from radixrt.workloads import best_hit_rate
from tests.support.planned_reads import MOVES
from tests.support.planned_reads import PlannedWorld as World
from tests.support.simulation import VOCAB, SimulatedPass, Sizes, Violation, Walk, continuation, random_sizes

EVENTS: Counter[str] = Counter()

tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)
answers = st.sampled_from([1, 1, 1, 2, 4])


class EngineMachine(RuleBasedStateMachine):
    """Submits, forks, steps, aborts, retracts, flushes, changes weights and breaks things, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(
        slots=st.sampled_from([40, 48, 64, 120]),
        rows=st.integers(2, 6),
        running=st.integers(1, 5),
        samples=st.sampled_from([0, 4, 8]),
        chunk=st.sampled_from([1, 3, 7, 32]),
        policy=st.sampled_from(list(SchedulePolicy)),
        cache=st.sampled_from(["on", "on", "on", "on", "off", "force_miss"]),
        host=st.sampled_from([0, 2, 20, 60, 400]),
    )
    def build(
        self,
        slots: int,
        rows: int,
        running: int,
        samples: int,
        chunk: int,
        policy: SchedulePolicy,
        cache: str,
        host: int,
    ) -> None:
        self.world = World(
            Sizes(
                num_slots=slots,
                num_rows=rows,
                max_running=running,
                max_samples=samples,
                chunk=chunk,
                policy=policy,
                enabled=cache != "off",
                force_miss=cache == "force_miss",
                host_slots=host,
                drops=True,
            )
        )

    def submit(self, prompt: list[int], new: int, stop: bool, tenant: str | None, n: int = 1) -> None:
        stop_ids = frozenset([0]) if stop else frozenset()
        self.world.submit(prompt, new, stop_ids=stop_ids, namespace=self.world.namespace(tenant), n=n)

    def earlier(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.world.requests[-8:]))

    @rule(
        prompt=tokens,
        new=st.integers(1, 12),
        stop=st.booleans(),
        tenant=st.sampled_from([None, None, "other"]),
        n=answers,
    )
    def submit_fresh(self, prompt: list[int], new: int, stop: bool, tenant: str | None, n: int) -> None:
        self.submit(prompt, new, stop, tenant, n)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), tail=tokens, new=st.integers(1, 12), stop=st.booleans(), n=answers)
    def submit_sharing_a_prefix(self, data: st.DataObject, tail: list[int], new: int, stop: bool, n: int) -> None:
        earlier = self.earlier(data)
        known = earlier.tokens().tolist()
        cut = data.draw(st.integers(1, len(known)))
        self.submit((known[:cut] + tail)[:24], new, stop, earlier.namespace.tenant, n)

    @precondition(lambda self: self.world.host_slots is not None and self.world.on_host())
    @rule(data=st.data(), tail=st.lists(st.integers(0, VOCAB - 1), max_size=4), new=st.integers(1, 8))
    def submit_what_only_the_host_has(self, data: st.DataObject, tail: list[int], new: int) -> None:
        earlier = data.draw(st.sampled_from(self.world.on_host()))
        self.submit((earlier.tokens().tolist() + tail)[:24], new, False, earlier.namespace.tenant)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), copies=st.integers(1, 3), new=st.integers(1, 12))
    def submit_duplicates(self, data: st.DataObject, copies: int, new: int) -> None:
        earlier = self.earlier(data)
        for _ in range(copies):
            self.submit(earlier.prompt_ids.tolist(), new, False, earlier.namespace.tenant)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def submit_to_another_namespace(self, data: st.DataObject) -> None:
        self.submit(self.earlier(data).tokens().tolist()[:24], 3, False, "third")

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), tail=st.lists(st.integers(0, VOCAB - 1), max_size=4), new=st.integers(0, 6))
    def submit_to_be_scored(self, data: st.DataObject, tail: list[int], new: int) -> None:
        earlier = self.earlier(data)
        prompt = (earlier.tokens().tolist() + tail)[:24]
        start = data.draw(st.integers(0, len(prompt) - 1))
        namespace = self.world.namespace(earlier.namespace.tenant)
        self.world.submit(prompt, new, namespace=namespace, n=2 if new > 4 else 1, scored_from=start)

    @precondition(lambda self: any(r.num_known < 32 for r in self.world.requests[-8:]))
    @rule(data=st.data(), branches=st.integers(2, 4), length=st.integers(1, 3), new=st.integers(1, 8), n=answers)
    def fork(self, data: st.DataObject, branches: int, length: int, new: int, n: int) -> None:
        one = data.draw(st.sampled_from([r for r in self.world.requests[-8:] if r.num_known < 32]))
        self.world.fork(one, [[first] * length for first in range(branches)], new, n)

    @rule(prompt=tokens, new=st.integers(1, 6))
    def prepare(self, prompt: list[int], new: int) -> None:
        self.world.prepared.append(self.world.request(prompt, new))

    @precondition(lambda self: self.world.prepared)
    @rule()
    def submit_what_was_prepared(self) -> None:
        self.world.submit_all(self.world.prepared)
        self.world.prepared.clear()

    # Each drains the world: were it to come often, nothing would ever pile up.
    @precondition(lambda self: Counter(self.world.weights.values())[self.world.runner.weights] >= 6)
    @rule(how=st.sampled_from(["both", "both", "bump", "flush"]))
    def update_weights(self, how: str) -> None:
        self.world.update_weights(bump=how != "flush", flush=how != "bump")

    @precondition(lambda self: len(self.world.requests) >= 4)
    @rule()
    def save_cache(self) -> None:
        self.world.save_cache()

    @precondition(lambda self: self.world.kept is not None)
    @rule(flush=st.booleans(), fails=st.sampled_from([False, False, False, True]))
    def load_cache(self, flush: bool, fails: bool) -> None:
        if flush:
            self.world.cache.flush()
        self.world.load_cache(fails=fails)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()
            self.world.check()

    @precondition(lambda self: self.world.runner.queue)
    @rule()
    def let_the_device_run(self) -> None:
        self.world.runner.run_next()

    @precondition(lambda self: any(not r.finished for r in self.world.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [r for r in self.world.requests if not r.finished]
        flying = [r for r in alive if any(r in f.batch.requests for f in self.world.runner.in_flight)]
        self.world.abort(data.draw(st.sampled_from(flying or alive)))

    @precondition(lambda self: any(r.params.n > 1 and not r.finished for r in self.world.requests))
    @rule(data=st.data(), steps=st.integers(0, 5))
    def abort_one_of_several_answers(self, data: st.DataObject, steps: int) -> None:
        alive = [r for r in self.world.requests if r.params.n > 1 and not r.finished]
        family = data.draw(st.sampled_from(alive)).family[0]
        self.step(steps)  # until some of the answers run
        self.world.events["abort of a running answer"] += any(r.parent and r.lease for r in family.family)
        self.world.abort(data.draw(st.sampled_from(family.family)))
        self.step(1)

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        self.world.retract(data.draw(st.sampled_from(self.world.scheduler.running)))

    @rule()
    def flush(self) -> None:
        self.world.cache.flush()

    @rule(what=st.sampled_from(["allocation", "launch", "run", "numbers"]))
    def break_what_comes_next(self, what: str) -> None:
        if what == "allocation":
            self.world.fail_alloc = True
        elif what == "numbers":
            self.world.runner.poison_next = True
        else:
            setattr(self.world.runner, f"fail_{what}", True)

    @rule()
    def step_and_let_the_device_run(self) -> None:
        self.world.step()
        if self.world.runner.queue:
            self.world.runner.run_next()

    @precondition(lambda self: self.world.runner.transfers)
    @rule(times=st.integers(1, 3))
    def let_transfers_be_made(self, times: int) -> None:
        for _ in range(min(times, len(self.world.runner.transfers))):
            self.world.runner.transfer_next()

    @precondition(lambda self: self.world.host_slots is not None)
    @rule(after=st.integers(0, 2))
    def break_a_transfer(self, after: int) -> None:
        self.world.runner.fail_transfer = after

    @invariant()
    def everything_holds(self) -> None:
        self.world.check()
        EVENTS["steps"] += 1

    def teardown(self) -> None:
        self.world.drain()
        EVENTS.update(self.world.events)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failed passes are logged with their traces; here they are made by the thousand."""
    caplog.set_level(logging.CRITICAL, logger="radixrt.engine.engine")


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_state_machine_short() -> None:
    run_machine(examples=60, steps=30)


@pytest.mark.long
def test_state_machine_long() -> None:
    EVENTS.clear()
    run_machine(examples=850, steps=60)
    print(dict(EVENTS))
    assert EVENTS["steps"] >= 20_000
    often = ("retraction", "eviction", "split", "remap", "abort in flight", "n answers", "scored prompt")
    for event in (*often, "dropped", "dropped in part"):
        assert EVENTS[event] >= 200, (event, EVENTS)
    for event in ("fork of a running request", "weights update", "first token drawn apart"):
        assert EVENTS[event] >= 200, (event, EVENTS)
    assert EVENTS["abort of a running answer"] >= 25, EVENTS
    for event in ("load of a file", "save from the host", "store", "host eviction", "computed what the host has"):
        assert EVENTS[event] >= 100, (event, EVENTS)
    for event in ("shared read", "shared read of several segments", "shared read by an older plan"):
        assert EVENTS[event] >= 200, (event, EVENTS)
    assert EVENTS["shared read by extends"] >= 20, EVENTS
    for event in MOVES:
        assert EVENTS[f"{event} under a plan"] >= 10, (event, EVENTS)
    for event, least in (("load in part", 50), ("load", 25), ("eviction of what the host has", 100)):
        assert EVENTS[event] >= least, (event, EVENTS)


@pytest.mark.long_unless(kept=lambda given: (given["seed"] + given["host_slots"] // 24) % 2)
@pytest.mark.parametrize("host_slots", [0, 24, 120])
@pytest.mark.parametrize("seed", range(12))
def test_random_walk(seed: int, host_slots: int) -> None:
    world = World(random_sizes(seed, host_slots))
    walk = Walk(world, seed)
    for _ in range(100):
        walk.act()
    world.drain()


def test_runs_without_torch() -> None:
    code = (
        "import sys; import tests.support.simulation as s; w = s.World(); w.submit([1, 2, 3]); w.drain(); "
        "assert 'torch' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


# -- told examples -----------------------------------------------------------------------------------------


def test_simultaneous_prompts_compute_their_prefix_once() -> None:
    world = World(Sizes(num_slots=700, num_rows=80, max_running=64, chunk=16, context_len=64))
    prefix = [1, 2, 3, 4] * 8
    for i in range(64):
        world.submit([*prefix, i % VOCAB, (i // VOCAB) % VOCAB, i // VOCAB**2], 3)
    world.drain()
    distinct = {tuple(r.prompt_ids[:n]) for r in world.requests for n in range(1, r.prompt_len + 1)}
    computed = sum(r.usage().computed_tokens for r in world.requests)
    again = sum(r.prompt_len > 0 for r in world.requests)  # at most a last token each, for its logits
    assert len(distinct) <= computed <= len(distinct) + again
    assert sum(r.usage().cached_tokens >= len(prefix) for r in world.requests) == 63


def test_duplicates_of_one_prompt_share_all_but_the_last_token() -> None:
    world = World()
    requests = [world.submit([1, 2, 3, 4, 0, 1], 4) for _ in range(4)]
    world.drain()
    assert [r.usage().cached_tokens for r in requests] == [0, 5, 5, 5]
    assert len({tuple(r.output_ids().tolist()) for r in requests}) == 1


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
    assert all(request.finish_reason is FinishReason.LENGTH for request in (*joins, *requests[2:]))
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
        rows = [request.lease.row for request in world.requests if request.lease is not None]
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


def test_generated_tokens_are_cached_too() -> None:
    world = World(Sizes(num_slots=80))
    first = world.submit([1, 2, 3], 6)
    while not first.finished:
        world.step()
    history = first.tokens().tolist()
    second = world.submit([*history, 4, 4], 2)
    world.drain()
    # The last sampled token has no KV; everything before it has.
    assert second.usage().cached_tokens == len(history) - 1


def test_a_request_that_never_fits_is_refused() -> None:
    world = World(Sizes(num_slots=16))
    request = world.submit([1] * 10, 12)
    assert request.arrival == -1
    refusal = world.scheduler.refusal(request)
    assert refusal is not None
    assert "21 KV slots" in refusal
    assert "15" in refusal
    with pytest.raises(ValueError, match="21 KV slots"):
        world.scheduler.submit(request)
    assert world.submit([1] * 10, 6).arrival == 0  # 15 slots: fits to the last one
    world.drain()


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
    assert [r.usage().cached_tokens for r in world.requests] == [0, 0, 0, 0, 4, 4, 4, 4]
    assert len({tuple(continuation(n, prompt, 2, frozenset())) for n in spaces}) > 1
    assert all(r.finish_reason is FinishReason.LENGTH for r in again)


def decoding(world: World) -> list[Pass]:
    """The batches that are planned from now on, all requests of a world being about to decode."""
    planned: list[Pass] = []
    launch = world.runner.launch

    def watched(batch: Pass) -> SimulatedPass:
        planned.append(batch)
        return launch(batch)

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
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            return function(*arguments)
        finally:
            sys.settrace(before)

    return counted, counts


def test_a_steady_step_costs_as_much_python_for_many_requests_as_for_few() -> None:
    costs = []
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
        scheduler._plan, planning = instructions(scheduler._plan)  # type: ignore[method-assign, assignment]
        process = Scheduler.process.__get__(scheduler)
        scheduler.process, booking = instructions(process)  # type: ignore[method-assign, assignment]
        for _ in range(5):
            world.step()
        assert len({id(batch.requests) for batch in planned}) == len({id(batch.leases) for batch in planned}) == 1
        assert [len(batch.requests) for batch in planned] == [count] * 5
        assert not any(batch.admitted for batch in planned)
        assert len(set(planning)) == len(set(booking)) == 1
        costs.append((planning[0], booking[0]))
    assert costs[0] == costs[1]


def test_a_change_of_members_changes_the_tuples() -> None:
    world = World(Sizes(num_slots=200, num_rows=8, max_running=4, chunk=64))
    requests = [world.submit([i, 1, 2], 20 if i else 6) for i in range(3)]
    planned = decoding(world)
    for _ in range(12):
        world.step()
        world.check()
    members = [batch.requests for batch in planned]
    assert members[0] == tuple(requests)
    assert members[1:6] == [members[1]] * 5
    assert members[6:] == [tuple(requests[1:])] * 6
    assert len({id(one) for one in members[6:]}) == 1


def test_the_estimate_is_the_same_for_one_and_for_many() -> None:
    requests = [
        Request(i, np.ones(3, np.int32), SamplingParams(), 4 * i, 0, frozenset(range(i % 3))) for i in range(20)
    ]
    for i, request in enumerate(requests):
        for _ in range(min(i, request.max_new_tokens)):
            request.append(1)
    estimate = OutputEstimate()
    remaining = np.array([r.remaining for r in requests], dtype=np.int32)
    num_output = np.array([r.num_output for r in requests], dtype=np.int32)
    may_stop = np.array([bool(r.stop_ids) for r in requests])
    for _ in range(2 * OutputEstimate.ENOUGH):
        many = estimate.expected_each(remaining, num_output, may_stop)
        assert many.tolist() == [estimate.expected(r) for r in requests]
        estimate.ended(requests[10])
        estimate.pass_scheduled()


def test_a_tight_pool_retracts_and_loses_nothing() -> None:
    world = World(Sizes(num_slots=30, num_rows=6, max_running=5, chunk=16))
    for i in range(5):
        world.submit([i, i, i, 1], 20, stop_ids=frozenset([VOCAB + 1]))  # never sampled: the estimate is too low
    world.drain()
    assert world.scheduler.num_retractions > 0
    assert all(r.finish_reason is FinishReason.LENGTH and r.num_output == 20 for r in world.requests)


def test_first_tokens_that_a_pass_has_no_room_for_are_drawn_apart() -> None:
    world = World(Sizes(num_slots=200, num_rows=12, max_running=4, max_samples=6, chunk=64))
    requests = [world.submit([i, 1, 2], 3, n=n) for i, n in enumerate([5, 1, 4])]
    world.step()
    # Each of the three draws one, and the first comer has the three that are left.
    assert [f.batch.num_samples.tolist() for f in world.runner.in_flight] == [[4, 1, 1]]
    world.drain()
    for request in requests:
        assert [r.sample_index for r in request.family] == list(range(request.params.n))
        assert [r.output_ids().tolist() for r in request.family] == [
            continuation(Namespace(), request.prompt_ids, 3, frozenset(), k) for k in range(request.params.n)
        ]
    # Those drawn apart compute the last prompt token once more.
    assert [r.usage().recomputed_tokens for r in requests] == [1, 0, 3]


def test_each_request_that_runs_can_be_sampled() -> None:
    cache = World().cache
    with pytest.raises(ValueError, match="max_samples_per_pass is 7; it must be at least max_running_requests, 8"):
        Scheduler(cache, max_running_requests=8, chunked_prefill_size=8, max_samples_per_pass=7)


def test_force_miss_computes_everything_on_the_same_path() -> None:
    world = World(Sizes(num_slots=80, force_miss=True))
    for _ in range(4):
        world.submit([1, 2, 3, 4], 3)
    world.drain()
    assert all(r.usage().cached_tokens == 0 for r in world.requests)
    assert world.events["remap"] > 0


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


def test_first_come_order_looks_at_no_match() -> None:
    world = World(Sizes(num_slots=120, max_running=1, policy=SchedulePolicy.FCFS))
    first = world.submit([1, 2, 3, 4], 4)
    cold = world.submit([2, 2, 2], 1)
    warm = world.submit([1, 2, 3, 0], 1)
    ended = []
    while world.engine.has_work:
        ended += world.step()
    assert ended == [first, cold, warm]


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
    while follower.state is RequestState.WAITING:
        world.step()
    assert leader.computed < leader.prompt_len
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


def test_a_retracted_request_finds_again_what_it_computed() -> None:
    world = World(Sizes(num_slots=120))
    request = world.submit([1, 2, 3, 4, 0, 1], 8)
    for _ in range(5):
        world.step()
    computed = request.computed
    assert computed > request.prompt_len
    world.retract(request)
    world.drain()
    assert request.usage().recomputed_tokens <= 2  # what was in flight


def test_a_pass_is_launched_while_the_one_before_is_in_flight() -> None:
    world = World(Sizes(num_slots=120, max_running=2))
    for i in range(6):
        world.submit([i % VOCAB, 1, 2], 3)
    waiting = []
    launch = world.runner.launch

    def watched(batch: Pass) -> object:
        waiting.append(len(world.runner.in_flight))
        return launch(batch)

    world.runner.launch = watched  # type: ignore[method-assign, assignment]
    world.drain_requests()
    # All but the first, though requests end two by two and only their last tokens are awaited then.
    assert waiting == [0] + [1] * (len(waiting) - 1)


def test_the_latest_arrivals_yield() -> None:
    world = World(Sizes(num_slots=40, num_rows=8, max_running=4, chunk=16))
    requests = [world.submit([i, i, i, 1], 20, stop_ids=frozenset([VOCAB + 1])) for i in range(4)]
    world.drain()
    assert requests[0].retractions == 0
    assert sum(r.retractions for r in requests) > 0
    assert world.scheduler.num_retractions <= 6


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
    world.submit_all(requests)
    world.drain()
    cached = sum(r.usage().cached_tokens for r in requests)
    assert cached / sum(r.prompt_len for r in requests) == best_hit_rate([r.prompt_ids for r in requests])


def test_a_step_that_is_cut_in_two_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.submit([1, 2, 3], 4)
    monkeypatch.setattr(world.runner, "launch", lambda batch: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        world.engine.step()
    with pytest.raises(SchedulerError, match="cut in two"):
        world.engine.step()


def test_ctrl_c_in_a_step_comes_after_it() -> None:
    world = World(Sizes(num_slots=120))
    request = world.submit([1, 2, 3], 6)
    launch = world.runner.launch

    def interrupted(batch: Pass) -> object:
        signal.raise_signal(signal.SIGINT)
        return launch(batch)

    world.runner.launch = interrupted  # type: ignore[method-assign, assignment]
    while not request.finished:
        with pytest.raises(KeyboardInterrupt):
            world.engine.step()
        world.check()
        if world.cache.passes_launched > 3:
            world.runner.launch = launch  # type: ignore[method-assign]
            break
    world.drain()
    assert request.finish_reason is FinishReason.LENGTH


def test_aborting_what_was_never_submitted_does_nothing() -> None:
    world = World()
    request = Request(0, np.array([1, 2], dtype=np.int32), SamplingParams(), 4, 0)
    world.engine.abort(request)
    assert world.engine.step() == []


def test_a_failed_pass_ends_its_requests_alone() -> None:
    world = World(Sizes(num_slots=120, max_running=2, num_rows=4))
    doomed = [world.submit([1, 2, 3], 5), world.submit([2, 2, 3], 5)]
    spared = world.submit([4, 4, 4], 5)
    world.step()
    world.runner.fail_run = True
    world.drain()
    assert [r.finish_reason for r in doomed] == [FinishReason.ERROR] * 2
    assert doomed[0].error == "its pass failed: SimulatedFailure: run"
    assert isinstance(doomed[0].cause, RuntimeError)
    assert spared.finish_reason is FinishReason.LENGTH


def test_values_that_are_not_finite_end_one_request_and_leave_no_trace() -> None:
    world = World(Sizes(num_slots=120))
    world.runner.poison_next = True
    requests = [world.submit([i, 1, 2, 3], 4) for i in range(3)]
    world.drain()
    assert sorted(str(r.finish_reason) for r in requests) == ["error", "length", "length"]
    bad = next(r for r in requests if r.finish_reason is FinishReason.ERROR)
    assert bad.error == "the model computed values that are not finite"
    assert bad.num_output == 0


def test_an_aborted_request_in_the_queue_and_one_that_runs() -> None:
    world = World(Sizes(num_slots=120, max_running=1))
    running, waiting = world.submit([1, 2, 3], 9), world.submit([2, 2, 2], 9)
    world.step()
    assert (running.state, waiting.state) == (RequestState.RUNNING, RequestState.WAITING)
    world.abort(running)
    world.abort(waiting)
    assert set(world.step()) == {running, waiting}
    world.abort(running)  # once more changes nothing
    assert world.step() == []
    world.drain()
    assert waiting.timings().first_token is None


def test_the_checks_see_a_lost_slot() -> None:
    world = World()
    world.slots.alloc(1)
    with pytest.raises(Violation, match="cover the pool"):
        world.check()
    assert np.array_equal(world.rows.take_changes().slots, [])
