"""Plans a batch: the order of its prompts, and the hits and time to expect. No model, no GPU, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from radixrt.arrays import Int32Array, Int64Array
from radixrt.hit_rate import CountsHits
from radixrt.limits import RunLimits
from radixrt.planning.cache_model import ModelledRun, model_run
from radixrt.planning.hints import Hint, find_hints
from radixrt.planning.prefix_order import PrefixOrder, prefix_order
from radixrt.planning.prefix_tree import PrefixTree, prefix_tree
from radixrt.planning.rehearsal import rehearse
from radixrt.planning.run_order import RunOrder, run_order
from radixrt.planning.token_store import TokenStore
from radixrt.planning.work import Work, expected_work
from radixrt.workloads.bound import DeviceSpeed, ModelShape
from radixrt.workloads.statistics import TokenStatistics

# A rehearsal with the real scheduler takes about 0.4 ms a request and 0.15 ms a pass; longer runs are modelled.
REHEARSED_PROMPTS = 2_000
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
        new_tokens: `[len(store)]` int64, expected tokens of each answer, at least one.
        order: the N prompts in lexicographic order.
        tree: of that order.
        run: the order in which they run, with what each shares with the one before it.
        statistics: token counts; its best_hit_rate is the best possible one.
    """

    store: TokenStore
    new_tokens: Int64Array
    order: PrefixOrder
    tree: PrefixTree
    run: RunOrder
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
    def pool_for_all(self) -> int:
        """Tokens of a pool that holds all prompts and answers at once, without any eviction."""
        return self.statistics.distinct_tokens + int(self._grown.sum())

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request with its answer: a pool of this size keeps all hits, one at a time."""
        return int((self._lengths + self._grown).max(initial=0))

    def pool_for(self, running: int) -> int:
        """Tokens of a pool in which `running` requests, consecutive in the run, always find room together."""
        own = self._lengths - self.run.shared + self._grown
        upto = np.concatenate([[0], np.cumsum(own)])
        first = np.arange(max(0, len(own) - running) + 1)[: len(own)]
        last = np.minimum(first + running, len(own))
        return int((upto[last] - upto[first] + self.run.shared[first]).max(initial=0))

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
            new_tokens = self.new_tokens[self.run.order]
            work = expected_work(modelled, self._lengths, self.run.shared, new_tokens, shape, speed)
        return Expectation(limits, planned, file_order, work)

    @property
    def _lengths(self) -> Int64Array:
        """Tokens of each prompt in the order of the run, `[N]`."""
        return self.store.lengths[self.run.order]

    @property
    def _grown(self) -> Int64Array:
        """Tokens of each answer that need memory, in the order of the run, `[N]`: the last one does not."""
        return self.new_tokens[self.run.order] - 1

    def _check_fits(self, limits: RunLimits) -> None:
        if self.longest_request > limits.pool_tokens:
            raise ValueError(
                f"the longest request needs {self.longest_request:,} tokens, but the pool holds "
                f"{limits.pool_tokens:,}"
            )

    def _with_smallest_pool(self, limits: RunLimits) -> RunLimits:
        """The limits with the smallest pool that gives the same run: a larger one would stay partly empty."""
        enough = int((self._lengths + self._grown).sum()) + limits.chunked_prefill_size
        return replace(limits, pool_tokens=min(limits.pool_tokens, enough))

    def _model(self, limits: RunLimits, order: Int64Array, keep: Int32Array | None) -> ModelledRun:
        return model_run(self.order, self.tree, self.store.lengths, self.new_tokens, order, limits, keep)

    def _predict(
        self, limits: RunLimits, order: Int64Array, keep: Int32Array | None
    ) -> tuple[Prediction, ModelledRun]:
        model = self._model(limits, order, keep)
        if len(self) <= REHEARSED_PROMPTS and model.timeline.passes.sum() <= REHEARSED_PASSES:
            real = rehearse(self.store, order, self.new_tokens, limits, keep)
            return Prediction(real.prompt_tokens, real.cached_tokens, is_rehearsed=True), model
        return _modelled_hits(model), model


def _modelled_hits(run: ModelledRun) -> Prediction:
    return Prediction(run.prompt_tokens, run.cached_tokens, is_rehearsed=False)


def plan_batch(store: TokenStore, new_tokens: Int64Array | int, prompts: Int64Array | None = None) -> BatchPlan:
    """Plan the prompts of a store, leaving out those without tokens.

    Args:
        new_tokens: expected tokens of each prompt's answer `[len(store)]`, or of every one: max_new_tokens, or
            a better estimate of their lengths.
        prompts: numbers of the prompts to run, ascending; None: all.
    """
    expected = np.maximum(1, np.broadcast_to(np.asarray(new_tokens, dtype=np.int64), len(store)))
    lengths = store.lengths
    prompts = np.arange(len(store)) if prompts is None else prompts
    prompts = prompts[lengths[prompts] > 0]
    order = prefix_order(store.tokens, store.offsets[prompts], store.offsets[prompts + 1], store.forget)
    order = PrefixOrder(prompts[order.order], order.shared)
    tree = prefix_tree(order)
    run = run_order(order, tree, lengths, expected)
    in_run = lengths[run.order]
    statistics = TokenStatistics(
        prompt_tokens=int(in_run.sum()),
        distinct_tokens=int((in_run - run.shared).sum()),
        best_cached_tokens=int(np.minimum(run.shared, in_run - 1).sum()),
    )
    return BatchPlan(store, expected, order, tree, run, statistics)
