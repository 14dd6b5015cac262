"""Hit rates of hybrid models on whole lists: the real scheduler beside the best possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from radixrt.bench.catalogue import SCALES
from radixrt.limits import RunLimits
from radixrt.planning.rehearsal import rehearse
from radixrt.schedule.policy import SchedulePolicy
from radixrt.workloads import lists
from radixrt.workloads.lists import WorkloadPrompt
from scripts.bench_batch_plan import plan_of, random_tree

FEW = ("fewshot", "samples", "rollouts", "odd depths", "random depths")
LISTS: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    name: partial(getattr(lists, name), **SCALES["cpu"].sizes[name])
    for name in (*FEW[:3], "docqa", "system_prompt", "judging", "documents", "classification")
} | {
    "odd depths": lambda: random_tree(11, (2, 3, 4, 4), ((37, 37), (64, 64), (232, 232), (5, 60)), (1, 20)),
    "random depths": lambda: random_tree(12, (2, 3, 4, 4), ((11, 151),) * 3 + ((5, 60),), (1, 20)),
}
RUNNING, CHUNK, STATES = 16, 128, 64  # the last beside those of rows


@pytest.mark.long_unless(kept=lambda given: given["name"] in FEW)
@pytest.mark.parametrize("name", LISTS)
def test_hits_are_the_best_possible(name: str) -> None:
    """In the planned order with any pool that holds what runs; in the file's, nearly so if the pool holds all; and
    by longest match, as requests are served that come by themselves.
    """
    plan = plan_of(LISTS[name]())
    best = plan.statistics.best_hit_rate
    for pool in (plan.pool_for_all + plan.longest_request, plan.pool_for(RUNNING)):
        limits = RunLimits(pool, RUNNING, CHUNK)
        limits = replace(limits, num_states=limits.of_pass.num_rows + STATES)
        planned = rehearse(plan.store, plan.run.order, plan.demands, limits, plan.keep).hit_rate
        in_file = np.arange(len(plan))
        by_file = rehearse(plan.store, in_file, plan.demands, limits).hit_rate
        assert planned >= 0.99 * best, pool
        assert by_file >= 0.95 * best or pool < plan.pool_for_all, pool
        for order in (plan.run.order, in_file):
            matched = rehearse(plan.store, order, plan.demands, limits, policy=SchedulePolicy.LPM).hit_rate
            assert matched >= 0.9 * best, pool
