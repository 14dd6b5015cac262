"""Ranges of a planned run: equal work, and few tokens computed twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.limits import RunLimits
from radixrt.planning.batch_plan import BatchPlan
from radixrt.planning.rehearsal import rehearse
from radixrt.planning.shards import PARTS_OF_A_RANGE, TOLERANCE, Pieces, pieces_of, shards
from radixrt.workloads.bound import DeviceSpeed, ModelShape
from tests.planning.test_batch_plan import SMALL
from tests.support.plans import planned
from tests.support.prompt_lists import prompt_lists

SHAPE = ModelShape(4, 256, 1024, 8, 2, 32, 1000, 1_024)
SPEED = DeviceSpeed(bandwidth=1e12, flops=1e14)
LIMITS = RunLimits(pool_tokens=1 << 20, max_running_requests=16, chunked_prefill_size=2048)


def pieces(plan: BatchPlan, num_replicas: int) -> Pieces:
    return pieces_of(plan, num_replicas, LIMITS, SHAPE, SPEED)


def plan_of(name: str) -> BatchPlan:
    prompts = SMALL[name]()
    return planned([p.input_ids for p in prompts], [p.max_new_tokens for p in prompts])


@given(prompt_lists(), st.integers(1, 9), st.lists(st.integers(1, 40), min_size=1))
def test_ranges_cover_the_run_once(prompts: Any, num_replicas: int, new_tokens: list[int]) -> None:
    prompts = [p for p in prompts if len(p)]
    plan = planned(prompts, np.resize(new_tokens, len(prompts)), np.resize([1, 3, 1], len(prompts)))
    of = pieces(plan, num_replicas)
    found = shards(of, num_replicas)
    bounds = found.bounds
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(of), num_replicas + 1)
    assert (np.diff(bounds) >= 0).all()
    # Each answer is in one piece.
    counts = np.bincount(of.places, of.num_answers, len(plan))
    np.testing.assert_array_equal(counts, plan.demands[plan.run.order].num_answers)
    total = of.seconds_before[-1]
    assert found.seconds.sum() >= total * (1 - 1e-9)
    # A range is off by two tolerances and half a piece at each end, or for the sake of as much that is repeated.
    off = of.seconds.max(initial=0.0) + 2 * of.repeated_seconds.max(initial=0.0)
    assert (np.diff(of.seconds_before[bounds]) <= total / num_replicas * (1 + 2 * TOLERANCE) + off + 1e-12).all()


def test_a_cut_is_where_prompts_share_least() -> None:
    """Two documents of equal work: the cut is between them, though questions share the document on both sides."""
    one, other = list(range(300)), list(range(500, 800))
    prompts = [[*doc, 1000 + 7 * i, i] for i in range(40) for doc in (one, other)]
    plan = planned(prompts, 8)
    found = shards(pieces(plan, 2), 2)
    assert found.bounds.tolist() == [0, 40, 80]
    assert found.repeated_tokens.tolist() == [0, 0]
    # With three, two cuts go through a document each.
    found = shards(pieces(plan, 3), 3)
    assert found.repeated_tokens.tolist() == [0, 300, 300]
    assert found.seconds.sum() > found.pieces.seconds_before[-1]


def test_nothing_is_repeated_that_the_cache_has() -> None:
    """Replicas load the same kept cache."""
    prompts = [[*range(100), 200 + i] for i in range(10)]
    plan = planned(prompts, 400)
    held = BatchPlan(**{**vars(plan), "held": np.full(10, 60)})
    assert shards(pieces(plan, 2), 2).repeated_tokens.tolist() == [0, 100]
    assert shards(pieces(held, 2), 2).repeated_tokens.tolist() == [0, 40]


def test_scored_tokens_are_computed_anyway() -> None:
    """What may not come from the cache is not computed once more."""
    prompts = [[*range(100), 200 + i] for i in range(10)]
    plan = planned(prompts, 400, match_limits=np.full(10, 30))
    assert shards(pieces(plan, 2), 2).repeated_tokens.tolist() == [0, 30]


def test_answers_of_one_prompt_are_split_where_they_outweigh_a_range() -> None:
    plan = planned([list(range(50)), list(range(60, 90)), list(range(100, 130))], 40, [1000, 2, 2])
    of = pieces(plan, 4)
    found = shards(of, 4)
    sizes = np.diff(of.seconds_before[found.bounds])
    assert sizes.max() < 1.05 * sizes.mean()
    split = of.places == int(np.flatnonzero(plan.run.order == 0)[0])
    assert of.is_part.tolist() == split.tolist()
    ends = np.cumsum(of.num_answers[split])
    np.testing.assert_array_equal(of.first_answers[split], np.append(0, ends[:-1]))
    assert ends[-1] == 1000
    assert of.seconds[split][1:].max() <= of.seconds.sum() / 4 / PARTS_OF_A_RANGE
    assert of.num_answers[split].max() == 2, "an eighth of what runs at once"
    of = pieces_of(plan, 4, replace(LIMITS, max_running_requests=512), SHAPE, SPEED)
    assert of.is_part.sum() <= 5 * PARTS_OF_A_RANGE, "no more than that needs"
    assert found.repeated_tokens.max() == 49, "the last token is computed by each answer"
    assert len(pieces(plan, 1)) == 3
    assert len(pieces_of(plan, 4, LIMITS, SHAPE, SPEED, split=False)) == 3
    scored = planned([list(range(50))], 40, [1000], match_limits=np.zeros(1, np.int64))
    assert len(pieces(scored, 4)) == 1, "each part would score the prompt"


def test_a_prefix_is_left_whole_where_to_compute_it_twice_would_take_longer() -> None:
    prompts = [[*range(1000), 2000 + i] for i in range(10)]
    assert shards(pieces(planned(prompts), 2), 2).repeated_tokens.sum() == 0, "one replica has all"
    assert shards(pieces(planned(prompts, 400), 2), 2).bounds[1] in (4, 5)


@pytest.mark.long_unless(kept=lambda given: given["num_replicas"] in (2, 5))
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", SMALL)
def test_hits_are_those_of_one_replica_but_for_what_is_repeated(name: str, num_replicas: int) -> None:
    """With the real scheduler and cache for each replica, in a pool that evicts and drops nothing."""
    plan = plan_of(name)
    found = shards(pieces(plan, num_replicas), num_replicas)
    whole = rehearse(plan.store, plan.run.order, plan.demands, LIMITS)
    cached = 0
    for begin, end in zip(found.bounds[:-1], found.bounds[1:], strict=True):
        order = plan.run.order[found.pieces.places[begin:end]]
        cached += rehearse(plan.store, order, plan.demands, LIMITS).cached_tokens
    assert cached == whole.cached_tokens - found.repeated_tokens.sum()
