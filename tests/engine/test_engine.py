"""Steps: the one loop, and what breaks it."""

from __future__ import annotations

import signal

import pytest

from radixrt.engine.driver import Driver
from radixrt.engine.parts import request_output
from radixrt.errors import SchedulerError
from radixrt.output import FinishReason
from radixrt.schedule.passes import Pass
from tests.support.world.model import VOCAB
from tests.support.world.world import Sizes, World

pytestmark = pytest.mark.usefixtures("quiet")


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
    driver = Driver(world.engine, lambda answer: request_output(answer, None))
    while not request.finished:
        with pytest.raises(KeyboardInterrupt):
            driver.step()
        world.check()
        if world.cache.passes_launched > 3:
            world.runner.launch = launch  # type: ignore[method-assign]
            break
    world.drain()
    assert request.log.finish_reason is FinishReason.LENGTH


def test_a_failed_pass_ends_its_requests_alone() -> None:
    world = World(Sizes(num_slots=120, max_running=2, num_rows=4))
    doomed = [world.submit([1, 2, 3], 5), world.submit([2, 2, 3], 5)]
    spared = world.submit([4, 4, 4], 5)
    world.step()
    world.runner.fail_run = True
    world.drain()
    assert [r.log.finish_reason for r in doomed] == [FinishReason.ERROR] * 2
    assert doomed[0].log.error == "its pass failed: SimulatedFailure: run"
    assert isinstance(doomed[0].log.cause, RuntimeError)
    assert spared.log.finish_reason is FinishReason.LENGTH
