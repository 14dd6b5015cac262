"""Plans a batch: the order of its prompts, and the hits and time to expect. No model, no GPU, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from radixrt.arrays import Int32Array, Int64Array
from radixrt.hit_rate import CountsHits
from radixrt.limits import RunLimits
from radixrt.planning.cache_model import ModelledRun, model_run
from radixrt.planning.demands import Demands
from radixrt.planning.hints import Hint, find_hints
from radixrt.planning.rehearsal import rehearse
from radixrt.planning.run_order import RunOrder, run_order
from radixrt.planning.token_store import TokenStore
from radixrt.planning.work import Work, expected_work
from radixrt.prefixes.order import PrefixOrder, prefix_order
from radixrt.prefixes.tree import PrefixTree, prefix_tree
from radixrt.workloads.bound import DeviceSpeed, ModelShape
from radixrt.workloads.statistics import TokenStatistics

# A rehearsal with the real scheduler takes about 0.4 ms an answer and 0.15 ms a pass; longer runs are modelled.
REHEARSED_ANSWERS = 2_000
REHEARSED_PASSES = 20_000


@dataclass(frozen=True)
class Prediction(CountsHits):
    """Expected hits of an order of the prompts.

    Attributes:
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens expected in the cache.
        is_rehearsed: whether the real scheduler gave these numbers, rather than a model of it.
    """

    prompt_tokens: int
    cached_tokens: int
    is_rehearsed: bool


@dataclass(frozen=True)
class Expectation:
    """Expected hits and cost of a run.

    Attributes:
        limits: the run's.
        planned: hits in the planned order.
        file_order: hits if the prompts run first come, first served, in the order of the store.
        work: cost of the planned order, if the model and the card are known.
    """

    limits: RunLimits
    planned: Prediction
    file_order: Prediction
    work: Work | None


@dataclass(frozen=True)
class BatchPlan:
    """The order in which the N non-empty prompts of a store run, and what their tokens alone tell of the run.

    Attributes:
        store: the prompts.
        demands: what all prompts of the store ask for.
        order: the N prompts in lexicographic order.
        tree: of that order.
        run: the order in which they run, with what each shares with the one before it.
        held: `[N]` leading tokens of the prompt at each place of the run that the cache has at first.
        statistics: token counts; its best_hit_rate is the best possible one, with what the cache has at first.
    """

    store: TokenStore
    demands: Demands
    order: PrefixOrder
    tree: PrefixTree
    run: RunOrder
    held: Int64Array
    statistics: TokenStatistics

    def __len__(self) -> int:
        return len(self.run.order)

    @property
    def keep(self) -> Int32Array:
        """For each place in the run: tokens of its prompt that later ones need (`Request.reusable_len`), `[N]`."""
        return self.run.keep

    @cached_property
    def hints(self) -> tuple[Hint, ...]:
        """Groups of prompts whose sharing something small ruins, the worst first."""
        return tuple(find_hints(self.store, self.order, self.tree))

    @property
    def answers(self) -> int:
        """Answers to all prompts."""
        return int(self._asked.num_answers.sum())

    @property
    def expected_tokens(self) -> int:
        """Expected tokens of all answers."""
        return int((self._asked.new_tokens * self._asked.num_answers).sum())

    @property
    def is_plain(self) -> bool:
        """Whether each prompt has one answer, and none of them is scored."""
        asked = self._asked
        return bool((asked.num_answers == 1).all() and (asked.match_limits == asked.lengths - 1).all())

    @property
    def pool_for_all(self) -> int:
        """Tokens of a pool that holds all prompts and answers at once, without any eviction."""
        asked = self._asked
        return self.statistics.distinct_tokens + int((asked.grown * asked.num_answers).sum())

    @property
    def pool_beyond_held(self) -> int:
        """The same without the tokens that the cache has at first."""
        asked = self._asked
        return int((self._distinct + asked.grown * asked.num_answers).sum())

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt with an answer: a pool of this size runs all, one at a time. It keeps all
        hits of a plain plan.
        """
        return int((self._asked.lengths + self._asked.grown).max(initial=0))

    def pool_for(self, running: int) -> int:
        """Tokens of a pool in which `running` answers, consecutive in the run, always find room together."""
        asked = self._asked
        num_answers = asked.num_answers
        is_first = np.zeros(self.answers, dtype=bool)
        is_first[np.cumsum(num_answers) - num_answers] = True
        # Further answers share the whole prompt with the one before them.
        shared = np.repeat(asked.lengths, num_answers)
        own = np.repeat(asked.grown, num_answers)
        own[is_first] += asked.lengths - self.run.shared
        shared[is_first] = self.run.shared
        upto = np.concatenate([[0], np.cumsum(own)])
        first = np.arange(max(0, len(own) - running) + 1)[: len(own)]
        last = np.minimum(first + running, len(own))
        return int((upto[last] - upto[first] + shared[first]).max(initial=0))

    def predict(self, limits: RunLimits) -> Prediction:
        """Hits of the planned order within `limits`, modelled: some 10 us a prompt.

        Raises:
            ValueError: the pool does not hold the longest request.
        """
        self._check_fits(limits)
        modelled = self._model(self._with_smallest_pool(limits), self.run.order, self.keep)
        return _modelled_hits(modelled)

    def expect(
        self, limits: RunLimits, shape: ModelShape | None = None, speed: DeviceSpeed | None = None
    ) -> Expectation:
        """Hits of a run within `limits`; with a model's shape and a card's speed, also its cost.

        Short runs are rehearsed with the real scheduler. Others are modelled, which differs by less than a percent
        in hits (docs/lab-notebook/2026-11-22-planning-batches.md).

        Raises:
            ValueError: the pool does not hold the longest request.
        """
        self._check_fits(limits)
        smallest = self._with_smallest_pool(limits)
        planned, modelled = self._predict(smallest, self.run.order, self.keep)
        file_order, _ = self._predict(smallest, np.sort(self.run.order), None)
        work = None
        if shape is not None and speed is not None:
            asked = self._asked
            above = np.empty(len(self.store), dtype=np.int64)
            above[self.order.order] = self.tree.depth[self.tree.leaf_parent]
            private = asked.lengths - above[self.run.order]
            work = expected_work(modelled, asked, self._distinct, private, shape, speed)
        return Expectation(limits, planned, file_order, work)

    def predict_without_eviction(self) -> Prediction:
        """Hits of the planned order if all that the cache has at first, and all that comes, finds room."""
        asked = self._asked
        found = np.minimum(asked.match_limits, np.maximum(self.run.shared, self.held))
        return Prediction(self.statistics.prompt_tokens, int(found.sum()), is_rehearsed=False)

    @cached_property
    def _asked(self) -> Demands:
        """What the prompts ask for, in the order of the run."""
        return self.demands[self.run.order]

    @property
    def _distinct(self) -> Int64Array:
        """Last tokens of each prompt that neither the cache has at first nor an earlier one computes, `[N]`."""
        return (self._asked.lengths - np.maximum(self.run.shared, self.held)).clip(min=0)

    def _check_fits(self, limits: RunLimits) -> None:
        if self.longest_request > limits.pool_tokens:
            raise ValueError(
                f"the longest request needs {self.longest_request:,} tokens, but the pool holds "
                f"{limits.pool_tokens:,}"
            )

    def _with_smallest_pool(self, limits: RunLimits) -> RunLimits:
        """The limits with the smallest pool that gives the same run: a larger one would stay partly empty."""
        asked = self._asked
        enough = int((asked.lengths + asked.new_tokens * asked.num_answers).sum()) + limits.chunked_prefill_size
        return replace(limits, pool_tokens=min(limits.pool_tokens, enough))

    def _model(self, limits: RunLimits, order: Int64Array, keep: Int32Array | None) -> ModelledRun:
        return model_run(self.order, self.tree, self.demands, order, limits, keep)

    def _predict(
        self, limits: RunLimits, order: Int64Array, keep: Int32Array | None
    ) -> tuple[Prediction, ModelledRun]:
        model = self._model(limits, order, keep)
        if self.answers <= REHEARSED_ANSWERS and model.timeline.passes.sum() <= REHEARSED_PASSES:
            real = rehearse(self.store, order, self.demands, limits, keep)
            return Prediction(real.prompt_tokens, real.cached_tokens, is_rehearsed=True), model
        return _modelled_hits(model), model


def _modelled_hits(run: ModelledRun) -> Prediction:
    return Prediction(run.prompt_tokens, run.cached_tokens, is_rehearsed=False)


def plan_batch(
    store: TokenStore,
    demands: Demands,
    prompts: Int64Array | None = None,
    held: Callable[[Int32Array], int] | None = None,
) -> BatchPlan:
    """Plan the prompts of a store, leaving out those without tokens.

    Args:
        demands: of all prompts of the store; new_tokens are max_new_tokens, or a better estimate.
        prompts: numbers of the prompts to run, ascending; None: all.
        held: how many leading tokens of a prompt the cache has at first; None: it is empty.
    """
    lengths = store.lengths
    prompts = np.arange(len(store)) if prompts is None else prompts
    prompts = prompts[lengths[prompts] > 0]
    order = prefix_order(store.tokens, store.offsets[prompts], store.offsets[prompts + 1], store.forget)
    order = PrefixOrder(prompts[order.order], order.shared)
    tree = prefix_tree(order)
    asked = demands[order.order]
    run = run_order(order, tree, asked)
    by_number = np.zeros(len(store), dtype=np.int64)
    if held is not None:
        by_number[order.order] = _held(store, order, held)
    statistics = TokenStatistics(
        prompt_tokens=int(lengths[prompts].sum()),
        distinct_tokens=int((lengths[run.order] - run.shared).sum()),
        best_cached_tokens=_best_cached(tree, asked, by_number[order.order]),
    )
    return BatchPlan(store, demands, order, tree, run, by_number[run.order], statistics)


def _held(store: TokenStore, order: PrefixOrder, held: Callable[[Int32Array], int]) -> Int64Array:
    """Leading tokens of the prompt at each place of the order that the cache has, `[N]`."""
    found, before = [], 0
    for prompt, shared in zip(order.order.tolist(), order.shared.tolist(), strict=True):
        if before >= shared:  # otherwise the cache differs from both prompts at the same token
            before = held(store[prompt])
        found.append(before)
    return np.array(found, dtype=np.int64)


def _best_cached(tree: PrefixTree, asked: Demands, held: Int64Array) -> int:
    """The most prompt tokens that a cache of any size can serve in any order of the prompts.

    Each prompt computes what is beyond its limit. If one with the lowest limit below a node runs first, as in a
    `run_order`, each other token is computed once, if it is not held.

    Args:
        asked, held: by the place of each prompt in the order, `[N]`.
    """
    above = tree.leaf_parent
    depth = np.concatenate([tree.depth, asked.lengths])
    start = np.concatenate([tree.depth - tree.num_tokens, tree.depth[above]])
    lowest_limit = np.concatenate([tree.least_below(asked.match_limits), asked.match_limits])
    held = np.concatenate([tree.greatest_below(held), held])
    once = np.minimum(depth, lowest_limit) - np.maximum(start, held)
    return int(asked.match_limits.sum() - once.clip(min=0).sum())
