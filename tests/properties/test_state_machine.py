"""A simulated world (tests/support/world) in any order of events."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

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

from radixrt.schedule.policy import SchedulePolicy
from radixrt.schedule.request import Request
from tests.support.forms import RuleForm
from tests.support.planned_reads import MOVES
from tests.support.planned_reads import PlannedWorld as World
from tests.support.world.invariants import Violation
from tests.support.world.model import VOCAB, form_of
from tests.support.world.walk import PRIORITIES, Walk, random_sizes
from tests.support.world.world import Sizes

pytestmark = pytest.mark.usefixtures("quiet")

EVENTS: Counter[str] = Counter()


tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)


answers = st.sampled_from([1, 1, 1, 2, 4])
priorities = st.sampled_from(PRIORITIES)


class EngineMachine(RuleBasedStateMachine):
    """Submits, forks, steps, aborts, retracts, flushes, changes weights and breaks things, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(
        slots=st.sampled_from([40, 48, 64, 120]),
        rows=st.integers(2, 9),
        running=st.integers(1, 8),
        samples=st.sampled_from([0, 4, 8]),
        chunk=st.sampled_from([1, 3, 7, 32]),
        policy=st.sampled_from(list(SchedulePolicy)),
        cache=st.sampled_from(["on", "on", "on", "on", "off", "force_miss"]),
        host=st.sampled_from([0, 2, 20, 60, 400]),
        states=st.sampled_from([None, None, 0, 2, 12]),
        host_states=st.sampled_from([2, 4, 30]),
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
        states: int | None,
        host_states: int,
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
                spare_states=states,
                host_states=host_states,
                drops=True,
            )
        )

    def submit(
        self,
        prompt: list[int],
        new: int,
        stop: bool,
        tenant: str | None,
        n: int = 1,
        priority: int = 0,
        form: RuleForm | None = None,
    ) -> None:
        stop_ids, namespace = frozenset([0]) if stop else frozenset(), self.world.namespace(tenant)
        self.world.submit(
            prompt,
            new,
            stop_ids=stop_ids,
            namespace=namespace,
            n=n,
            priority=priority,
            yields=priority > 0,
            form=form,
        )

    @rule(prompt=tokens, new=st.integers(1, 12), length=st.integers(1, 9), n=answers, priority=priorities)
    def submit_with_a_form(self, prompt: list[int], new: int, length: int, n: int, priority: int) -> None:
        self.submit(prompt, new, False, None, n, priority, form_of(length))

    def earlier(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.world.answers[-8:]))

    @rule(
        prompt=tokens,
        new=st.integers(1, 12),
        stop=st.booleans(),
        tenant=st.sampled_from([None, None, "other"]),
        n=answers,
        priority=priorities,
    )
    def submit_fresh(
        self, prompt: list[int], new: int, stop: bool, tenant: str | None, n: int, priority: int
    ) -> None:
        self.submit(prompt, new, stop, tenant, n, priority)

    @precondition(lambda self: self.world.answers)
    @rule(data=st.data(), tail=tokens, new=st.integers(1, 12), stop=st.booleans(), n=answers, priority=priorities)
    def submit_sharing_a_prefix(
        self, data: st.DataObject, tail: list[int], new: int, stop: bool, n: int, priority: int
    ) -> None:
        earlier = self.earlier(data)
        known = earlier.tokens().tolist()
        cut = data.draw(st.integers(1, len(known)))
        self.submit((known[:cut] + tail)[:24], new, stop, earlier.request.namespace.tenant, n, priority)

    @precondition(lambda self: self.world.host_slots is not None and self.world.on_host())
    @rule(data=st.data(), tail=st.lists(st.integers(0, VOCAB - 1), max_size=4), new=st.integers(1, 8))
    def submit_what_only_the_host_has(self, data: st.DataObject, tail: list[int], new: int) -> None:
        earlier = data.draw(st.sampled_from(self.world.on_host()))
        self.submit((earlier.tokens().tolist() + tail)[:24], new, False, earlier.request.namespace.tenant)

    @precondition(lambda self: self.world.answers)
    @rule(data=st.data(), copies=st.integers(1, 3), new=st.integers(1, 12), priority=priorities)
    def submit_duplicates(self, data: st.DataObject, copies: int, new: int, priority: int) -> None:
        earlier = self.earlier(data)
        prompt, tenant = earlier.request.prompt_ids.tolist(), earlier.request.namespace.tenant
        for _ in range(copies):
            self.submit(prompt, new, False, tenant, priority=priority)

    @rule(
        prompt=tokens,
        tails=st.lists(st.tuples(st.integers(1, 14), tokens), min_size=2, max_size=6),
        new=st.integers(1, 6),
    )
    def submit_what_begins_with_one_another(
        self, prompt: list[int], tails: list[tuple[int, list[int]]], new: int
    ) -> None:
        self.submit(prompt, new, False, None)
        for kept, tail in tails:
            prompt = (prompt[:kept] + tail)[:24]
            self.submit(prompt, new, False, None)

    @precondition(lambda self: self.world.answers)
    @rule(data=st.data())
    def submit_to_another_namespace(self, data: st.DataObject) -> None:
        self.submit(self.earlier(data).tokens().tolist()[:24], 3, False, "third")

    @precondition(lambda self: self.world.answers)
    @rule(data=st.data(), tail=st.lists(st.integers(0, VOCAB - 1), max_size=4), new=st.integers(0, 6))
    def submit_to_be_scored(self, data: st.DataObject, tail: list[int], new: int) -> None:
        earlier = self.earlier(data)
        prompt = (earlier.tokens().tolist() + tail)[:24]
        start = data.draw(st.integers(0, len(prompt) - 1))
        namespace = self.world.namespace(earlier.request.namespace.tenant)
        self.world.submit(prompt, new, namespace=namespace, n=2 if new > 4 else 1, scored_from=start)

    @precondition(lambda self: any(r.known_len < 32 for r in self.world.answers[-8:]))
    @rule(data=st.data(), branches=st.integers(2, 4), length=st.integers(1, 3), new=st.integers(1, 8), n=answers)
    def fork(self, data: st.DataObject, branches: int, length: int, new: int, n: int) -> None:
        one = data.draw(st.sampled_from([r for r in self.world.answers[-8:] if r.known_len < 32]))
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

    @precondition(lambda self: len(self.world.answers) >= 4)
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

    @precondition(lambda self: any(not r.finished for r in self.world.answers))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [r for r in self.world.answers if not r.finished]
        flying = [r for r in alive if any(r in f.booking.answers for f in self.world.runner.in_flight)]
        self.world.abort(data.draw(st.sampled_from(flying or alive)))

    @precondition(lambda self: any(r.request.params.n > 1 and not r.finished for r in self.world.answers))
    @rule(data=st.data(), steps=st.integers(0, 5))
    def abort_one_of_several_answers(self, data: st.DataObject, steps: int) -> None:
        alive = [r for r in self.world.answers if r.request.params.n > 1 and not r.finished]
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

    @rule(what=st.sampled_from(["allocation", "launch", "draw", "run", "numbers"]))
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
    run_machine(examples=8, steps=30)


@pytest.mark.long
def test_state_machine_long() -> None:
    EVENTS.clear()
    run_machine(examples=850, steps=60)
    print(dict(EVENTS))
    assert EVENTS["steps"] >= 20_000
    often = ("retraction", "eviction", "split", "remap", "abort in flight", "n answers", "scored prompt")
    for event in (*often, "dropped", "dropped in part"):
        assert EVENTS[event] >= 200, (event, EVENTS)
    for event in ("fork of a running answer", "weights update", "first token drawn apart", "loan"):
        assert EVENTS[event] >= 200, (event, EVENTS)
    for event in ("abort of a running answer", "loan of a loan", "end of a lender"):
        assert EVENTS[event] >= 25, (event, EVENTS)
    for event in ("load of a file", "save from the host", "store", "host eviction", "computed what the host has"):
        assert EVENTS[event] >= 100, (event, EVENTS)
    for event in ("shared read", "shared read of several segments", "shared read by an older plan"):
        assert EVENTS[event] >= 200, (event, EVENTS)
    assert EVENTS["shared read by extends"] >= 20, EVENTS
    for event in MOVES:
        assert EVENTS[f"{event} under a plan"] >= 10, (event, EVENTS)
    assert EVENTS["state loaded"] >= 25, EVENTS
    for event, least in (("load in part", 50), ("load", 25), ("eviction of what the host has", 100)):
        assert EVENTS[event] >= least, (event, EVENTS)


@pytest.mark.long_unless(kept=lambda given: given["seed"] in (0, 1, 3))
@pytest.mark.parametrize("seed", range(8))
def test_random_walk_among_followers(seed: int) -> None:
    sizes = Sizes(num_slots=90, num_rows=12, max_running=8, chunk=16 + seed % 2 * 16, families=True, drops=True)
    world = World(replace(sizes, host_slots=40 if seed % 3 == 0 else 0, max_in_flight=int(seed % 5 > 0)))
    walk = Walk(world, seed, faults=4)
    for _ in range(100):
        walk.act()
    world.drain()
    assert world.events["loan"] >= 5


@pytest.mark.long_unless(kept=lambda given: (given["seed"] + given["host_slots"] // 24) % 8 == 5)
@pytest.mark.parametrize("host_slots", [0, 24, 120])
@pytest.mark.parametrize("seed", range(12))
def test_random_walk(seed: int, host_slots: int) -> None:
    world = World(random_sizes(seed, host_slots))
    walk = Walk(world, seed)
    for _ in range(100):
        walk.act()
    world.drain()


@pytest.mark.long_unless(kept=lambda given: given["seed"] < 3)
@pytest.mark.parametrize("seed", range(8))
def test_random_walk_with_forms(seed: int) -> None:
    sizes = Sizes(num_slots=48, num_rows=6, max_running=4, chunk=5, drops=True, forms=True)
    sizes = replace(sizes, max_in_flight=int(seed % 3 > 0), max_forced_rows=(64, 0, 1, 64)[seed % 4])
    world = World(replace(sizes, host_slots=24 if seed % 4 == 3 else 0))
    walk = Walk(world, seed, faults=1 + seed % 2)
    for _ in range(100):
        walk.act()
    world.drain()
    complete = [answer for answer in world.answers if answer.request.form and answer.log.finish_reason == "stop"]
    assert len(complete) >= 5


@pytest.mark.long_unless(kept=lambda given: (given["seed"], given["host_slots"]) in ((1, 0), (2, 64), (3, 9)))
@pytest.mark.parametrize("host_slots", [0, 9, 64])
@pytest.mark.parametrize("seed", range(12))
def test_random_walk_with_states(seed: int, host_slots: int) -> None:
    sizes = replace(random_sizes(seed), spare_states=(0, 1, 3, 16)[seed % 4], families=True, forms=seed % 3 == 0)
    world = World(replace(sizes, host_slots=host_slots, host_states=(2, 5, 20)[seed % 3]))
    walk = Walk(world, seed, faults=1 + seed % 2)
    for _ in range(120):
        walk.act()
    world.drain()
    if sizes.enabled and not sizes.force_miss:
        assert world.events["begins with a kept state"] >= 5
        assert world.events["state loaded"] >= 1 or host_slots < 64


def test_runs_without_torch() -> None:
    code = (
        "import sys; import tests.support.world.world as s; w = s.World(); w.submit([1, 2, 3]); w.drain(); "
        "assert 'torch' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_the_checks_see_a_lost_slot() -> None:
    world = World()
    world.slots.alloc(1)
    with pytest.raises(Violation, match="cover the pool"):
        world.check()
    assert np.array_equal(world.rows.take_changes().slots, [])
