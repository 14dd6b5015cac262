"""What passes computed becomes tokens and ends."""

from __future__ import annotations

import logging

import pytest

from radixrt.output import FinishReason
from radixrt.schedule.answer import AnswerState
from tests.support.world.world import Sizes, World


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failed passes are logged with their traces; here they are made by the thousand."""
    caplog.set_level(logging.CRITICAL, logger="radixrt.engine.engine")


def test_generated_tokens_are_cached_too() -> None:
    world = World(Sizes(num_slots=80))
    first = world.submit([1, 2, 3], 6)
    while not first.finished:
        world.step()
    history = first.progress.tokens().tolist()
    second = world.submit([*history, 4, 4], 2)
    world.drain()
    # The last sampled token has no KV; everything before it has.
    assert second.usage().cached_tokens == len(history) - 1


def test_values_that_are_not_finite_end_one_request_and_leave_no_trace() -> None:
    world = World(Sizes(num_slots=120))
    world.runner.poison_next = True
    requests = [world.submit([i, 1, 2, 3], 4) for i in range(3)]
    world.drain()
    assert sorted(str(r.log.finish_reason) for r in requests) == ["error", "length", "length"]
    bad = next(r for r in requests if r.log.finish_reason is FinishReason.ERROR)
    assert bad.log.error == "the model computed values that are not finite"
    assert bad.num_output == 0


def test_an_aborted_request_in_the_queue_and_one_that_runs() -> None:
    world = World(Sizes(num_slots=120, max_running=1))
    running, waiting = world.submit([1, 2, 3], 9), world.submit([2, 2, 2], 9)
    world.step()
    assert (running.state, waiting.state) == (AnswerState.RUNNING, AnswerState.WAITING)
    world.abort(running)
    world.abort(waiting)
    assert set(world.step()) == {running, waiting}
    world.abort(running)  # once more changes nothing
    assert world.step() == []
    world.drain()
    assert waiting.timings().first_token is None
