"""Plans of batches: statistics, memory, hits with the real scheduler, predictions, work."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.arrays import Int32Array
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.limits import RunLimits
from radixrt.planning import batch_plan, rehearsal, simulated
from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.planning.cache_model import ModelledRun, model_run
from radixrt.planning.demands import Demands
from radixrt.planning.rehearsal import Rehearsal, rehearse
from radixrt.planning.token_store import TokenStore
from radixrt.schedule.answer import Answer
from radixrt.schedule.policy import SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from radixrt.workloads import token_statistics
from radixrt.workloads.bound import DeviceSpeed, ModelShape, list_bound
from radixrt.workloads.lists import WorkloadPrompt, docqa, fewshot, samples, system_prompt, unshared
from scripts.bench_batch_plan import CASES, measure_speed, random_tree
from tests.support.plans import planned
from tests.support.prompt_lists import prompt_lists

BUDGETS = (2048, 8192, 16384)

FULL: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    make.__name__: make for make in (unshared, fewshot, docqa, system_prompt, samples)
}
# The same in small, with budgets of an eighth: prefixes are as long as passes, or longer.
SMALL: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    "unshared": lambda: unshared(requests=60, prompt_len=(10, 100), new_tokens=(10, 100)),
    "fewshot": lambda: fewshot(subjects=15, questions=12, examples_len=(50, 180), question_len=(5, 15)),
    "docqa": lambda: docqa(documents=4, document_len=1000, questions=16, question_len=(5, 15), new_tokens=20),
    "system_prompt": lambda: system_prompt(requests=80, system_len=250, user_len=(4, 32), new_tokens=(8, 32)),
    "samples": lambda: samples(prompts=5, prompt_len=128, samples=12, new_tokens=64),
    "three levels": lambda: random_tree(7, (6, 5, 6), ((20, 60), (10, 50), (1, 30)), (1, 40)),
    "a chain": lambda: chain(60, 5),
}


def chain(links: int, length: int) -> list[WorkloadPrompt]:
    """Each prompt goes on where another one ends, as turns of a conversation do."""
    tokens = np.arange(links * length, dtype=np.int32)
    return [WorkloadPrompt(tokens[: (i * 37 % links + 1) * length], 1 + i % 7) for i in range(links)]


def plan_of(prompts: Sequence[WorkloadPrompt]) -> tuple[BatchPlan, np.ndarray]:
    new_tokens = np.array([prompt.max_new_tokens for prompt in prompts], dtype=np.int64)
    return planned([prompt.prompt_ids for prompt in prompts], new_tokens), new_tokens


def real_run(plan: BatchPlan, limits: RunLimits, *, planned: bool = True) -> Rehearsal:
    if planned:
        return rehearse(plan.store, plan.run.order, plan.demands, limits, plan.keep)
    return rehearse(plan.store, np.arange(len(plan)), plan.demands, limits)


def modelled_run(plan: BatchPlan, limits: RunLimits, *, planned: bool = True) -> ModelledRun:
    order, keep = (plan.run.order, plan.keep) if planned else (np.arange(len(plan)), None)
    return model_run(plan.order, plan.tree, plan.demands, order, limits, keep)


# -- what the tokens alone say -----------------------------------------------------------------------------


@given(prompts=prompt_lists(), new_tokens=st.integers(0, 4))
def test_statistics_are_those_of_the_prompts(prompts: list[list[int]], new_tokens: int) -> None:
    plan = planned(prompts, new_tokens)
    assert plan.statistics == token_statistics(prompts)
    assert sorted(plan.run.order.tolist()) == [i for i, prompt in enumerate(prompts) if prompt]
    assert len(plan) == len(plan.keep) == sum(map(bool, prompts))


@given(prompts=prompt_lists(), data=st.data())
def test_memory_is_that_of_requests_side_by_side(prompts: list[list[int]], data: st.DataObject) -> None:
    prompts = [prompt for prompt in prompts if prompt]
    new_tokens = [data.draw(st.integers(1, 4)) for _ in prompts]
    plan = planned(prompts, np.array(new_tokens, dtype=np.int64))
    in_run = [(prompts[i], new_tokens[i] - 1) for i in plan.run.order]
    for running in range(1, len(prompts) + 2):
        needed = 0
        for first in range(max(1, len(prompts) - running + 1)):
            together = in_run[first : first + running]
            prefixes = {tuple(prompt[: n + 1]) for prompt, _ in together for n in range(len(prompt))}
            needed = max(needed, len(prefixes) + sum(grown for _, grown in together))
        assert plan.pool_for(running) == needed
    assert plan.longest_request == plan.pool_for(1)


def test_plans_without_torch() -> None:
    code = (
        "import sys; from radixrt.planning.token_store import TokenStore; "
        "from radixrt.planning.batch_plan import plan_batch; from radixrt.limits import RunLimits; "
        "from radixrt.planning.demands import Demands; store = TokenStore.of([[1, 2, 3], [1, 2, 4]]); "
        "plan = plan_batch(store, Demands.of(store.lengths, 5)); "
        "assert plan.expect(RunLimits(20)).planned.cached_tokens == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


# -- hits with the real scheduler --------------------------------------------------------------------------


def check_planned_hits(prompts: list[WorkloadPrompt], budget: int) -> None:
    """With a pool of twice the longest request: 99 % of the best possible in the planned order."""
    plan, _ = plan_of(prompts)
    best = plan.statistics.best_hit_rate
    limits = RunLimits(2 * plan.longest_request, chunked_prefill_size=budget)
    planned, file_order = real_run(plan, limits), real_run(plan, limits, planned=False)
    print(f"best {best:.2%}, planned {planned.hit_rate:.2%}, file order {file_order.hit_rate:.2%}")
    assert planned.prompt_tokens == file_order.prompt_tokens == plan.statistics.prompt_tokens
    assert planned.hit_rate >= 0.99 * best
    assert planned.recomputed_tokens == 0
    assert file_order.hit_rate <= best
    assert modelled_run(plan, limits).cached_tokens == pytest.approx(planned.cached_tokens, rel=0.01)
    if len(plan) > 200:  # each hit of fewer weighs too much
        assert abs(modelled_run(plan, limits, planned=False).hit_rate - file_order.hit_rate) < 0.01


@pytest.mark.long_unless(kept=lambda given: given["budget"] == BUDGETS[1] // 8 or given["name"] == "three levels")
@pytest.mark.parametrize("budget", [size // 8 for size in BUDGETS])
@pytest.mark.parametrize("name", SMALL)
def test_the_planned_order_hits_what_can_be_hit(name: str, budget: int) -> None:
    check_planned_hits(SMALL[name](), budget)


@pytest.mark.long
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", FULL)
def test_the_planned_order_hits_what_can_be_hit_at_full_size(name: str, budget: int) -> None:
    check_planned_hits(FULL[name](), budget)


@pytest.mark.each_once
@pytest.mark.parametrize("running", [8, 64])
@pytest.mark.parametrize("name", SMALL)
def test_states_cost_the_planned_order_no_hits(name: str, running: int) -> None:
    """A score more than running requests have: each is kept where prompts part, before it is wanted."""
    plan, _ = plan_of(SMALL[name]())
    limits = RunLimits(2 * plan.longest_request, max_running_requests=running, chunked_prefill_size=256)
    with_states = replace(limits, num_states=limits.of_pass.own_states + 20)
    for pool_tokens in (limits.pool_tokens, 50_000):
        found = real_run(plan, replace(with_states, pool_tokens=pool_tokens))
        assert found.hit_rate >= 0.99 * plan.statistics.best_hit_rate
        assert found.recomputed_tokens == 0


def test_file_order_hits_less() -> None:
    plan, _ = plan_of(SMALL["fewshot"]())
    limits = RunLimits(2 * plan.longest_request, chunked_prefill_size=256)
    assert real_run(plan, limits, planned=False).hit_rate < 0.4 < 0.8 < real_run(plan, limits).hit_rate


@pytest.mark.each_once
@pytest.mark.long_unless(kept=lambda given: given["budget"] in (1, 16, 333, BUDGETS[0]))
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *itertools.product(("fewshot", "samples", "three levels", "a chain"), (1, 3, 16, 64, 333, *BUDGETS)),
        *itertools.product(("docqa",), (64, 333, *BUDGETS)),
    ],
)
def test_followers_wait_under_every_budget(name: str, budget: int) -> None:
    """With memory for all: nothing is computed twice but the last token of a prompt, however passes are cut."""
    prompts = SMALL[name]()
    if budget < 16:
        prompts = sorted(prompts, key=lambda prompt: len(prompt.prompt_ids))[:40]
    plan, new_tokens = plan_of(prompts)
    limits = RunLimits(int(plan.store.lengths.sum() + new_tokens.sum()), chunked_prefill_size=budget)
    for in_order in (True, False):
        run = real_run(plan, limits, planned=in_order)
        # One that is wholly cached computes its last token; in file order also where a longer one came first.
        least = plan.statistics.best_cached_tokens - (0 if in_order else len(plan))
        assert least <= run.cached_tokens <= plan.statistics.best_cached_tokens


@settings(max_examples=25)
@given(prompts=prompt_lists(), data=st.data())
def test_the_least_pool_keeps_all_hits(prompts: list[list[int]], data: st.DataObject) -> None:
    prompts = [prompt for prompt in prompts if prompt]
    new_tokens = np.array([data.draw(st.integers(0, 5)) for _ in prompts], dtype=np.int64)
    plan = planned(prompts, new_tokens)
    limits = RunLimits(
        max(1, plan.longest_request) + data.draw(st.integers(0, 20)),
        max_running_requests=data.draw(st.integers(1, 6)),
        chunked_prefill_size=data.draw(st.sampled_from([1, 3, 7, 100])),
    )
    run = real_run(plan, limits)
    assert run.cached_tokens == plan.statistics.best_cached_tokens
    assert modelled_run(plan, limits).cached_tokens == run.cached_tokens


@settings(max_examples=25, deadline=None)
@given(prompts=prompt_lists(), data=st.data())
def test_the_planned_order_is_the_best_of_all(prompts: list[list[int]], data: st.DataObject) -> None:
    """With several answers and scored prompts; and the best is what an order of all prompts brings."""
    prompts = [prompt for prompt in prompts if prompt][:6]
    each = [(data.draw(st.integers(1, 4)), data.draw(st.integers(0, len(prompt)))) for prompt in prompts]
    num_answers, limits = np.array(each, dtype=np.int64).reshape(-1, 2).T
    plan = planned(prompts, 2, num_answers, limits)
    best = max(
        (_hits(order, prompts, np.minimum(limits, plan.store.lengths - 1)) for order in _orders(len(prompts))),
        default=0,
    )
    assert plan.statistics.best_cached_tokens == best
    pool = RunLimits(plan.pool_for_all + 100, chunked_prefill_size=data.draw(st.sampled_from([3, 100])))
    run = real_run(plan, pool)
    assert plan.predict_without_eviction().cached_tokens == run.cached_tokens == best


def _orders(count: int) -> itertools.permutations[int]:
    return itertools.permutations(range(count))


def _hits(order: Sequence[int], prompts: list[list[int]], limits: np.ndarray) -> int:
    """Hits of prompts that run one after the other, with memory for all."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for i in order:
        prefixes = [tuple(prompts[i][: n + 1]) for n in range(len(prompts[i]))]
        hits += min(int(limits[i]), sum(prefix in known for prefix in prefixes))
        known |= set(prefixes)
    return hits


def test_scored_tokens_are_never_taken_from_the_cache() -> None:
    """All prompts share all but their last token: unscored ones find it, scored ones compute it."""
    head = list(range(301))
    prompts = [[*head, 400 + i] for i in range(20)]
    limits = RunLimits(100_000)
    for match_limits, hits in ((None, 19 * 301), (0, 0), (100, 19 * 100)):
        plan = planned(prompts, 2, 1, match_limits)
        assert plan.statistics.best_cached_tokens == hits
        assert plan.predict(limits).cached_tokens == hits
        assert plan.expect(limits).planned.cached_tokens == hits


def test_several_answers_run_side_by_side() -> None:
    """8 prompts with 16 answers of 50 tokens: as many passes as one answer has tokens, and its memory."""
    prompts = [np.random.default_rng(i).integers(0, 999, 64).tolist() for i in range(8)]
    plan = planned(prompts, 50, 16)
    limits = RunLimits(100_000)
    assert (plan.answers, plan.expected_tokens) == (128, 6400)
    assert plan.longest_request == 64 + 49
    assert plan.pool_for(16) == 2 * 64 + 16 * 49  # of two prompts side by side
    assert plan.pool_for(128) == plan.pool_for_all == 8 * 64 + 128 * 49
    real, model = real_run(plan, limits), modelled_run(plan, limits)
    assert (real.most_running, real.recomputed_tokens) == (128, 0)
    assert model.timeline.passes.sum() == pytest.approx(real.passes, abs=2)
    assert model.timeline.running.max() == 128
    small = RunLimits(plan.longest_request + 50)
    assert plan.predict(small).cached_tokens == real_run(plan, small).cached_tokens == 0
    in_small = modelled_run(plan, small).timeline.passes.sum()
    assert in_small == pytest.approx(real_run(plan, small).passes, rel=0.15)


def test_a_chain_is_modelled_in_linear_time() -> None:
    steps = []
    for links in (1000, 4000):
        plan = planned([range(link + 1) for link in range(links)], 2)
        began = time.process_time()
        run = modelled_run(plan, RunLimits(plan.longest_request + 10))
        steps.append(time.process_time() - began)
        assert run.cached_tokens == plan.statistics.best_cached_tokens
    assert steps[1] < 10 * steps[0] + 0.1


@settings(max_examples=25, deadline=None)
@given(prompts=prompt_lists(), cached=prompt_lists(), data=st.data())
def test_what_the_cache_has_at_first_is_found(
    prompts: list[list[int]], cached: list[list[int]], data: st.DataObject
) -> None:
    prompts = [prompt for prompt in prompts if prompt]
    known = {tuple(prompt[: n + 1]) for prompt in cached for n in range(len(prompt))}

    def held(prompt: np.ndarray) -> int:
        return sum(tuple(prompt[: n + 1].tolist()) in known for n in range(len(prompt)))

    store = TokenStore.of(prompts)
    plan = plan_batch(store, Demands.of(store.lengths, 1), held=held)
    assert plan.held.tolist() == [held(store[i]) for i in plan.run.order]
    assert plan.statistics.best_cached_tokens == token_statistics(prompts, cached).best_cached_tokens
    assert plan.predict_without_eviction().cached_tokens == plan.statistics.best_cached_tokens
    limits = np.array([data.draw(st.integers(0, len(prompt))) for prompt in prompts], dtype=np.int64)
    scored = plan_batch(store, Demands.of(store.lengths, 1, match_limits=limits), held=held)
    assert scored.predict_without_eviction().cached_tokens == scored.statistics.best_cached_tokens


def test_many_requests_are_never_objects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In windows, with the same hits and passes as all at once."""
    plan, _ = plan_of(SMALL["three levels"]() * 12)
    waiting: list[int] = []
    submit_all = Scheduler.submit_all

    def watched(self: Scheduler, requests: list[Request], **_: object) -> list[Answer]:
        answers = submit_all(self, requests)
        waiting.append(len(self.waiting))
        return answers

    monkeypatch.setattr(Scheduler, "submit_all", watched)
    monkeypatch.setattr(simulated, "SchedulerConfig", partial(SchedulerConfig, max_ranked=10))
    limits = RunLimits(3000, max_running_requests=8, chunked_prefill_size=64)
    all_at_once = real_run(plan, limits)
    assert max(waiting) == len(plan)
    waiting.clear()
    monkeypatch.setattr(rehearsal, "SUBMITTED_AT_ONCE", 50)
    assert real_run(plan, limits) == all_at_once
    assert max(waiting) < 60 < len(plan)


# -- what nobody needs any more ----------------------------------------------------------------------------


def test_what_no_later_prompt_needs_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = plan_of(SMALL["three levels"]())
    held: list[int] = []
    passes = PrefixCache.pass_ended

    def watched(self: PrefixCache, spoilt: Int32Array) -> None:
        passes(self, spoilt)
        held.append(self.tree.evictable_tokens)

    monkeypatch.setattr(PrefixCache, "pass_ended", watched)
    limits = RunLimits(
        100_000, max_running_requests=1
    )  # one after the other: whoever ends is followed by the next
    real_run(plan, limits)
    assert max(held) <= plan.keep.max()
    assert held[-1] == 0
    held.clear()
    rehearse(plan.store, plan.run.order, plan.demands, limits)
    assert max(held) > 5 * plan.keep.max()


def test_what_others_that_wait_need_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was retracted comes before the one that ends: what both share is not dropped, though none after it
    needs that.
    """
    store = TokenStore.of([[1] * 20 + [2], [1] * 20 + [3]])
    order, demands = np.arange(2), Demands.of(store.lengths, np.array([30, 3]))
    retracted: list[int] = []
    next_pass = Scheduler.next_pass

    def retracting(self: Scheduler) -> object:
        batch = next_pass(self)
        first = next((one for one in self.running if one.request.index == 0), None)
        if first is not None and first.num_output == 2 and not retracted:
            self.retract(first)
            self.config = replace(self.config, max_running_requests=1)  # it waits until the other one has ended
            retracted.append(first.request.index)
        return batch

    monkeypatch.setattr(Scheduler, "next_pass", retracting)
    run = rehearse(store, order, demands, RunLimits(200), np.array([20, 0], dtype=np.int32))
    assert retracted == [0]
    # Its own prompt and its two tokens were published when it was retracted: one token at most is computed again.
    assert run.recomputed_tokens <= 2


# -- predictions -------------------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.long_unless(kept=lambda given: given["name"] != "docqa" and given["part"] in (16, 4))
@pytest.mark.parametrize("part", [16, 8, 4, 2])
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("name", ["fewshot", "three levels", "docqa"])
def test_the_model_predicts_what_the_scheduler_does(name: str, planned: bool, part: int) -> None:
    prompts = {
        "fewshot": lambda: fewshot(subjects=200, questions=10, examples_len=(40, 140), question_len=(4, 12)),
        "three levels": lambda: random_tree(7, (12, 10, 20), ((20, 60), (10, 50), (1, 30)), (1, 40)),
        "docqa": lambda: docqa(documents=60, document_len=400, questions=40, question_len=(2, 6), new_tokens=32),
    }[name]()
    plan, _ = plan_of(prompts)
    limits = RunLimits(max(2 * plan.longest_request, plan.statistics.distinct_tokens // part))
    real, model = real_run(plan, limits, planned=planned), modelled_run(plan, limits, planned=planned)
    assert abs(model.hit_rate - real.hit_rate) < 0.01
    assert model.timeline.passes.sum() == pytest.approx(real.passes, rel=0.1)


@pytest.mark.parametrize(
    ("count", "steps", "length", "new", "most"),
    [pytest.param(500, 12, 60, 1, 163, id="proofs"), pytest.param(60, 25, 80, 16, 390, id="conversations")],
)
def test_chains_take_the_passes_that_their_tokens_need(
    count: int, steps: int, length: int, new: int, most: int
) -> None:
    """In a pool of four of the longest requests: 1.3 times the passes that fill it, and the plan knows them."""
    rng = np.random.default_rng(0)
    chains = [rng.integers(0, 30_000, steps * length).astype(np.int32) for _ in range(count)]
    store = TokenStore.of([chain[: length * (k + 1)] for chain in chains for k in range(steps)])
    demands = Demands.of(store.lengths, new)
    plan = plan_batch(store, demands)
    limits = RunLimits(4 * plan.longest_request)
    real = rehearse(store, plan.run.order, demands, limits, plan.keep)
    assert real.passes <= most
    assert real.hit_rate == plan.statistics.best_hit_rate
    assert plan.predict(limits).hit_rate == real.hit_rate
    model = model_run(plan.order, plan.tree, demands, plan.run.order, limits, plan.keep)
    assert model.timeline.passes.sum() == pytest.approx(real.passes, rel=0.05)


def test_short_runs_are_rehearsed_and_long_ones_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = plan_of(SMALL["fewshot"]())
    limits = RunLimits(1000, chunked_prefill_size=64)
    found = plan.expect(limits)
    assert found.planned.is_rehearsed
    assert found.file_order.is_rehearsed
    assert found.planned.hit_rate == real_run(plan, limits).hit_rate
    assert found.file_order.cached_tokens == real_run(plan, limits, planned=False).cached_tokens
    monkeypatch.setattr(batch_plan, "REHEARSED_PASSES", 10)
    found = plan.expect(limits)
    assert not found.planned.is_rehearsed
    assert found.file_order.cached_tokens == modelled_run(plan, limits, planned=False).cached_tokens
    monkeypatch.setattr(batch_plan, "REHEARSED_PASSES", 10**9)
    monkeypatch.setattr(batch_plan, "REHEARSED_ANSWERS", 10)
    assert not plan.expect(limits).planned.is_rehearsed


def test_a_pool_of_any_size_is_rehearsed_as_one_that_holds_all() -> None:
    plan, _ = plan_of(SMALL["fewshot"]())
    assert plan.expect(RunLimits(10**12)).planned.hit_rate == plan.statistics.best_hit_rate


def test_a_pool_that_does_not_hold_the_longest_request_is_refused() -> None:
    plan, _ = plan_of(SMALL["fewshot"]())
    with pytest.raises(ValueError, match=f"needs {plan.longest_request:,} tokens, but the pool holds 100"):
        plan.expect(RunLimits(100))
    plan.expect(RunLimits(plan.longest_request))


# -- work --------------------------------------------------------------------------------------------------

H200 = DeviceSpeed(bandwidth=4.26e12, flops=790e12)
QWEN3 = ModelShape(28, 1024, 3072, 16, 8, 128, 151936, 114_688)
LLAMA = ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 131_072)

# Seconds that the engine took on an H200, at both shapes: docs/lab-notebook/2026-11-22-five-lists.md.
MEASURED = {
    "unshared": (5.27, 13.50),
    "fewshot": (0.60, 3.49),
    "docqa": (0.74, 2.68),
    "system_prompt": (1.38, 5.18),
    "samples": (3.40, 9.63),
}


@pytest.mark.long_unless(kept=lambda given: given["name"] in ("fewshot", "docqa"))
@pytest.mark.parametrize("name", FULL)
def test_time_is_where_the_engine_was(name: str) -> None:
    prompts = FULL[name]()
    plan, new_tokens = plan_of(prompts)
    for shape, seconds in zip((QWEN3, LLAMA), MEASURED[name], strict=True):
        work = plan.expect(RunLimits(900_000), shape, H200).work
        assert work is not None
        at_peak = work.prefill_seconds + work.decode_seconds
        assert at_peak == pytest.approx(list_bound(prompts, shape, H200), rel=0.1)
        assert work.min_seconds <= at_peak
        least, most = work.expected_seconds
        assert least <= seconds <= most
        assert most < 4 * least
        assert work.computed_tokens == plan.statistics.distinct_tokens + wholly_cached(plan)
        assert work.generated_tokens == new_tokens.sum()


def wholly_cached(plan: BatchPlan) -> int:
    return int((plan.run.shared == plan.store.lengths[plan.run.order]).sum())


# One layer of 42 weights, a head of 10, KV of 8 bytes, 16 operations a pair of tokens: see test_workloads.
TOY = ModelShape(1, 2, 3, 2, 1, 2, 5, 8)


def test_work_of_two_prompts() -> None:
    plan = planned([[1, 2, 3], [1, 2, 4]], 1)
    work = plan.expect(RunLimits(50), TOY, DeviceSpeed(1e30, 1.0)).work
    assert work is not None
    assert (work.computed_tokens, work.generated_tokens) == (4, 2)
    assert work.prefill_seconds == 4 * 84 + 9 * 16 + 2 * 20
    alone = planned([[1, 2, 3], [1, 2, 4]], 0).expect(RunLimits(50), TOY, DeviceSpeed(1e30, 1.0)).work
    assert alone == replace(work, generated_tokens=0)
    quantised = plan.expect(RunLimits(50), replace(TOY, layers_in_e4m3=True), DeviceSpeed(1e30, 1.0)).work
    assert quantised is not None
    assert quantised.prefill_seconds == 4 * 42 + 9 * 16 + 2 * 20


def test_fewer_requests_at_once_take_longer() -> None:
    plan, _ = plan_of(SMALL["system_prompt"]())
    seconds = []
    for running in (80, 40, 5):
        work = plan.expect(RunLimits(100_000, max_running_requests=running), QWEN3, H200).work
        assert work is not None
        seconds.append(work.decode_seconds)
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[2] > 4 * seconds[0]


def test_long_answers_first_leave_no_tail() -> None:
    """What runs alone at the end is short: fewer passes than with the long answer last."""
    prompts = [WorkloadPrompt(np.array([i, 1], dtype=np.int32), 500 if i == 70 else 20) for i in range(100)]
    plan, _ = plan_of(prompts)
    limits = RunLimits(1000, max_running_requests=10)
    assert real_run(plan, limits).passes < 520 < 600 < real_run(plan, limits, planned=False).passes


# -- speed and memory --------------------------------------------------------------------------------------


@pytest.mark.long_unless(kept=lambda given: given["case"] in ("groups of 100", "one long prefix"))
@pytest.mark.parametrize("case", CASES)
def test_planning_is_quick(case: str) -> None:
    speed = measure_speed(case, 2_000 if case != "one long prefix" else 400)
    assert speed.plan + speed.hints < 3
    assert speed.memory < 400e6


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_planning_a_hundred_thousand_prompts_is_quick(case: str) -> None:
    speed = measure_speed(case, 100_000 if case != "one long prefix" else 20_000)
    print(speed)
    assert speed.plan + speed.hints + speed.model < 20  # about 3 on a core that has nothing else to do
    assert speed.memory < 1e9
