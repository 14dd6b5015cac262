"""A run without a model: the real scheduler and cache, and a runner that computes nothing.

All that decides about hits is real, so they are those of a run whose answers have the expected lengths. No more
requests exist at a time than the scheduler looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from radixrt.arrays import Int32Array, Int64Array
from radixrt.hit_rate import CountsHits
from radixrt.limits import RunLimits
from radixrt.planning.demands import Demands
from radixrt.planning.simulated import DistinctRunner, simulated_engine
from radixrt.planning.token_store import TokenStore
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.policy import SchedulePolicy
from radixrt.schedule.request import Request

SUBMITTED_AT_ONCE = 2048  # requests, whenever fewer wait than the scheduler looks at


@dataclass(frozen=True)
class Rehearsal(CountsHits):
    """What a run would do.

    Attributes:
        prompt_tokens, cached_tokens: of all prompts, and those of them that are found in the cache.
        recomputed_tokens: tokens that are computed again after a retraction.
        passes: passes that it takes.
        most_running: the most requests that run at once.
    """

    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    passes: int
    most_running: int


def rehearse(
    store: TokenStore,
    order: Int64Array,
    demands: Demands,
    limits: RunLimits,
    keep: Int32Array | None = None,
    policy: SchedulePolicy = SchedulePolicy.FCFS,
) -> Rehearsal:
    """Run the prompts of a store, each of which comes by itself, in the given order.

    Args:
        order: `[N]` numbers of prompts, none of them empty.
        demands: of all prompts of the store.
        keep: `[N]` leading tokens of the prompt at each place that prompts after it need; None: nobody knows.
        policy: how those that wait are ranked.

    Raises:
        ValueError: a request does not fit in the pool.
    """
    asked = demands[order]
    longest = int((asked.lengths + asked.new_tokens).max(initial=1))
    engine = simulated_engine(DistinctRunner(), limits, longest, policy)
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    batches = _requests(store, order, asked, keep)
    passes = most_running = 0
    while True:
        if len(scheduler.waiting) < scheduler.config.max_ranked:
            for request in next(batches, ()):
                engine.submit_all([request])
        if not engine.has_work:
            break
        engine.step()
        passes = cache.passes_launched
        most_running = max(most_running, scheduler.num_running)
    return Rehearsal(cache.prompt_tokens, cache.cached_tokens, cache.recomputed_tokens, passes, most_running)


def _requests(
    store: TokenStore, order: Int64Array, asked: Demands, keep: Int32Array | None
) -> Iterator[list[Request]]:
    params_of = cache(_params)  # to check them takes as long as a tenth of a request's way
    for first in range(0, len(order), SUBMITTED_AT_ONCE):
        places = range(first, min(first + SUBMITTED_AT_ONCE, len(order)))
        yield [
            Request(
                index=place,
                prompt_ids=store[order[place]],
                params=params_of(int(asked.num_answers[place]), int(asked.match_limits[place])),
                max_new_tokens=int(asked.new_tokens[place]),
                seed=0,
                reusable_len=None if keep is None else int(keep[place]),
            )
            for place in places
        ]


def _params(num_answers: int, match_limit: int) -> SamplingParams:
    """Parameters with which the prompt's tokens after the limit are scored; the last one needs none."""
    return SamplingParams(n=num_answers, prompt_logprobs=0, prompt_logprobs_start=match_limit + 1)
