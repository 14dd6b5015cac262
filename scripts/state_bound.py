"""How much any rule can find that keeps so many states of prefixes, if requests begin in a given order."""

from __future__ import annotations

import sys

import numpy as np

from radixrt.arrays import Int64Array
from radixrt.planning.batch_plan import BatchPlan
from scripts.state_rules import paths_of

ROUNDS = 1000


def most_found(plan: BatchPlan, order: Int64Array, num_kept: int) -> float:
    """The most prompt tokens that can be found, whatever is kept, by who knows all that comes.

    A request leaves states at all nodes of its path for nothing, and begins with one that was kept since the last
    request there. What is kept is a linear program: one of these for each request, and no more than `num_kept` of
    all while any request begins, its own included. Its dual, with a price for a place at each time, is an upper
    bound whatever the prices are. They go up where too much is kept, and down elsewhere.
    """
    paths, limits = paths_of(plan), plan.demands.match_limits
    before, uses = dict[int, int](), list[tuple[int, int, int]]()  # from which place to which; what it saves
    for place, number in enumerate(order.tolist()):
        for node, end in paths[number]:
            if node in before:
                uses.append((before[node], place, min(end, int(limits[number]))))
            before[node] = place
    if not uses:
        return 0.0
    first, last, saved = np.array(uses).T
    begins = np.flatnonzero(np.diff(last, prepend=-1))  # of what each request may begin with
    choices = np.diff(np.append(begins, len(uses)))
    prices, least = np.zeros(len(order)), np.inf
    for number in range(ROUNDS):
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        gains = saved - (paid[last + 1] - paid[first + 1])
        best = np.maximum.reduceat(gains, begins)
        least = min(least, np.maximum(best, 0).sum() + num_kept * prices.sum())
        chosen = np.flatnonzero((gains == np.repeat(best, choices)) & (gains > 0))
        chosen = chosen[np.unique(last[chosen], return_index=True)[1]]  # one each
        changes = np.bincount(first[chosen] + 1, minlength=len(order) + 1).astype(np.int64)
        changes -= np.bincount(last[chosen] + 1, minlength=len(order) + 1)
        excess = np.cumsum(changes)[:-1] - num_kept
        prices = np.maximum(0, prices + 3 / (1 + number / 50) * excess / num_kept)
    return float(least)


if __name__ == "__main__":
    sys.exit("this is a part of scripts/compare_state_rules.py: run that")
