"""What passes computed becomes tokens and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixrt.cache.radix_tree import Namespace
from radixrt.output import FinishReason
from tests.support.world.model import continuation
from tests.support.world.walk import Walk, random_sizes
from tests.support.world.world import Sizes, World

pytestmark = pytest.mark.usefixtures("quiet")


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
    assert (world.scheduler.running, world.scheduler.waiting) == ([running], [waiting])
    world.abort(running)
    world.abort(waiting)
    assert set(world.step()) == {running, waiting}
    world.abort(running)  # once more changes nothing
    assert world.step() == []
    world.drain()
    assert waiting.timings().first_token is None


# -- drafts ------------------------------------------------------------------------------------------------


@pytest.mark.long_unless(kept=lambda given: given["seed"] in (0, 1, 3))
@pytest.mark.parametrize("seed", range(8))
def test_drafts_change_no_answer(seed: int) -> None:
    """Whatever happens beside them: each is the model's own, and positions of wrong drafts are taken back."""
    sizes = replace(random_sizes(seed, host_slots=24 * (seed % 2)), drafts=True, max_in_flight=0)
    world = World(sizes)
    walk = Walk(world, seed)
    for _ in range(100):
        walk.act()
    world.drain()
    assert world.events["draft refused"] > 5
    assert world.events["draft accepted"] > 5


def test_right_drafts_are_worth_their_passes() -> None:
    passes = []
    for drafts in (False, True):
        world = World(Sizes(num_slots=200, max_in_flight=0, drafts=drafts))
        answer = world.submit([1, 2, 3], 30)
        world.drain()
        assert answer.num_output == 30
        passes.append(world.cache.passes_launched)
    assert passes[1] < passes[0] == 30


def test_tokens_after_a_stop_are_nobody_s() -> None:
    world = World(Sizes(num_slots=200, max_in_flight=0, drafts=True))
    prompt = [1, 2, 3]
    whole = continuation(Namespace(), prompt, 30, frozenset())
    answers = [world.submit(prompt, 30, stop_ids=frozenset([token])) for token in set(whole)]
    world.drain()
    for answer in answers:
        (stop,) = answer.request.stop_ids & set(whole)
        assert answer.output_ids().tolist() == whole[: whole.index(stop) + 1]
        assert answer.log.matched == stop
